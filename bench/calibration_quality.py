"""What a calibration is worth where it was not made: on the recorded tables. Prints the table of docs/calibrate.md.

    python bench/calibration_quality.py bench/tables/*.parquet --calibration bench/results/FILE.json --sglang PATH
    python bench/calibration_quality.py bench/tables/*.parquet --calibration mine.json --no-replay

A table's card is taken as one that nothing is known of: the constants of ``--from-class`` and 30 chosen tiles of it at
four M, as ``calibrate`` does. The fit then predicts every recorded tile at every M of that table but the chosen ones,
and every tile of the other tables. ``--calibration`` is a file that was made on the card itself; one of another formula
is fitted again. Beside them: the class's constants, and those of the card's own class, which saw all tables whole.
Launches that were timed once (``at_least``) are left out of the errors, as everywhere.

``holds`` is the share of launches up to half slower than the best of their GEMM and M whose error is within the margin
there, over all M and at the M with the least; ``margin`` the median over the table's M. ``--update FILE`` writes the
table between the two comments that name this script.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from documents import show_table
from model_tables import Recorded, geomean, rank_correlation, recorded, regrets

from sm120tune.calibrate.applied import with_calibration
from sm120tune.calibrate.assess import Compared
from sm120tune.calibrate.choice import DEFAULT_TILES, choose_tiles
from sm120tune.calibrate.file import read_file
from sm120tune.calibrate.fit import NEAR
from sm120tune.calibrate.quality import Quality
from sm120tune.calibrate.refit import fit_again, start_of
from sm120tune.calibrate.run import calibrate
from sm120tune.cli.calibrate import DEFAULT_SIZES
from sm120tune.devices import find_device
from sm120tune.job import Settings
from sm120tune.measure.cost_constants import CardClass, card_class, class_names, fitted_class, named_class, version_for
from sm120tune.measure.cost_terms import features, terms
from sm120tune.measure.occupancy import binary_key
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.table import read_table
from sm120tune.observer import Silent
from sm120tune.problem import MoEProblem
from sm120tune.resolve import Card, JobRequest, resolve_job
from sm120tune.tune import RunOptions

_COLUMNS = (
    "calibrated on", "predicted", "before: median / p90", "after: median / p90", "order", "first", "margin",
    "holds / at the worst M",
)  # fmt: skip
_SCRIPT = "bench/calibration_quality.py"


@dataclass(frozen=True)
class Predicted:
    """How one model does on one table."""

    median: float
    p90: float
    order: float
    first: float
    margin: float
    holds: float
    worst: float
    """Of ``holds``, at the M where it is least."""

    @property
    def errors(self) -> str:
        """Median and 90th percentile as the table shows them."""
        return f"{100 * self.median:.1f} / {100 * self.p90:.1f} %"


@dataclass(frozen=True)
class Source:
    """A calibration and where it comes from."""

    name: str
    problem: MoEProblem
    start: CardClass
    fitted: CardClass
    seen: frozenset[str]
    """Keys of the tiles that were fitted."""
    inside: Compared


def predicted(table: Recorded, seen: frozenset[str], fitted: CardClass) -> Predicted:
    """Return what a model makes of the tiles of a table that were not seen."""
    errors, orders, firsts = [], [], []
    near: dict[int, list[bool]] = {}
    margins = {one.m: fitted.margin(one.m, table.problem.dtype) for one in table.launches}
    for one in table.launches:
        found = terms(one.load, one.arrays, table.device, fitted.constants)
        us = found.us
        if fitted.correction is not None:
            us = us * fitted.correction.factor(features(one.load, one.arrays, found))
        unseen = np.array([binary_key(tile) not in seen for tile in one.tiles]) & ~one.at_least
        error = np.abs(us / one.us - 1)
        errors.append(error[unseen])
        close = unseen & (one.us <= (1 + NEAR) * one.us.min())
        near.setdefault(one.m, []).extend((error[close] <= margins[one.m]).tolist())
        orders.append(rank_correlation(one, us))
        firsts.append(regrets(table, one, us)[0])
    error = np.concatenate(errors)
    return Predicted(
        median=float(np.median(error)),
        p90=float(np.quantile(error, 0.9)),
        order=float(np.mean(orders)),
        first=geomean(firsts),
        margin=median(margins.values()),
        holds=float(np.mean([within for each in near.values() for within in each])),
        worst=min(float(np.mean(each)) for each in near.values()),
    )


def replayed(path: Path, args: argparse.Namespace) -> Source:
    """Calibrate on a table, as on a card that nothing is known of."""
    start, table = named_class(args.from_class), read_table(path)
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
    return Source(
        f"{short(table.problem)}, {len(chosen)} tiles, {inside.before.launches} times",
        table.problem,
        start,
        result.calibration.model.card_class(start, table.problem.dtype),
        frozenset(binary_key(one.tile) for one in chosen),
        inside,
    )


def measured(path: Path, table: Recorded) -> Source:
    """Return the calibration that this release's formula makes of a file's times."""
    file = read_file(path, str(path))
    start = start_of(file)
    found, assessment = fit_again(file, start)
    inside = assessment.overall
    assert inside is not None
    card = with_calibration(table.device, found, str(path))
    print(f"{path}: {file.formula}, {file.origin.timer}, {file.origin.date}; {version_for(card)}", file=sys.stderr)
    seen = frozenset(binary_key(one.tile) for one in file.times)
    name = f"`{path.name}`: {short(file.origin.problem)}, {len(seen)} tiles, {inside.before.launches} times"
    return Source(name, file.origin.problem, start, fitted_class(card), seen, inside)


def short(problem: MoEProblem) -> str:
    """Return a layer's name in the table."""
    return f"E={problem.experts} N={problem.intermediate}" + (" fp8" if problem.dtype.startswith("fp8") else "")


