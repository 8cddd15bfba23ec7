"""The figures of docs/model.md, as SVG. Needs scipy and matplotlib.

    python bench/plots.py bench/tables/*.parquet --field bench/field/*.parquet

Recorded tables: the corrected model against the measured time of each tile, fitted on the other tables. RTX PRO 6000:
default tiles of models that the fit did not see, and what these tiles leave over the card's floor. The same input gives
the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

mpl.use("svg")
from field_data import Field, read_field
from left_over import over_floor, whole_layers
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from model_fits import FIELD_LEAST_M, fit_correction, fit_tables
from model_quality import field_predictions, predictions
from model_tables import Recorded, recorded

from sm120tune.devices import DEFAULT_DEVICE_NAME, DeviceSpec, find_device

Array = npt.NDArray[np.float64]

OUTPUT = Path(__file__).parents[1] / "docs/plots"
POINTS = 1200
"""Of a panel, drawn at random: more are no plainer and make the file large."""


def main() -> int:
    """Write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--field", type=Path, required=True)
    args = parser.parse_args()
    mpl.rcParams.update({"svg.hashsalt": "sm120tune", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    OUTPUT.mkdir(exist_ok=True)
    tables = [recorded(path) for path in args.tables]
    field, card = read_field(args.field), find_device(DEFAULT_DEVICE_NAME)
    _save(unseen_tables(tables), "unseen_tables")
    _save(unseen_models(field, card, tables), "unseen_models")
    _save(left_over(field, card), "left_over")
    return 0


def unseen_tables(tables: list[Recorded]) -> Figure:
    """Draw predicted over measured times of every table, one panel each, coloured by M."""
    figure, axes = plt.subplots(1, len(tables), figsize=(3.1 * len(tables), 3.4), layout="constrained", squeeze=False)
    for axis, table in zip(axes.flat, tables, strict=True):
        others = [other for other in tables if other is not table]
        constants = fit_tables(others)
        predicted = predictions(table, constants, fit_correction(others, constants))
        kept = [~one.at_least for one in table.launches]
        us = np.concatenate([one.us[keep] for one, keep in zip(table.launches, kept, strict=True)])
        expected = np.concatenate([each[keep] for each, keep in zip(predicted, kept, strict=True)])
        m = np.concatenate([np.full(keep.sum(), one.m) for one, keep in zip(table.launches, kept, strict=True)])
        points = _scatter(axis, us, expected, m)
        axis.set_title(table.name.removeprefix("h200_"), fontsize=8)
    axes[0, 0].set_ylabel("predicted µs")
    figure.colorbar(points, ax=axes, label="M", ticks=[1, 16, 256, 4096], format="%d")
    return figure


def unseen_models(field: Field, card: DeviceSpec, tables: list[Recorded]) -> Figure:
    """Draw predicted over measured times of whole calls with default tiles, bf16 and fp8."""
    predicted = field_predictions(field, card, fit_tables(tables))
    usable = (field.m >= FIELD_LEAST_M) & ~field.tuned.astype(bool) & (field.ep == 1)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for axis, fp8, dtype in ((axes[0], 0, "bf16"), (axes[1], 1, "fp8 block")):
        chosen = usable & (field.fp8 == fp8)
        points = _scatter(axis, field.us[chosen], predicted[chosen], field.m[chosen])
        axis.set_title(f"RTX PRO 6000, default tiles, {dtype}", fontsize=9)
    axes[0].set_ylabel("predicted µs")
    figure.colorbar(points, ax=axes, label="M", ticks=[16, 256, 4096], format="%d")
    return figure


def left_over(field: Field, card: DeviceSpec) -> Figure:
    """Draw what the built-in default takes over the card's floor, one line a model."""
    over, whole = over_floor(field, card), whole_layers(field)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    for axis, fp8, dtype in ((axes[0], 0, "bf16"), (axes[1], 1, "fp8 block")):
        for number, model in enumerate(sorted(set(field.model[whole & (field.fp8 == fp8)].tolist()))):
            chosen = np.flatnonzero(whole & (field.fp8 == fp8) & (field.model == model) & (field.m >= FIELD_LEAST_M))
            chosen = chosen[np.argsort(field.m[chosen])]
            style = "-" if number < 10 else "--"
            axis.plot(field.m[chosen], over[chosen], style, label=model, linewidth=1.2)
        axis.set(xscale="log", xlabel="M", title=f"{dtype}: measured time over the floor")
        axis.legend(fontsize=6, title="hidden-inter-topk-experts", title_fontsize=6)
    return figure


def _scatter(axis: Axes, us: Array, expected: Array, m: Array) -> mpl.collections.PathCollection:
    """Draw points and the line of equality on logarithmic axes; returns the points."""
    drawn = np.random.default_rng(0).permutation(len(us))[:POINTS]
    ends = [float(us.min()), float(us.max())]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured µs")
    norm = mpl.colors.LogNorm(1, 16384)
    # As a picture within the drawing: some thousand marks would be larger than the page.
    return axis.scatter(us[drawn], expected[drawn], c=m[drawn], s=3, norm=norm, cmap="viridis", rasterized=True)


def _save(figure: Figure, name: str) -> None:
    figure.savefig(OUTPUT / f"{name}.svg", metadata={"Date": None}, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
