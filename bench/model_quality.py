"""How well the cost model predicts what it was not fitted on: the tables of docs/model.md.

    python bench/model_quality.py bench/tables/*.parquet --field bench/field/*.parquet
    python bench/model_quality.py NEW.parquet --stored     # before anything is fitted again

Recorded tables: constants and correction are fitted on all tables but one, which is then predicted. The field table:
fitted without two of the 14 models at a time, which are then predicted; its tuned rows (E=256 N=512 bf16) are never
fitted. Nothing is split by row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from field_data import Field, field_tiles, read_field
from model_fits import FIELD_LEAST_M, fit_correction, fit_field, fit_tables
from model_tables import COUNTS, Recorded, bands, geomean, rank_correlation, recorded, regrets

from sm120tune.devices import DEFAULT_DEVICE_NAME, DeviceSpec, find_device
from sm120tune.measure.correction import Correction
from sm120tune.measure.cost_constants import Constants, card_class
from sm120tune.measure.cost_terms import features, terms
from sm120tune.tiles import Tile

Array = npt.NDArray[np.float64]
Errors = list[tuple[int, float]]
"""(M, relative error) of predictions."""

MARGIN_STEPS = (8, 64, 256, 1024, 4096)
LEADERS = 20
HELD_OUT = 2
WITHOUT: Mapping[str, Mapping[str, float]] = {
    "nothing": {},
    "epilogue by accumulators": {"store_us": 1e-9},
    "start and end of a block": {"block_us": 1e-3},
    "latency by size of the loads": {"load_us_per_16k": 1e-6},
    "all latency of loads": {"load_us": 1e-6, "load_us_per_16k": 1e-6},
    "reads from shared memory": {"shared_gb_s": 1e6},
    "loads through the L2": {"l2_gb_s": 1e6},
    "weights read again": {"l2_held_share": 2.0},
    "short rows": {"short_row_loss": 1e-3},
    "short rows through the L2": {"short_row_l2": 1e-3},
    "block scales": {"scale_us": 1e-6, "rescale_g_s": 1e6},
    "spills": {"spill_bytes_that_double": 1e9},
}
"""Terms of the formula, and the constants that silence them."""
TUNED_FILE = Path(__file__).parent / "field/E=256,N=512,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"


@dataclass(frozen=True)
class TableQuality:
    """Of choices on tables that were not fitted."""

    summary: dict[str, Any]
    errors: Errors
    """Of the model's first tiles."""


@dataclass(frozen=True)
class FieldQuality:
    """Of times of models that were not fitted."""

    summary: dict[str, Any]
    errors: Errors
    """Of default tiles with ep 1."""


def predictions(table: Recorded, c: Constants, correction: Correction | None) -> list[Array]:
    """Return the model's times for every entry of ``table.launches``."""
    found = []
    for one in table.launches:
        result = terms(one.load, one.arrays, table.device, c)
        factor = 1.0 if correction is None else correction.factor(features(one.load, one.arrays, result))
        found.append(result.us * factor)
    return found


def choice_quality(table: Recorded, predicted: list[Array]) -> dict[str, Any]:
    """Return how well times for every entry of ``table.launches`` choose and rank its tiles, and how wrong they are."""
    found: dict[str, Any] = {}
    for band, indices in bands(table.launches):
        pairs = [(table.launches[i], predicted[i]) for i in indices]
        every = [regrets(table, *pair) for pair in pairs]
        found[band] = {
            **{f"best of {n}": round(geomean([each[i] for each in every]), 4) for i, n in enumerate(COUNTS)},
            "worst first": round(max(each[0] for each in every), 3),
            "rank correlation": round(float(np.mean([rank_correlation(*pair) for pair in pairs])), 4),
            "median error": round(float(np.median(np.concatenate([np.abs(p / one.us - 1) for one, p in pairs]))), 4),
        }
    return found


def table_quality(tables: Sequence[Recorded]) -> TableQuality:
    """Predict each table from the others."""
    summary: dict[str, Any] = {}
    errors: Errors = []
    for held_out in tables:
        others = [table for table in tables if table is not held_out]
        c = fit_tables(others)
        for kind, correction in (("formula", None), ("corrected", fit_correction(others, c))):
            predicted = predictions(held_out, c, correction)
            summary.setdefault(held_out.name, {})[kind] = choice_quality(held_out, predicted)
            if correction is not None:
                errors += _leader_errors(held_out, predicted)
    return TableQuality(summary, errors)


def stored_quality(tables: Sequence[Recorded]) -> dict[str, Any]:
    """Predict tables with the constants that ship."""
    return {
        table.name: {
            kind: choice_quality(table, predictions(table, fitted.constants, correction))
            for kind, correction in (("formula", None), ("corrected", fitted.correction))
        }
        for table in tables
        for fitted in (card_class(table.device.arch),)
    }


def leave_out(tables: Sequence[Recorded]) -> Iterator[tuple[str, list[float]]]:
    """Yield, for the formula without one of its terms, its choice and rank correlation on unseen tables, M >= 8."""
    for name, fixed in WITHOUT.items():
        found: list[list[float]] = []
        for held_out in tables:
            c = fit_tables([table for table in tables if table is not held_out], fixed)
            for one, us in zip(held_out.launches, predictions(held_out, c, None), strict=True):
                if one.m >= FIELD_LEAST_M:
                    found.append([*regrets(held_out, one, us), rank_correlation(one, us)])
        choice = [geomean([each[index] for each in found]) for index in range(len(COUNTS))]
        yield name, [*choice, float(np.mean([each[-1] for each in found]))]


