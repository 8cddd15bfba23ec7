"""What a calibration is worth where it was not made: on the recorded tables.

    python bench/calibration_quality.py bench/tables/*.parquet --sglang PATH
    python bench/calibration_quality.py bench/tables/*.parquet --calibration calibration-NVIDIA_H200.json

A table's card is taken as one that nothing is known of: the constants of ``--from-class`` and 30 chosen tiles of it at
four M, as ``calibrate`` does. The fit then predicts every recorded tile at every M of that table but the chosen ones,
and every tile of the other tables. Beside it: the class's constants, and those that were fitted on whole tables
(sm90's, which saw all of them). Launches that were timed once (``at_least``) are left out of the errors, as everywhere.

With ``--calibration`` nothing is replayed: the constants of a file, made on the card itself, predict every table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from model_tables import Recorded, geomean, rank_correlation, recorded, regrets

from sm120tune.calibrate.applied import calibrated
from sm120tune.calibrate.choice import DEFAULT_TILES, choose_tiles
from sm120tune.calibrate.file import read_file
from sm120tune.calibrate.fit import NEAR
from sm120tune.calibrate.run import calibrate
from sm120tune.cli.calibrate import DEFAULT_SIZES
from sm120tune.devices import find_device
from sm120tune.job import Settings
from sm120tune.measure.cost_constants import CardClass, class_names, fitted_class, named_class
from sm120tune.measure.cost_terms import features, terms
from sm120tune.measure.occupancy import binary_key
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.table import read_table
from sm120tune.observer import Silent
from sm120tune.resolve import Card, JobRequest, resolve_job
from sm120tune.tune import RunOptions


def lines(table: Recorded, seen: set[str], fitted: CardClass) -> Iterator[str]:
    """Yield errors, order and choice on the tiles of a table that were not seen, and how often a margin holds."""
    errors, orders, choices, held = [], [], [], []
    for one in table.launches:
        found = terms(one.load, one.arrays, table.device, fitted.constants)
        us = found.us
        if fitted.correction is not None:
            us = us * fitted.correction.factor(features(one.load, one.arrays, found))
        unseen = np.array([binary_key(tile) not in seen for tile in one.tiles]) & ~one.at_least
        error = np.abs(us / one.us - 1)
        near = one.us <= (1 + NEAR) * one.us.min()
        errors.append(error[unseen])
        held.append(error[unseen & near] <= fitted.margin(one.m, table.problem.dtype))
        orders.append(rank_correlation(one, us))
        choices.append(regrets(table, one, us))
    error, within = np.concatenate(errors), np.concatenate(held)
    first, five = (geomean([each[index] for each in choices]) for index in (0, 1))
    yield (
        f"median {np.median(error):.1%} p90 {np.quantile(error, 0.9):.1%} over {len(error):,} launches, "
        f"order {np.mean(orders):.3f}, first {first:.3f}, best of 5 {five:.3f}"
    )
    if fitted.measured is not None:
        yield f"{within.mean():.0%} of {len(within):,} launches near the best are within the margin at their M"


def replayed(path: Path, start: CardClass, args: argparse.Namespace) -> tuple[CardClass, set[str]]:
    """Calibrate on a table; returns the card's class and the tiles that were seen."""
    table = read_table(path)
    sizes = tuple(int(m) for m in DEFAULT_SIZES.split(","))
    settings = Settings(trials=1, exhaustive=True, budget_s=None, seed=args.seed)
    request = JobRequest(table.problem, sizes, parse_routing(table.routing), settings, args.sglang, Path("none"), table)
    job = resolve_job(request, Card(find_device(table.device_name), (), "replay"))
    chosen = choose_tiles(job, start, args.tiles)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        result = calibrate(job, chosen, start, RunOptions(Path(folder), fresh=True, workers=1), Silent())
    inside = result.assessment.overall
    assert inside is not None
    print(f"calibrated on {path.stem}: {len(chosen)} tiles, {inside.before.launches} times, from {start.name}")
    named = {"before": inside.before, "unseen tiles": inside.unseen_tiles, "unseen M": inside.unseen_m}
    for name, found in named.items():
        print(f"  of these, {name:12}: median {found.median:.1%} p90 {found.p90:.1%}")
    fitted = result.calibration.model.card_class(start, table.problem.dtype)
    return fitted, {binary_key(one.tile) for one in chosen}


def show(tables: Mapping[Path, Recorded], models: Mapping[str, CardClass], own: Path | None, seen: set[str]) -> None:
    """Print what every model makes of every table; ``own`` is the one whose tiles were seen."""
    for path, table in tables.items():
        what = "all other tiles" if path == own else "all tiles"
        for name, fitted in models.items():
            for line in lines(table, seen if path == own else set(), fitted):
                print(f"  {what} of {path.stem}, {name}: {line}", flush=True)


def main() -> int:
    """Print one block for each table that a calibration is made on, or for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--calibration", action="append", default=[], type=Path, help="file to judge; may be repeated")
    parser.add_argument("--from-class", choices=class_names(), default="sm120")
    parser.add_argument("--tiles", type=int, default=DEFAULT_TILES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sglang", type=Path)
    args = parser.parse_args()
    tables = {path: recorded(path) for path in args.tables}
    whole = {"fitted on whole tables": named_class("sm90")}
    for file in args.calibration:
        found = read_file(file, str(file))
        start = named_class(found.start)
        fitted = fitted_class(calibrated(next(iter(tables.values())).device, str(file), print))
        print(f"{file}: {found.origin.timer}, {len(found.times)} tiles and M, {found.origin.problem}")
        show(tables, {start.name: start, "calibrated": fitted, **whole}, None, set())
    for path in () if args.calibration else args.tables:
        start = named_class(args.from_class)
        fitted, seen = replayed(path, start, args)
        show(tables, {start.name: start, "calibrated": fitted, **whole}, path, seen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
