"""``sm120tune verify``: SGLang's own call, with a pair and without."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from sm120tune.cli.layer import ModelOrNumbers, experts_and_inter
from sm120tune.cli.model import check_force, check_no_numbers, model_options
from sm120tune.cli.options import (
    batch_sizes,
    given_or,
    layer_options,
    place_options,
    scale_options,
)
from sm120tune.cli.report import ratio_cells, result_console
from sm120tune.cli.targets import LayerOptions
from sm120tune.devices import LocalGPU, busy_reason, local_gpus
from sm120tune.errors import UserError
from sm120tune.install import find_pairs, find_place
from sm120tune.install.pair import ConfigPair
from sm120tune.measure.routing import ROUTING_CHOICES, parse_routing
from sm120tune.problem import MoEProblem
from sm120tune.provenance import UNKNOWN_ROUTING
from sm120tune.quantization import DTYPES
from sm120tune.resolve import check_memory
from sm120tune.search.ladder import gaps
from sm120tune.verify import Judged, Verdict, VerifyOptions, verify_pair
from sm120tune.verify.installed import Wanted, installed_pair


@dataclass(frozen=True, kw_only=True)
class _Options(ModelOrNumbers):
    files: tuple[Path, ...]
    sglang: Path | None
    config_dir: Path | None
    batch_sizes: tuple[int, ...]
    routing: str | None
    gpu: int | None
    seed: int
    preload: Path | None
    as_json: bool


@click.command("verify", context_settings={"show_default": True})
@click.argument("files", nargs=-1, metavar="[FILE|FOLDER]...", type=click.Path(path_type=Path))
@model_options
@layer_options(DTYPES, "the installed pair's", "the installed pair's")
@scale_options
@place_options
@click.option(
    "--batch-sizes",
    callback=batch_sizes,
    show_default=False,
    help="Values of M, keys or not.  [default: every key, and the last M that each key serves]",
)
@click.option(
    "--routing",
    help=f"{ROUTING_CHOICES}.  [default: the pair's own]",
)
@click.option("--gpu", type=int, help="Index of the GPU.  [default: the first of the pair's card]")
@click.option("--seed", type=int, default=100, help="Seed of data and routing.")
@click.option(
    "--preload",
    type=click.Path(path_type=Path),
    help="Python file whose load() makes fused_moe import and returns it first, where SGLang's dependencies lack.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def verify_command(**options: Any) -> int:
    """Run SGLang's own fused_moe with a pair and without it: loaded, right, and no slower?

    Give a file of a pair, its folder or the --output of a run; or a model or its numbers for the pair that is
    installed.
    """
    return _verify(_Options(**options))


def _verify(options: _Options) -> int:
    if options.seed < 0:
        raise UserError(f"--seed must be 0 or more, not {options.seed}")
    check_force(options.model, force=options.force)
    if bool(options.files) == bool(options.layer):
        both = f"{options.files[0]} and {options.layer[0]}: " if options.files else ""
        raise UserError(f"{both}give either a pair's file or, for an installed pair, --model or --experts and --inter")
    if options.preload is not None and not options.preload.is_file():
        raise UserError(f"--preload {options.preload}: no such file")
    pairs = [(pair, layer) for pair in find_pairs(options.files) for layer in pair.record.problems]
    place = find_place(options.sglang, options.config_dir or _served_folder())
    gpus = local_gpus()
    pairs = pairs or [installed_pair(place, _wanted(options), {gpu.spec.file_name for gpu in gpus})]
    plans = [(pair, _plan(pair, layer, options, gpus)) for pair, layer in pairs]
    console = result_console()
    judged = []
    for pair, plan in plans:
        where = f"GPU {plan.gpu.index}, SGLang {place.tree.version}, {len(plan.batch_sizes)} M"
        _tell(f"{pair.ladder.up_name} for {plan.problem} on {where}")
        judged.append(verify_pair(pair, place, plan, lambda verdict: _tell(f"M={verdict.m}: {verdict.word.value}")))
        if not options.as_json:
            _show(console, judged[-1])
    if options.as_json:
        print(json.dumps({"pairs": [_judged_json(item) for item in judged]}, indent=4))
    return 0 if all(item.holds for item in judged) else 1


def _served_folder() -> Path | None:
    folder = os.environ.get("SGLANG_MOE_CONFIG_DIR")
    return Path(folder) if folder else None


def _wanted(options: _Options) -> Wanted:
    if options.model is not None:
        check_no_numbers("--model")
        tp, ep = given_or(options.tp, 1), given_or(options.ep, 1)
        (target,) = LayerOptions(options.model, options.force, tp=(tp,), ep=ep).targets()
        for note in target.notes:
            _tell(note)
        return Wanted(target.problem)
    experts, inter = experts_and_inter(options.experts, options.inter)
    # Any that is allowed stands for one that was not given.
    hidden = options.shape[1] if options.shape is not None else 1
    problem = options.problem(experts=experts, inter=inter, hidden=hidden, topk=1, dtype=options.dtype or "bf16")
    unsaid = {name for name in ("hidden", "topk", "dtype") if getattr(options, name) is None}
    # The name of a file does not say these, and neither need who asks for the file.
    return Wanted(problem, frozenset(unsaid | {"router_experts", "shared_experts"}))


def _plan(pair: ConfigPair, layer: MoEProblem, options: _Options, gpus: tuple[LocalGPU, ...]) -> VerifyOptions:
    gpu = _gpu(pair, options.gpu, gpus)
    sizes = options.batch_sizes or tuple(sorted({*pair.up_rows, *(gap.last_below for gap in gaps(list(pair.up_rows)))}))
    check_memory(layer, max(sizes), (gpu,))
    tuned_with = next((row.routing for row in pair.record.rows if row.routing != UNKNOWN_ROUTING), "uniform")
    routing = str(parse_routing(options.routing or tuned_with))
    busy = busy_reason(gpu)
    if busy is not None:
        _tell(f"warning: {busy}")
    return VerifyOptions(gpu, layer, sizes, routing, options.seed, options.preload, installed=not options.files)


def _gpu(pair: ConfigPair, index: int | None, gpus: tuple[LocalGPU, ...]) -> LocalGPU:
    if not gpus:
        raise UserError("verify runs SGLang's call on a GPU, and torch sees none here; `sm120tune check` needs none")
    chosen = [gpu for gpu in gpus if index is None or gpu.index == index]
    if not chosen:
        raise UserError(
            f"--gpu {index}: there is no such GPU here (there are: {', '.join(str(g.index) for g in gpus)})"
        )
    fitting = [gpu for gpu in chosen if gpu.spec.name == pair.device_name]
    if not fitting:
        raise UserError(
            f"{pair.up_path} is for {pair.device_name}, GPU {chosen[0].index} is a {chosen[0].spec.name}: SGLang does "
            "not ask for this file here; verify it on that card"
        )
    return fitting[0]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(console: Any, judged: Judged) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in judged.versions.items())
    title = f"{judged.pair.ladder.up_name}, {judged.problem} ({versions})"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("M", "without", "with", "ratio", "interval", "error", "loaded", "verdict"):
        table.add_column(column, justify="left" if column in {"loaded", "verdict"} else "right", no_wrap=True)
    for verdict in judged.verdicts:
        table.add_row(*_cells(verdict))
    console.print(table)
    fallen = [verdict.m for verdict in judged.verdicts if not verdict.holds]
    counts = itertools.groupby(sorted(judged.verdicts, key=lambda verdict: verdict.word), key=lambda one: one.word)
    words = ", ".join(f"{len(list(group))} {word.value}" for word, group in counts)
    console.print(f"{'the pair holds' if not fallen else f'look at M={fallen}'}: {words}")


def _cells(verdict: Verdict) -> tuple[str, ...]:
    return (
        str(verdict.m),
        "fails" if verdict.without_us is None else f"{verdict.without_us:.1f} us",
        "fails" if verdict.with_us is None else f"{verdict.with_us:.1f} us",
        *ratio_cells(verdict.ratio),
        "" if verdict.error is None else f"{verdict.error.relative:.4f}",
        "yes" if verdict.loaded else "no",
        verdict.word.value + (f": {verdict.note}" if verdict.note else ""),
    )


def _judged_json(judged: Judged) -> dict[str, Any]:
    return {
        "file": str(judged.pair.up_path),
        "problem": judged.problem.to_json(),
        "device": judged.pair.device_name,
        "versions": judged.versions,
        "holds": judged.holds,
        "rows": [verdict.to_json() for verdict in judged.verdicts],
    }