def _leader_errors(table: Recorded, predicted: list[Array]) -> Errors:
    """Return the relative errors of the model's first tiles, those that a search would begin with."""
    errors: Errors = []
    for one, expected in zip(table.launches, predicted, strict=True):
        first = np.argsort(expected)[:LEADERS]
        errors += [(one.m, float(error)) for error in np.abs(expected / one.us - 1)[first]]
    return errors


def field_quality(field: Field, card: DeviceSpec, tables: Sequence[Recorded]) -> FieldQuality:
    """Predict models of the field table from the others, and its tuned rows from all default ones."""
    carried = fit_tables(tables)
    predicted = field_predictions(field, card, carried)
    error = np.abs(predicted / field.us - 1)
    usable = (field.m >= FIELD_LEAST_M) & ~field.tuned.astype(bool)
    summary = {}
    for dtype, is_fp8 in (("bf16", 0), ("fp8 block", 1)):
        for ep, in_group in (("ep 1", field.ep == 1), ("ep > 1", field.ep > 1)):
            for how, skewed in (("balanced", False), ("skewed", True)):
                chosen = usable & (field.fp8 == is_fp8) & in_group & (field.skewed == skewed)
                summary[f"{dtype}, {ep}, {how}"] = quantiles(error[chosen])
    c = fit_field(field, card, carried)
    chosen = (field.m >= FIELD_LEAST_M) & field.tuned.astype(bool)
    tuned = field[chosen]
    tuned_us = tuned_call_us(tuned, card, c)
    summary["tuned rows, E=256 N=512 bf16"] = quantiles(np.abs(tuned_us / tuned.us - 1))
    at = usable & (field.ep == 1)
    errors = list(zip(field.m[at].astype(int).tolist(), error[at].tolist(), strict=True))
    return FieldQuality(summary, errors)


def field_predictions(field: Field, card: DeviceSpec, carried: Constants) -> Array:
    """Return the time of every row with default tiles, by a fit that did not see its model."""
    arrays = field_tiles(field.default_tiles(), card)
    models = sorted(set(field.model.tolist()))
    predicted = np.zeros(len(field.us))
    folds = -(-len(models) // HELD_OUT)
    for fold in range(folds):
        held_out = np.isin(field.model, models[fold::folds])
        c = fit_field(field[~held_out], card, carried)
        predicted[held_out] = field.call_us((arrays, arrays), card, c)[held_out]
    return predicted


def tuned_call_us(tuned: Field, card: DeviceSpec, c: Constants) -> Array:
    """Return the model's times with the shipped tuned file: the nearest key, one tile for both GEMMs."""
    rows = {int(key): Tile.from_row(row) for key, row in json.loads(TUNED_FILE.read_text()).items()}
    keys = np.array(list(rows))
    tiles = [rows[int(keys[np.abs(keys - tokens).argmin()])] for tokens in tuned.tokens]
    arrays = field_tiles(tiles, card)
    return tuned.call_us((arrays, arrays), card, c)


def quantiles(errors: Array) -> dict[str, float]:
    """Return the median and the 90th percentile."""
    return {
        "median": round(float(np.median(errors)), 4),
        "p90": round(float(np.quantile(errors, 0.9)), 4),
        "rows": len(errors),
    }


def margins(errors: Errors) -> list[tuple[int, float]]:
    """Return the 90th percentile of the error from each M of ``MARGIN_STEPS`` to the next."""
    found = []
    for low, high in zip(MARGIN_STEPS, (*MARGIN_STEPS[1:], 10**9), strict=True):
        inside = [error for m, error in errors if low <= m < high]
        found.append((low, round(float(np.quantile(inside, 0.9)), 3)))
    return found


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--field", type=Path)
    what.add_argument("--stored", action="store_true", help="fit nothing: the tables as the shipped constants see them")
    parser.add_argument("--leave-out", action="store_true", help="also refit without one term at a time")
    args = parser.parse_args()
    tables = [recorded(path) for path in args.tables]
    if args.stored:
        _print_choices(stored_quality(tables))
        return 0
    if args.leave_out:
        print("| without | first | best of 5 | best of 20 | rank correlation |\n|---|---:|---:|---:|---:|")
        for name, figures in leave_out(tables):
            print(f"| {name} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |", flush=True)
        print()
    _print_choices(table_quality(tables).summary)
    quality = field_quality(read_field(args.field), find_device(DEFAULT_DEVICE_NAME), tables)
    print("\n| RTX PRO 6000, not fitted, M >= 8 | median | 90th percentile | rows |\n|---|---:|---:|---:|")
    for name, found in quality.summary.items():
        print(f"| {name} | {found['median']:.1%} | {found['p90']:.1%} | {found['rows']} |")
    print("\nmargins:", ", ".join(f"M >= {m}: {error:.0%}" for m, error in margins(quality.errors)))
    return 0


def _print_choices(summary: Mapping[str, Any]) -> None:
    print(
        "| unseen table | model | M | first | best of 5 | best of 20 | worst first | rank correlation | median error |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for name, kinds in summary.items():
        for kind, found in kinds.items():
            for band in ("M >= 8", "M < 8"):
                *cells, error = found[band].values()
                print(f"| {name} | {kind} | {band} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {error:.1%} |")


if __name__ == "__main__":
    sys.exit(main())
