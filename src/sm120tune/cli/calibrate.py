"""``sm120tune calibrate``: what the first half hour on a new card should be spent on."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sm120tune.calibrate.choice import DEFAULT_TILES, Chosen, choose_tiles
from sm120tune.calibrate.run import calibrate
from sm120tune.cli import report
from sm120tune.cli.calibrate_output import Wanted, check_output, finish
from sm120tune.cli.calibrated import show_tiles
from sm120tune.cli.from_times import check_options, fit_from_times
from sm120tune.cli.layer import LayerNumbers
from sm120tune.cli.options import batch_sizes, layer_options, scale_options
from sm120tune.cli.progress import make_observer
from sm120tune.cli.targets import replay_table
from sm120tune.devices import busy_reason, find_device
from sm120tune.errors import UserError
from sm120tune.job import Job, Settings
from sm120tune.measure.cost_constants import CardClass, card_class, class_names, named_class
from sm120tune.measure.routing import ROUTING_CHOICES, parse_routing
from sm120tune.measure.table import Table
from sm120tune.problem import MoEProblem
from sm120tune.quantization import DTYPES
from sm120tune.resolve import Card, CardRequest, JobRequest, resolve_card, resolve_job
from sm120tune.tune import RunOptions

DEFAULT_PROBLEM = {"experts": 128, "inter": 768, "hidden": 2048, "topk": 8}
"""Qwen3-30B-A3B's layer: 1.1 GiB of weights fit on a small card, and recorded tables hold it."""
DEFAULT_SIZES = "1,64,4096,16384"
_LEAST_TILES = 12
_RECORDED = ("tp", "ep", "routing", "gpus")


@dataclass(frozen=True, kw_only=True)
class _Options(LayerNumbers):
    batch_sizes: tuple[int, ...]
    tiles: int
    from_class: str | None
    from_times: Path | None
    timer: str | None
    routing: str
    gpus: str | None
    sglang: Path | None
    output: Path | None
    apply: bool
    seed: int
    workers: int | None
    fresh: bool
    dry_run: bool
    quiet: bool
    as_json: bool