def rows(source: Source, tables: Mapping[Path, Recorded]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one calibration, its own launches first."""
    names = iter([source.name])
    before = source.inside.before
    after: Mapping[str, Quality] = {"tiles": source.inside.unseen_tiles, "M": source.inside.unseen_m}
    for what, found in after.items():
        cells = [f"{100 * one.median:.1f} / {100 * one.p90:.1f} %" for one in (before, found)]
        yield (
            next(names, ""), f"its own, as unseen {what}", *cells, f"{found.rank_correlation:.3f}",
            f"{found.first:.3f}", "", "",
        )  # fmt: skip
    for table in tables.values():
        own = table.problem == source.problem
        seen = source.seen if own else frozenset()
        old, new = (predicted(table, seen, model) for model in (source.start, source.fitted))
        yield ("", f"{'all other tiles of ' if own else ''}{short(table.problem)}", old.errors, *_cells(new))


def _cells(found: Predicted) -> tuple[str, ...]:
    return (
        found.errors,
        f"{found.order:.3f}",
        f"{found.first:.3f}",
        f"{100 * found.margin:.1f} %",
        f"{100 * found.holds:.0f} / {100 * found.worst:.0f} %",
    )


def whole(tables: Mapping[Path, Recorded], start: CardClass) -> Iterator[tuple[str, ...]]:
    """Yield what the constants reach that were fitted on these tables as a whole."""
    names = iter([f"{_own_class(tables).name}'s constants, fitted on all tables whole"])
    for table in tables.values():
        old, new = (predicted(table, frozenset(), model) for model in (start, _own_class(tables)))
        yield (next(names, ""), short(table.problem), old.errors, *_cells(new))


def _own_class(tables: Mapping[Path, Recorded]) -> CardClass:
    return card_class(next(iter(tables.values())).device.arch)


def main() -> int:
    """Print one block of rows for each table that a calibration is made on, and for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--calibration", action="append", default=[], type=Path, help="file to judge; may be repeated")
    parser.add_argument("--no-replay", action="store_true", help="judge the files alone")
    parser.add_argument("--update", type=Path, help="document to put the table into")
    parser.add_argument("--from-class", choices=class_names(), default="sm120")
    parser.add_argument("--tiles", type=int, default=DEFAULT_TILES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sglang", type=Path)
    args = parser.parse_args()
    tables = {path: recorded(path) for path in args.tables}
    found = [] if args.no_replay else [replayed(path, args) for path in tables]
    found += [measured(path, next(iter(tables.values()))) for path in args.calibration]
    every = [row for source in found for row in rows(source, tables)]
    every += whole(tables, named_class(args.from_class))
    show_table(_SCRIPT, _COLUMNS, every, args.update)
    return 0


if __name__ == "__main__":
    sys.exit(main())
