"""How close the search comes to an exhaustive table, and what it costs: the product's own runner on replays.

    python bench/search_quality.py bench/tables/*.parquet --seeds 0,1,2

Regret of an M is the recorded time of the chosen pair (gate_up + down) over the least sum of any pair with one
BLOCK_SIZE_M. The chosen pair is what the search ranks first by its noisy times. ``halves`` counts the timed GEMMs,
``binaries`` the different ones that had to be compiled, ``cpu`` is what sampler and bookkeeping took.

The cost model that gives the first candidates is fitted on the other tables, so that it never saw the one searched
(needs scipy and at least two tables). ``--model stored`` takes the constants that ship, ``--model sm120`` those of
another card: what to expect where nothing was fitted. ``--calibration FILE`` takes a calibration's: what to expect
where ``calibrate`` ran, best with a file that was made on the other table. ``--model none`` begins without any of the
model's candidates. Several numbers of ``--trials`` are run one after the other with the same fit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import sm120tune.seeds as seeds_module
from sm120tune.calibrate.applied import calibrated
from sm120tune.cli.tune import DEFAULT_TRIALS
from sm120tune.devices import find_device
from sm120tune.job import Settings
from sm120tune.measure import model
from sm120tune.measure.cost_constants import CardClass, card_class, fitted_class
from sm120tune.measure.replay import ReplayLane, ReplayPool, best_pair
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.table import Table, read_table
from sm120tune.observer import Silent
from sm120tune.problem import Gemm
from sm120tune.resolve import Card, JobRequest, resolve_job
from sm120tune.runner import Runner
from sm120tune.search.board import Half
from sm120tune.search.journal import Journal
from sm120tune.search_space import space_hash

_CLOSE = 1.01


def evaluate(table: Table, trials: int, seed: int, sglang: Path | None) -> dict[str, Any]:
    """Run the search once on a table and return its regret per M and its cost."""
    card = Card(find_device(table.device_name), (), "replay")
    settings = Settings(trials=trials, exhaustive=False, budget_s=None, seed=seed)
    request = JobRequest(
        table.problem, table.sizes, parse_routing(table.routing), settings, sglang, Path("none"), table
    )
    job = resolve_job(request, card)
    times = {row.key: row.us for row in table.rows if row.us is not None}
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), {"seed": seed}, fresh=True, space=space_hash(job.values))
        runner = Runner(job, ReplayPool(table), [ReplayLane(table, seed)], journal, Silent())
        begin = time.process_time()
        result = asyncio.run(runner.run())
        cpu_s = time.process_time() - begin
    regret: dict[int, float] = {}
    halves = 0
    binaries: set[Half] = set()
    for m in table.sizes:
        step = runner.steps[m]
        (pair, *_) = step.board.best_pairs(1)
        true_us = times[Gemm.GATE_UP, pair.gate_up, m] + times[Gemm.DOWN, pair.down, m]
        regret[m] = true_us / best_pair(table, m)[0]
        halves += len(step.board)
        binaries |= step.board.known()
    return {"regret": regret, "halves": halves, "binaries": len(binaries), "timed": result.timed, "cpu_s": cpu_s}


def unseen(held_out: Path, tables: list[Path]) -> CardClass:
    """Return the cost model fitted on all tables but one."""
    from model_fits import fit_correction, fit_tables
    from model_tables import recorded

    others = [recorded(path) for path in tables if path != held_out]
    if not others:
        raise SystemExit("one table alone leaves none to fit the model on; give two or another --model")
    constants = fit_tables(others)
    stored = card_class(others[0].device.arch)
    return CardClass(stored.name, constants, fit_correction(others, constants), stored.margins)


def _model(path: Path, args: argparse.Namespace) -> CardClass | None:
    """Return what gives the first candidates on one table, None for nothing."""
    device = find_device(read_table(path).device_name)
    if args.calibration is not None:
        return fitted_class(calibrated(device, args.calibration, print))
    if args.model == "unseen":
        return unseen(path, args.tables)
    return None if args.model == "none" else card_class(device.arch if args.model == "stored" else 120)


def _use(fitted: CardClass | None, patches: contextlib.ExitStack) -> None:
    if fitted is None:
        patches.enter_context(mock.patch.object(seeds_module, "model_leaders", return_value=[]))
    else:
        patches.enter_context(mock.patch.object(model, "fitted_class", return_value=fitted))


def geomean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def main() -> int:
    """Print one line per table and seed, and the whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--trials", default=str(DEFAULT_TRIALS["replay"]), help="one number, or several with commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--model", choices=("unseen", "stored", "sm120", "none"), default="unseen", help="see above")
    parser.add_argument("--calibration", help="file whose constants are taken instead of --model's")
    args = parser.parse_args()
    seeds = [int(part) for part in args.seeds.split(",")]
    models = {path: _model(path, args) for path in args.tables}
    for trials in (int(part) for part in args.trials.split(",")):
        every: list[float] = []
        binaries: list[int] = []
        for path, seed in itertools.product(args.tables, seeds):
            with contextlib.ExitStack() as patches:
                _use(models[path], patches)
                found = evaluate(read_table(path), trials, seed, args.sglang)
            values = list(found["regret"].values())
            every += values
            line = " ".join(f"{m}:{regret:.3f}" for m, regret in found["regret"].items())
            print(
                f"{path.stem} seed {seed}: geomean {geomean(values):.4f} worst {max(values):.3f} "
                f"halves {found['halves']} binaries {found['binaries']} cpu {found['cpu_s']:.1f} s | {line}",
                flush=True,
            )
            binaries.append(found["binaries"])
        close = sum(value <= _CLOSE for value in every)
        print(
            f"{trials} trials: binaries {statistics.fmean(binaries):.0f} a table, geomean {geomean(every):.4f} "
            f"worst {max(every):.3f}, {close} of {len(every)} searches of one M within 1 %",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