@click.command("calibrate", context_settings={"show_default": True})
@layer_options(DTYPES, DEFAULT_PROBLEM["hidden"], DEFAULT_PROBLEM["topk"])
@scale_options
@click.option("--batch-sizes", default=DEFAULT_SIZES, callback=batch_sizes, help="Values of M (tokens) to time.")
@click.option("--tiles", type=int, default=DEFAULT_TILES, help="How many tiles to time at each M.")
@click.option(
    "--from-class",
    help="Class of cards whose constants the fit begins with, for example sm120.  [default: the card's own]",
)
@click.option(
    "--from-times",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure nothing: fit the times of an earlier calibration's file by this release's formula.",
)
@click.option(
    "--timer", help="cuda, or replay:FILE (a recorded table stands for the card).  [default: cuda]", show_default=False
)
@click.option("--routing", default="uniform", help=f"{ROUTING_CHOICES}.")
@click.option("--gpus", help="Which local GPU to use, for example 1.  [default: the first]")
@click.option(
    "--sglang", type=click.Path(path_type=Path), help="SGLang checkout or site-packages.  [default: the importable one]"
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="File to write.  [default: calibration-CARD.json in this folder]"
)
@click.option("--apply", is_flag=True, help="Also keep it for this user: later estimates for the card use it.")
@click.option("--seed", type=int, default=0, help="Seed of data and routing.")
@click.option("--workers", type=int, help="Compile processes.  [default: cores less one]")
@click.option("--fresh", is_flag=True, help="Measure again what an earlier run measured.")
@click.option("--dry-run", is_flag=True, help="Say which tiles would be timed, and stop.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def calibrate_command(**options: Any) -> int:
    """Time a few chosen tiles on this card and fit the cost model's constants to them.

    Without any number of a layer it is E=128 N=768 hidden 2048 topk 8 in bf16. The same command goes on where it was
    interrupted. The file that it writes holds every time and may be passed on.
    """
    return _calibrate(_Options(**options))


def _calibrate(options: _Options) -> int:
    _check_class(options.from_class)
    console = report.console(quiet=options.quiet)
    wanted = Wanted(options.output, options.apply, options.as_json, time.monotonic())
    if options.from_times is not None:
        check_options(click.get_current_context())
        return fit_from_times(options.from_times, options.from_class, console, wanted)
    _check_numbers(options)
    job = _job(options)
    start = named_class(options.from_class) if options.from_class else card_class(job.device.arch)
    output = wanted.file(job.device)
    if not options.dry_run:
        check_output(output)
    chosen = choose_tiles(job, start, options.tiles)
    _show_job(console, job, start, len(chosen))
    if options.dry_run:
        show_tiles(report.result_console(), chosen) if not options.as_json else print(_plan_json(job, chosen))
        return 0
    for gpu in job.gpus:
        busy = busy_reason(gpu)
        if busy is not None:
            print(f"warning: {busy}", file=sys.stderr)
    run_options = RunOptions(output.parent, options.fresh, workers=options.workers)
    with make_observer(console, quiet=options.quiet) as observer:
        result = calibrate(job, chosen, start, run_options, observer)
    return finish(result, start, wanted)


def _job(options: _Options) -> Job:
    """Return the layer on the card; raises UserError where there is none, or a table that does not hold it."""
    table = replay_table(options.timer, *_RECORDED)
    if table is not None:
        problem, routing = table.problem, parse_routing(table.routing)
        missing = [m for m in options.batch_sizes if m not in table.sizes]
        if missing:
            there = ", ".join(map(str, table.sizes))
            raise UserError(f"--timer {options.timer} has no M={missing[0]}; --batch-sizes may hold {there}")
    else:
        problem, routing = _problem(options), parse_routing(options.routing)
    settings = Settings(trials=1, exhaustive=True, budget_s=None, seed=options.seed)
    request = JobRequest(
        problem, options.batch_sizes, routing, settings, options.sglang, Path("generated_configs"), table
    )
    return resolve_job(request, _card(options, table))


def _card(options: _Options, table: Table | None) -> Card:
    if table is not None:
        return Card(find_device(table.device_name), (), "replay")
    card = resolve_card(CardRequest(None, None, options.gpus, None))
    if card.timer != "cuda":
        raise UserError("calibrate times the card itself, and torch sees no GPU here; run it where the card is")
    return replace(card, gpus=card.gpus[:1])


def _problem(options: _Options) -> MoEProblem:
    experts, inter = options.experts, options.inter
    if experts is None and inter is None:
        experts, inter = DEFAULT_PROBLEM["experts"], DEFAULT_PROBLEM["inter"]
    if experts is None or inter is None:
        missing, other = ("--experts", "--inter") if experts is None else ("--inter", "--experts")
        raise UserError(f"missing {missing} beside {other}; give both, or neither for the default layer")
    return options.problem(
        experts=experts,
        inter=inter,
        hidden=DEFAULT_PROBLEM["hidden"],
        topk=DEFAULT_PROBLEM["topk"],
        dtype=options.dtype or "bf16",
    )


def _check_class(name: str | None) -> None:
    if name is not None and name not in class_names():
        raise UserError(f"--from-class {name} is unknown; choose one of {', '.join(class_names())}")


def _check_numbers(options: _Options) -> None:
    kind = (options.timer or "cuda").partition(":")[0]
    if kind == "model":
        raise UserError("--timer model: an estimate calibrates nothing; run calibrate where the card is")
    if kind not in {"cuda", "replay"}:
        raise UserError(f"--timer {options.timer} is unknown; choose cuda or replay:FILE")
    if options.apply and kind == "replay":
        raise UserError("--apply with a replay: nothing was measured here; give its file with --calibration instead")
    if options.tiles < _LEAST_TILES:
        raise UserError(f"--tiles must be at least {_LEAST_TILES}, not {options.tiles}; fewer tell nothing apart")
    if options.seed < 0:
        raise UserError(f"--seed must be 0 or more, not {options.seed}")
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers must be at least 1, not {options.workers}")


def _show_job(console: Console, job: Job, start: CardClass, tiles: int) -> None:
    console.print(f"problem: {job.problem}, routing {job.routing}", markup=False)
    how = "replayed from a recorded table" if job.table is not None else f"GPU {job.gpus[0].index}"
    console.print(f"card: {job.device.name} (SM{job.device.arch}), {how}")
    sizes = ", ".join(map(str, job.batch_sizes))
    console.print(f"{tiles} tiles at M={sizes}, both GEMMs; constants of {start.name} to begin with")


def _plan_json(job: Job, chosen: tuple[Chosen, ...]) -> str:
    tiles = [{"tile": one.tile.to_row(), "why": one.why} for one in chosen]
    return json.dumps({"problem": job.problem.to_json(), "device": job.device.name, "tiles": tiles}, indent=4)
