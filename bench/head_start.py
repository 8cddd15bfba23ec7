"""What the model's first candidates save on a GPU: whole runs with and without them, each from cold caches.

    python bench/head_start.py --trials 4,8,16,24 --trials-without 8,16,24,48,96 --json head_start.json \
        --experts 256 --inter 512 --hidden 2048 --topk 8

Runs the product's own search once for each number of trials per M, in this process: processes that compile and one
that times are started anew, nothing is in a cache. Without the model's candidates a search begins with the built-in
default, shipped rows and what the neighbouring M found. Then the pairs that all runs chose for an M are timed
together, interleaved. ``seconds`` is a whole run, its checks included; ``regret`` a chosen pair's time over that of
the fastest pair that any run chose. Take a layer that the model was not fitted on and that no shipped file serves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any
from unittest import mock

from layer_arguments import add_layer_arguments, layer_of
from performance import one_lane, repeated_race

import sm120tune.seeds as seeds_module
from sm120tune.job import Job, Settings
from sm120tune.measure.cost_constants import version_for
from sm120tune.measure.routing import parse_routing
from sm120tune.observer import Silent
from sm120tune.resolve import CardRequest, JobRequest, resolve_card, resolve_job
from sm120tune.runner import RunResult
from sm120tune.tiles import TilePair
from sm120tune.tune import RunOptions, open_pool, run_job

SIZES = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16384)
_CLOSE = 1.01


def cold_run(job: Job, trials: int, workers: int | None, *, model: bool) -> tuple[RunResult, float]:
    """Search and settle from cold caches; returns what was found and the seconds that it took."""
    job = replace(job, settings=replace(job.settings, trials=trials))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}))
        if not model:
            stack.enter_context(mock.patch.object(seeds_module, "model_leaders", return_value=[]))
        begin = time.monotonic()
        options = RunOptions(Path(folder) / "none", fresh=True, began=begin, workers=workers)
        with open_pool(job, options.workers) as pool:
            result = run_job(job, options, pool, Silent())
        return result, time.monotonic() - begin


def regrets(job: Job, chosen: list[dict[int, TilePair]]) -> list[dict[int, float]]:
    """Return, for each run, its pairs' time over the fastest of all runs' at each M."""
    found: list[dict[int, float]] = [{} for _ in chosen]
    with one_lane(job) as lane:
        for m in job.batch_sizes:
            samples = repeated_race(lane, m, [one[m] for one in chosen])
            us = {pair: median(values) for pair, values in samples.items()}
            for regret, one in zip(found, chosen, strict=True):
                regret[m] = us[one[m]] / min(us.values())
    return found


def show(runs: list[dict[str, Any]]) -> None:
    """Print one row a run."""
    print("| first candidates | trials per M | seconds | binaries | geomean | worst | within 1 % |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for run in runs:
        values = list(run["regret"].values())
        close = sum(value <= _CLOSE for value in values)
        print(
            f"| {'with the model' if run['model'] else 'without'} | {run['trials']} | {run['seconds']:.1f} | "
            f"{run['compiled']} | {geometric_mean(values):.4f} | {max(values):.3f} | {close} of {len(values)} |"
        )


def main() -> int:
    """Run, time again, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", default="4,8,16,24", help="per M, with the model's candidates")
    parser.add_argument("--trials-without", default="8,16,24,48,96", help="per M, without them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="compile processes")
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--json", type=Path)
    add_layer_arguments(parser)
    args = parser.parse_args()
    job = _job(args)
    runs: list[dict[str, Any]] = []
    chosen: list[dict[int, TilePair]] = []
    plan = [(True, int(part)) for part in args.trials.split(",")]
    plan += [(False, int(part)) for part in args.trials_without.split(",")]
    for model, trials in plan:
        result, seconds = cold_run(job, trials, args.workers, model=model)
        chosen.append({row.m: row.chosen for row in result.rows})
        runs.append({"model": model, "trials": trials, "seconds": seconds, "compiled": result.compiled,
                     "phases": result.seconds, "timed": result.timed, "busy_s": result.busy_s})  # fmt: skip
        print(f"{'with' if model else 'without'} {trials}: {seconds:.1f} s, {result.compiled} binaries", flush=True)
    for run, regret in zip(runs, regrets(job, chosen), strict=True):
        run["regret"] = regret
    if args.json:
        args.json.write_text(
            json.dumps({"problem": job.problem.to_json(), "model": version_for(job.device), "runs": runs}, indent=1)
            + "\n"
        )
    show(runs)
    return 0


def _job(args: argparse.Namespace) -> Job:
    settings = Settings(trials=1, exhaustive=False, budget_s=None, seed=args.seed)
    request = JobRequest(layer_of(args), SIZES, parse_routing("uniform"), settings, args.sglang, Path("none"))
    return resolve_job(request, resolve_card(CardRequest(None, None, None, "cuda")))


if __name__ == "__main__":
    sys.exit(main())
