"""Fit the cost model's constants and write src/sm120tune/data/cost_model.json. Needs scipy.

    python bench/fit_model.py bench/tables/*.parquet --field bench/field/*.parquet

The constants are fitted on everything (bench/model_fits.py). Their stored quality and the margins of estimates come
from bench/model_quality.py, which fits again without what it then predicts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from field_data import read_field
from model_fits import OF_FIELD, OF_TABLES, fit_correction, fit_field, fit_tables
from model_quality import field_quality, margins, table_quality
from model_tables import recorded

from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.measure.cost_constants import Constants

OUTPUT = Path(__file__).parents[1] / "src/sm120tune/data/cost_model.json"
FORMULA = "cost-3"
"""To be changed with the formula."""


def main() -> int:
    """Write the constants, their quality and the margins that follow from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--field", type=Path, required=True)
    args = parser.parse_args()
    tables = [recorded(path) for path in args.tables]
    field, card = read_field(args.field), find_device(DEFAULT_DEVICE_NAME)
    sm90 = fit_tables(tables)
    sm120 = fit_field(field, card, sm90)
    of_the_call = {name: getattr(sm120, name) for name in OF_FIELD if name not in OF_TABLES}
    on_tables, on_field = table_quality(tables), field_quality(field, card, tables)
    classes = {
        "sm90": {
            "fitted_on": [table.name for table in tables],
            "constants": _digits(replace(sm90, **of_the_call)),
            "margins": margins(on_tables.errors),
            "quality": on_tables.summary,
            "correction": fit_correction(tables, sm90).to_json(),
        },
        "sm120": {
            "fitted_on": [args.field.stem],
            "constants": _digits(sm120),
            "margins": margins(on_field.errors),
            "quality": on_field.summary,
        },
    }
    # Part of a run's identity: estimates of other constants are not resumed.
    digest = hashlib.sha256(json.dumps(classes, sort_keys=True).encode()).hexdigest()[:8]
    OUTPUT.write_text(json.dumps({"version": f"{FORMULA}.{digest}", "classes": classes}, indent=1) + "\n")
    return 0


def _digits(c: Constants) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in asdict(c).items()}


if __name__ == "__main__":
    sys.exit(main())
