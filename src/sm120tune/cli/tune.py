"""``sm120tune tune``: the main job."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import click

from sm120tune.calibrate.applied import calibrated
from sm120tune.cli import report
from sm120tune.cli.model import check_no_numbers, model_options
from sm120tune.cli.options import batch_sizes, calibration_option, check_folder, quantization_options
from sm120tune.cli.progress import make_observer
from sm120tune.cli.targets import (
    DEFAULT_HIDDEN,
    DEFAULT_TOPK,
    LayerOptions,
    Target,
    parse_tp,
    read_jobs,
    replay_table,
)
from sm120tune.devices import busy_reason, find_device
from sm120tune.errors import UserError
from sm120tune.job import Job, Settings
from sm120tune.measure.lane import TimerName
from sm120tune.measure.routing import ROUTING_CHOICES, parse_routing
from sm120tune.measure.table import Table
from sm120tune.problem import DEFAULT_BATCH_SIZES
from sm120tune.resolve import Card, CardRequest, JobRequest, resolve_card, resolve_job
from sm120tune.tune import Outcome, RunOptions, rows_to_merge, tune
from sm120tune.tune_shared import tune_shared

DEFAULT_TRIALS = {"cuda": 24, "model": 20, "replay": 24}


@dataclass(frozen=True)
class TuneOptions:
    """The options of the command, as click parsed them."""

    layer: LayerOptions
    jobs: Path | None
    batch_sizes: tuple[int, ...]
    device: str | None
    device_spec: Path | None
    gpus: str | None
    sglang: Path | None
    output: Path
    budget: float | None
    trials: int | None
    search: str
    seed: int
    timer: str | None
    calibration: str | None
    keys: str
    routing: str
    workers: int | None
    fresh: bool
    replace: bool
    dry_run: bool
    quiet: bool
    as_json: bool


_RECORDED = ("model", "jobs", "tp", "ep", "batch_sizes", "routing", "device", "device_spec", "gpus")
"""What a recorded table brings beside the numbers of the layer."""

_DEFAULT_SIZES = ",".join(str(m) for m in DEFAULT_BATCH_SIZES)


@click.command("tune", context_settings={"show_default": True})
@model_options
@click.option("--experts", type=int, help="Routed experts of the model, all ranks together.  [this or --model]")
@click.option(
    "--jobs", type=click.Path(path_type=Path), help="TOML file with a job table for each layer.  [default: one layer]"
)
@click.option("--tp", default="1", callback=parse_tp, help="Tensor parallel size; several with commas between.")
@click.option("--ep", type=int, default=1, help="Expert parallel size; tp must be divisible by it.")
@click.option("--inter", type=int, help="moe_intermediate_size of the model, before any split.  [this or --model]")
@click.option("--hidden", type=int, help=f"Hidden size.  [default: {DEFAULT_HIDDEN}, GLM-5's]")
@click.option("--topk", type=int, help=f"Experts per token.  [default: {DEFAULT_TOPK}, GLM-5's]")
@quantization_options
@click.option(
    "--shared-experts", type=int, default=0, help="Shared experts fused into the routed ones: E+1, topk+1 each."
)
@click.option(
    "--batch-sizes",
    default=_DEFAULT_SIZES,
    show_default=False,
    callback=batch_sizes,
    help=f"Values of M (tokens) to tune, with commas between.  [default: {_DEFAULT_SIZES.replace(',', ', ')}]",
)
@click.option(
    "--device", help="Card by name, blanks or underscores; one that is not here is estimated.  [default: the local GPU]"
)
@click.option("--device-spec", type=click.Path(path_type=Path), help="JSON file that describes an unknown card.")
@click.option("--gpus", help="Which local GPUs to use, for example 0,1.  [default: all]")
@click.option(
    "--sglang", type=click.Path(path_type=Path), help="SGLang checkout or site-packages.  [default: the importable one]"
)
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("generated_configs"), help="Folder for the results."
)
@click.option("--budget", type=float, help="Seconds to spend, on each layer.  [default: no limit]")
@click.option(
    "--trials",
    type=int,
    help=f"Pairs to try per M.  [default: {DEFAULT_TRIALS['cuda']}, model {DEFAULT_TRIALS['model']}]",
)
@click.option("--search", type=click.Choice(["optuna", "exhaustive"]), default="optuna", help="How to search.")
@click.option("--seed", type=int, default=0, help="Seed of data, routing and search.")
@click.option(
    "--timer",
    help="cuda (measure), model (estimate) or replay:FILE (a recorded table, which brings problem, card and M).  "
    "[default: cuda where the card is here]",
)
@calibration_option
@click.option(
    "--keys",
    type=click.Choice(["all", "auto"]),
    default="all",
    help="Write every M, or the fewest that keep every M within 2 % of its own best.",
)
@click.option("--routing", default="uniform", help=f"{ROUTING_CHOICES}.")
@click.option("--workers", type=int, help="Compile processes.  [default: cores less GPUs]")
@click.option("--fresh", is_flag=True, help="Start over instead of resuming.")
@click.option("--replace", is_flag=True, help="Overwrite a pair that belongs to another problem.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and stop.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def tune_command(**options: Any) -> int:
    """Tune one MoE layer shape and write the pair of files that SGLang asks for."""
    layer = LayerOptions(**{entry.name: options.pop(entry.name) for entry in fields(LayerOptions)})
    return _tune(
        TuneOptions(layer, **options), began=click.get_current_context().find_object(float) or time.monotonic()
    )


def _tune(options: TuneOptions, began: float) -> int:
    _check_numbers(options)
    console = report.console(quiet=options.quiet)
    table = _table(options)
    if table is not None:
        card = Card(find_device(table.device_name), (), "replay")
        targets, sizes, routing = [Target(table.problem)], table.sizes, parse_routing(table.routing)
    else:
        targets, sizes, routing = _targets(options), options.batch_sizes, parse_routing(options.routing)
        timer = cast("TimerName | None", options.timer)
        card = resolve_card(CardRequest(options.device, options.device_spec, options.gpus, timer))
    # A replay is the same for everyone: what was applied on this machine does not count.
    card = replace(card, spec=calibrated(card.spec, options.calibration, report.tell, applied=table is None))
    settings = Settings(
        trials=options.trials if options.trials is not None else DEFAULT_TRIALS[card.timer],
        exhaustive=options.search == "exhaustive",
        budget_s=options.budget,
        seed=options.seed,
        fewest_keys=options.keys == "auto",
    )
    jobs = [
        resolve_job(JobRequest(one.problem, sizes, routing, settings, options.sglang, options.output, table), card)
        for one in targets
    ]
    files = _by_file(jobs)
    if not options.dry_run and not options.replace:
        # All of them before the first: what is wrong with the last layer's files is no reason to stop half-way.
        for sharing in files:
            rows_to_merge(sharing, options.output)
    _warn_if_busy(card)
    notes = {job.problem: target.notes for target, job in zip(targets, jobs, strict=True)}
    documents: list[dict[str, Any]] = []
    outcomes: list[tuple[Job, Outcome]] = []
    for number, sharing in enumerate(files, 1):
        job = sharing[0]
        if len(files) > 1:
            console.rule(f"{number} of {len(files)}")
        for one in sharing:
            report.show_lines(console, notes[one.problem])
            report.show_job(console, one, options.output)
        if options.dry_run:
            for one in sharing:
                plan = report.plan(one, options.workers)
                report.show_plan(console, plan)
                documents.append(plan.to_json())
            continue
        # A budget counts from the start of the command, for the first layer alone.
        begin = began if number == 1 else time.monotonic()
        run_options = RunOptions(options.output, options.fresh, options.replace, begin, options.workers)
        try:
            with make_observer(console, quiet=options.quiet) as observer:
                outcome = (
                    tune(job, run_options, observer)
                    if len(sharing) == 1
                    else tune_shared(sharing, run_options, observer)
                )
        except UserError as error:
            if len(files) == 1:
                raise
            done = f"the {number - 1} before it are written, " if number > 1 else ""
            raise UserError(f"{job.problem}: {error} ({done}the same command goes on from there)") from error
        report.show_outcome(console, job, outcome)
        outcomes.append((job, outcome))
        documents.append(report.outcome_json(job, outcome))
    if outcomes and len(jobs) > 1:
        report.show_summary(console, outcomes)
    if options.as_json:
        print(json.dumps(documents[0] if len(documents) == 1 else {"jobs": documents}, indent=4))
    return 1 if any(outcome.result.missing for _, outcome in outcomes) else 0


def _targets(options: TuneOptions) -> list[Target]:
    """Return the layers that the options name; raises UserError for numbers beside what brings its own."""
    if options.jobs is not None:
        check_no_numbers("--jobs", "model", "tp", "ep")
        return read_jobs(options.jobs)
    if options.layer.model is not None:
        check_no_numbers("--model")
    return options.layer.targets()


def _by_file(jobs: list[Job]) -> list[list[Job]]:
    """Return the jobs of each file, those that share one together; raises UserError for a layer that is given twice."""
    files: dict[str, list[Job]] = {}
    for job in jobs:
        sharing = files.setdefault(job.lookup.file_names(job.problem)[0], [])
        if any(other.problem == job.problem for other in sharing):
            raise UserError(f"{job.problem} is given twice; drop one of the two")
        if sharing and job.settings.fewest_keys:
            raise UserError(
                f"--keys auto: {sharing[0].problem} and {job.problem} share a file, whose keys are not thinned out "
                "yet; use --keys all"
            )
        sharing.append(job)
    # The order of a job file does not count: the first layer is the one that later runs are compared with.
    return [sorted(sharing, key=lambda job: json.dumps(job.problem.to_json())) for sharing in files.values()]


def _table(options: TuneOptions) -> Table | None:
    table = replay_table(options.timer, *_RECORDED)
    if table is None and options.timer not in {None, "cuda", "model"}:
        raise UserError(f"--timer {options.timer} is unknown; choose cuda, model or replay:FILE")
    return table


def _check_numbers(options: TuneOptions) -> None:
    if options.trials is not None and options.trials < 1:
        raise UserError(f"--trials must be at least 1, not {options.trials}")
    if options.budget is not None and not 0 < options.budget < math.inf:
        raise UserError(f"--budget must be a number of seconds above 0, not {options.budget:g}; none is no limit")
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers must be at least 1, not {options.workers}")
    if options.seed < 0:
        raise UserError(f"--seed must be 0 or more, not {options.seed}")
    check_folder("--output", options.output, writes=not options.dry_run)


def _warn_if_busy(card: Card) -> None:
    for gpu in card.gpus:
        reason = busy_reason(gpu)
        if reason is not None:
            print(f"warning: {reason}", file=sys.stderr)
