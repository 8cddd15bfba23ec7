"""``sm120tune check``: will a server use the files as meant, and can the card run them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from sm120tune.check import Finding, Level, Report
from sm120tune.check.files import Context, check_files
from sm120tune.check.folders import sources_of, tree_sources
from sm120tune.check.names import ASSUMED_HIDDEN, ASSUMED_TOPK, QUANTIZED
from sm120tune.check.resources import Resources
from sm120tune.check.rules import rules_of
from sm120tune.check.server import Server, check_server
from sm120tune.check.view import ServerView
from sm120tune.cli.layer import ModelOrNumbers, experts_and_inter
from sm120tune.cli.model import given_model, model_lines, model_options
from sm120tune.cli.options import given_or, layer_options, scale_options, sglang_if_there
from sm120tune.devices import DeviceSpec, find_device, known_devices
from sm120tune.errors import UserError
from sm120tune.models import MoEModel
from sm120tune.problem import MoEProblem
from sm120tune.quantization import DTYPES, UNQUANTIZED
from sm120tune.resolve import CardRequest, resolve_card
from sm120tune.upstream import SGLangTree, find_sglang

_NAMED_DTYPES = (*UNQUANTIZED, *QUANTIZED)
"""Every dtype that a file name may stand for."""


@dataclass(frozen=True, kw_only=True)
class _Options(ModelOrNumbers):
    paths: tuple[Path, ...]
    device: str | None
    all_cards: bool
    sglang: Path | None
    max_tokens: int
    workers: int | None
    as_json: bool


@click.command("check", context_settings={"show_default": True})
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE|FOLDER]...")
@model_options
@layer_options(_NAMED_DTYPES, ASSUMED_HIDDEN, ASSUMED_TOPK)
@scale_options
@click.option(
    "--device",
    help="Card by name, blanks or underscores.  [default: the card in each file's name; with numbers the local GPU]",
)
@click.option("--all-cards", is_flag=True, help="Check the files of every known card.")
@click.option(
    "--sglang",
    type=click.Path(path_type=Path),
    help="SGLang checkout or site-packages; without files or numbers, the files that it ships for --device.",
)
@click.option("--max-tokens", type=int, default=16384, help="Largest M of the server: its prefill chunk.")
@click.option("--workers", type=int, help="Compile processes.  [default: all cores]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def check_command(**options: Any) -> int:
    """Check config files, SGLang's shipped tree, or what a server of one layer would run, without a GPU."""
    return _check(_Options(**options))


