"""What a calibration is worth where it was not made: the tables that a replay stands for, and the others.

    python bench/calibration_quality.py bench/tables/*.parquet --sglang PATH

A table's card is taken as one that nothing is known of: the constants of ``--from-class`` and 30 chosen tiles of it at
four M, as ``calibrate`` does. The fit then predicts every recorded tile at every M of that table but the chosen ones,
and every tile of the other tables. Beside it: the class's constants, and those that were fitted on whole tables
(sm90's, which saw all of them). Launches that were timed once (``at_least``) are left out, as everywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from model_tables import Recorded, geomean, rank_correlation, recorded, regrets

from sm120tune.calibrate.choice import DEFAULT_TILES, choose_tiles
from sm120tune.calibrate.fit import NEAR
from sm120tune.calibrate.run import calibrate
from sm120tune.cli.calibrate import DEFAULT_SIZES
from sm120tune.devices import find_device
from sm120tune.job import Settings
from sm120tune.measure.correction import Correction
from sm120tune.measure.cost_constants import CardClass, Constants, class_names, named_class
from sm120tune.measure.cost_terms import features, terms
from sm120tune.measure.occupancy import binary_key
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.table import read_table
from sm120tune.observer import Silent
from sm120tune.resolve import Card, JobRequest, resolve_job


def within(table: Recorded, seen: set[str], fitted: CardClass) -> str:
    """Return the share of tiles near the best, not seen, whose error is within the margin at their M."""
    held: list[bool] = []
    for one in table.launches:
        us = terms(one.load, one.arrays, table.device, fitted.constants).us
        near = one.us <= (1 + NEAR) * one.us.min()
        unseen = np.array([binary_key(tile) not in seen for tile in one.tiles]) & ~one.at_least & near
        held += (np.abs(us / one.us - 1)[unseen] <= fitted.margin(one.m, table.problem.dtype)).tolist()
    return f"{np.mean(held):.0%} of {len(held):,} launches near the best are within the margin at their M"


def line(table: Recorded, seen: set[str], constants: Constants, correction: Correction | None) -> str:
    """Return the errors, the order and the choice on all tiles of a table but those that were seen."""
    errors, orders, choices = [], [], []
    for one in table.launches:
        found = terms(one.load, one.arrays, table.device, constants)
        us = found.us
        if correction is not None:
            us = us * correction.factor(features(one.load, one.arrays, found))
        unseen = np.array([binary_key(tile) not in seen for tile in one.tiles]) & ~one.at_least
        errors.append(np.abs(us / one.us - 1)[unseen])
        orders.append(rank_correlation(one, us))
        choices.append(regrets(table, one, us))
    error = np.concatenate(errors)
    first, five = (geomean([each[index] for each in choices]) for index in (0, 1))
    return (
        f"median {np.median(error):.1%} p90 {np.quantile(error, 0.9):.1%} over {len(error):,} launches, "
        f"order {np.mean(orders):.3f}, first {first:.3f}, best of 5 {five:.3f}"
    )


def main() -> int:
    """Print one block for each table that a calibration is made on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--from-class", choices=class_names(), default="sm120")
    parser.add_argument("--tiles", type=int, default=DEFAULT_TILES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sglang", type=Path)
    args = parser.parse_args()
    start, whole = named_class(args.from_class), named_class("sm90")
    tables: dict[Path, Recorded] = {path: recorded(path) for path in args.tables}
    sizes = tuple(int(m) for m in DEFAULT_SIZES.split(","))
    for path in args.tables:
        table = read_table(path)
        settings = Settings(trials=1, exhaustive=True, budget_s=None, seed=args.seed)
        request = JobRequest(
            table.problem, sizes, parse_routing(table.routing), settings, args.sglang, Path("none"), table
        )
        job = resolve_job(request, Card(find_device(table.device_name), (), "replay"))
        chosen = choose_tiles(job, start, args.tiles)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            result = calibrate(job, chosen, start, Silent(), fresh=True, workers=1)
        fitted, seen = result.assessment.fitted, {binary_key(one.tile) for one in chosen}
        assert result.assessment.overall is not None
        inside = result.assessment.overall
        own = result.calibration.model.card_class(start, table.problem.dtype)
        print(f"calibrated on {path.stem}: {len(chosen)} tiles, {inside.before.launches} times, from {start.name}")
        for name, found in (
            ("before", inside.before),
            ("unseen tiles", inside.unseen_tiles),
            ("unseen M", inside.unseen_m),
        ):
            print(f"  of these, {name:12}: median {found.median:.1%} p90 {found.p90:.1%}")
        for other, its in tables.items():
            left = seen if other == path else set()
            what = "all other tiles" if other == path else "all tiles"
            for name, constants, correction in (
                (start.name, start.constants, start.correction),
                ("calibrated", fitted.constants, start.correction),
                ("fitted on whole tables", whole.constants, None),
            ):
                print(f"  {what} of {other.stem}, {name}: {line(its, left, constants, correction)}", flush=True)
            print(f"    {within(its, left, own)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
