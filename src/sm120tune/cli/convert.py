"""``sm120tune convert``: config files between vLLM and SGLang, and under another card's name."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from sm120tune.check import Finding, Level
from sm120tune.check.files import Context
from sm120tune.check.resources import Resources
from sm120tune.check.rules import rules_of
from sm120tune.convert import Converted, Layer, VllmFile, convert_to_pair, convert_to_vllm, from_sglang, from_vllm
from sm120tune.convert.pair import Wanted
from sm120tune.convert.to_vllm import Half
from sm120tune.errors import UserError
from sm120tune.upstream import find_sglang
from sm120tune.upstream.vllm import CONFIG_DIR_VARIABLE

EXIT_REFUSED = 1


@dataclass(frozen=True)
class _Options:
    file: Path
    to: str | None
    alias_device: str | None
    hidden: int | None
    topk: int | None
    per_channel: bool
    triton: str | None
    use: str | None
    output: Path
    replace: bool
    sglang: Path | None
    max_tokens: int
    as_json: bool


@click.command("convert", context_settings={"show_default": True})
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["sglang", "vllm"]), help="Whose file to make; FILE is the other's.")
@click.option("--alias-device", help="Write the pair for this card, which has the same die as the file's.")
@click.option("--hidden", type=int, help="Hidden size of the layer, where no provenance says it.")
@click.option("--topk", type=int, help="Experts per token, where no provenance says it.")
@click.option(
    "--per-channel", is_flag=True, help="The fp8_w8a8 checkpoint is quantized per channel; vLLM names it not."
)
@click.option("--triton", help="Triton that tuned the file.  [default: as the file or its folder says]")
@click.option(
    "--use",
    type=click.Choice(["up", "down"]),
    help="The rows that vLLM is to run in both GEMMs, where up and down differ.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("generated_configs"), help="Folder for the results."
)
@click.option("--replace", is_flag=True, help="Overwrite what was converted before.")
@click.option(
    "--sglang", type=click.Path(path_type=Path), help="SGLang checkout or site-packages.  [default: the importable one]"
)
@click.option("--max-tokens", type=int, default=16384, help="Largest M of the server, for the check.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def convert_command(**options: Any) -> int:
    """Convert a config file of vLLM to a pair of SGLang's, or back, or write a pair for another card.

    Nothing is measured: the provenance says so, and install asks for --allow-estimated.
    """
    return _convert(_Options(**options))


def _convert(options: _Options) -> int:
    if options.to is None and options.alias_device is None:
        raise UserError("say what to make: --to sglang, --to vllm, or --alias-device NAME for a file of SGLang's")
    if options.max_tokens < 1:
        raise UserError(f"--max-tokens must be at least 1, not {options.max_tokens}")
    if options.to == "vllm":
        if options.alias_device is not None:
            raise UserError("--alias-device is for pairs of SGLang's; leave out --to vllm")
        made = convert_to_vllm(options.file, options.output, cast("Half | None", options.use), replace=options.replace)
        _show_vllm(made, options)
        return 0
    if options.use is not None:
        raise UserError(f"--use {options.use} is for --to vllm, which has one file for both GEMMs")
    return _to_pair(options)


def _to_pair(options: _Options) -> int:
    layer = Layer(options.hidden, options.topk)
    if options.to == "sglang":
        source = from_vllm(options.file, layer, per_channel=options.per_channel)
    else:
        source = from_sglang(options.file, layer)
    tree = find_sglang(options.sglang)
    resources = Resources(tree, os.cpu_count() or 1)
    context = Context(None, options.max_tokens, rules_of(tree), resources, tell=_tell)
    wanted = Wanted(options.output, options.triton, options.alias_device, options.replace)
    try:
        converted = convert_to_pair(source, wanted, tree, context)
    finally:
        resources.stop()
    if options.as_json:
        print(json.dumps(_pair_json(converted), indent=4))
    else:
        _show_pair(converted)
    return 0 if converted.written is not None else EXIT_REFUSED


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show_pair(converted: Converted) -> None:
    for finding in converted.findings:
        if finding.level is not Level.INFO:
            print(_line(finding))
    for m, note in converted.source.notes.items():
        print(f"M={m}: {note}")
    if converted.differences:
        print(f"warning: {converted.device_name} has {converted.differences} of {converted.source.device_name}")
    if converted.written is None:
        print("nothing was written: see the errors above")
        return
    print(
        f"wrote {converted.written.up_path}\n  and {converted.written.down_path.name}, {len(converted.ladder.rows)} M"
    )
    print("nothing was measured: verify or tune on the card; install needs --allow-estimated")


def _line(finding: Finding) -> str:
    key = f" [{finding.key}]" if finding.key else ""
    fix = f"; fix: {finding.fix}" if finding.fix else ""
    return f"{finding.level.value:<7} {finding.code} {finding.file}{key}: {finding.what}{fix}"


def _show_vllm(made: VllmFile, options: _Options) -> None:
    if options.as_json:
        print(json.dumps({"file": str(made.path), "rows": made.rows, "lost": list(made.lost)}, indent=4))
        return
    for loss in made.lost:
        print(f"lost: {loss}")
    print(f"wrote {made.path}, {made.rows} M")
    print(f"serve with {CONFIG_DIR_VARIABLE}={made.path.parent}; nothing was measured in vLLM")


def _pair_json(converted: Converted) -> dict[str, Any]:
    written = converted.written
    return {
        "files": [] if written is None else [str(written.up_path), str(written.down_path)],
        "provenance": [] if written is None else [str(path) for path in written.provenance_paths],
        "from": converted.source.origin,
        "device": converted.device_name,
        "made_for": converted.source.device_name,
        "differences": converted.differences,
        "notes": {str(m): note for m, note in converted.source.notes.items()},
        "findings": [finding.to_json() for finding in converted.findings],
    }