def _check(options: _Options) -> int:
    for name, value in (("--max-tokens", options.max_tokens), ("--workers", options.workers)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    numbers = options.layer
    if numbers and options.paths:
        raise UserError(f"{numbers[0]} and {options.paths[0]}: give either a layer's numbers or files, not both")
    if options.all_cards and (numbers or options.device is not None):
        raise UserError("--all-cards checks files of every card; leave out --device and the layer's numbers")
    model = given_model(options.model, force=options.force)
    tree = sglang_if_there(options.sglang) if options.paths else find_sglang(options.sglang)
    resources = Resources(tree, options.workers or os.cpu_count() or 1)
    try:
        report = _report(options, model, tree, resources, numbers=bool(numbers))
    finally:
        resources.stop()
    if options.as_json:
        print(json.dumps(_document(report, tree), indent=4))
    else:
        _show(report, tree)
    return 1 if report.count(Level.ERROR) else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _report(
    options: _Options, model: MoEModel | None, tree: SGLangTree | None, resources: Resources, *, numbers: bool
) -> Report:
    rules = rules_of(tree)
    device = find_device(options.device) if options.device is not None else None
    context = Context(
        device, options.max_tokens, rules, resources, tree.configs_dir if tree is not None else None, _tell
    )
    if numbers:
        assert tree is not None
        return check_server(_server(options, model, tree), replace(context, device=None))
    if options.paths:
        return check_files(sources_of(options.paths), context)
    assert tree is not None
    if device is None and not options.all_cards:
        raise UserError(
            "nothing to check: give files, a --model, a layer's numbers (--experts, --inter), or --sglang and --device"
        )
    cards = [device] if device is not None else known_devices()
    sources = tree_sources(tree.configs_dir, (card.file_name for card in cards))
    if not sources:
        raise UserError(f"{tree.configs_dir} has no file for {options.device}; check a layer's numbers instead")
    return check_files(sources, context)


def _server(options: _Options, model: MoEModel | None, tree: SGLangTree) -> Server:
    import triton

    problem = _problem(options, model)
    card: DeviceSpec
    if options.device is not None:
        card = find_device(options.device)
    else:
        card = resolve_card(CardRequest(None, None, None, "model")).spec
    folder = os.environ.get("SGLANG_MOE_CONFIG_DIR")
    return Server(problem, card, tree, Path(folder) if folder else None, triton.__version__)


def _problem(options: _Options, model: MoEModel | None) -> MoEProblem:
    if model is not None:
        problem = model.problem(tp=given_or(options.tp, 1), ep=given_or(options.ep, 1))
        for line in model_lines(model):
            _tell(line)
        return problem
    experts, inter = experts_and_inter(options.experts, options.inter)
    dtype = options.dtype or "bf16"
    if dtype not in _NAMED_DTYPES:
        raise UserError(f"--dtype {dtype} is unknown; choose one of {', '.join(_NAMED_DTYPES)}")
    scales = options.shape is not None or options.per_channel or options.zero_points
    if dtype not in DTYPES and scales:
        raise UserError(f"--dtype {dtype} is not quantized; drop --block-shape, --group-size and the like")
    # A name says no group: without one SGLang's rules and the formula are all there is for int4.
    known = dtype in DTYPES and (dtype != "int4_w4a16" or scales)
    problem = options.problem(
        experts=experts, inter=inter, hidden=ASSUMED_HIDDEN, topk=ASSUMED_TOPK, dtype=dtype if known else "bf16"
    )
    return problem if known else replace(problem, dtype=dtype)


def _document(report: Report, tree: SGLangTree | None) -> dict[str, Any]:
    sglang = {"version": tree.version, "package": str(tree.package)} if tree is not None else None
    return {"sglang": sglang, **report.to_json()}


def _show(report: Report, tree: SGLangTree | None) -> None:
    if tree is None:
        print("no SGLang found: its strictest release counts, and nothing is compiled", file=sys.stderr)
    else:
        print(f"SGLang {tree.version} at {tree.package}", file=sys.stderr)
    if report.server is not None:
        _show_server(report.server)
    for file in dict.fromkeys(finding.file for finding in report.findings):
        print(file or "general")
        for line in _lines(finding for finding in report.findings if finding.file == file):
            print(f"  {line}")
    counts = ", ".join(f"{report.count(level)} {level.value}" for level in Level)
    print(f"files read: {len(report.files)}; findings: {counts}")


def _lines(findings: Iterable[Finding]) -> Iterable[str]:
    order = list(Level)
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        key = f" [{finding.key}]" if finding.key else ""
        fix = f"; fix: {finding.fix}" if finding.fix else ""
        yield f"{finding.level.value:<7} {finding.code}{key}: {finding.what}{fix}"


def _show_server(view: ServerView) -> None:
    print(f"layer: {view.problem} on {view.device}")
    print(f"the server asks for {view.asked[0]}")
    print(f"                and {view.asked[1]}")
    rows = [("M", "rows", "gate_up", "takes", "down", "takes")]
    for span in view.spans:
        keys = " | ".join("default" if key is None else str(key) for key in (span.up_key, span.down_key))
        if span.pair is None:
            rows.append((span.label, keys, "cannot run", "", "", ""))
            continue
        up, down = span.pair.gate_up, span.pair.down
        rows.append((span.label, keys, str(up), str(span.gate_up), str(down), str(span.down)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
