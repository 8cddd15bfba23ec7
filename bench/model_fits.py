"""The fits of the cost model: what is free, what is carried over, and where each begins. Needs scipy.

sm90: every constant of a GEMM and the learned correction, on recorded tables. sm120: what the built-in default's public
times can tell, on the field table but its tuned rows; the rest is carried over from sm90.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from field_data import Field, field_tiles
from model_tables import Recorded
from scipy.optimize import least_squares

from sm120tune.devices import DeviceSpec
from sm120tune.measure.correction import Correction
from sm120tune.measure.cost_constants import LIMITS, Constants
from sm120tune.measure.cost_terms import features, terms

Array = npt.NDArray[np.float64]

START = Constants(
    launch_us=3.0,
    bandwidth_share=0.9,
    short_row_loss=0.4,
    short_row_growth=0.2,
    # torch reaches 417 of the RTX PRO 6000's 467.8 TFLOP/s at 8192^3 (bf16); default tiles cannot tell it from L2.
    tensor_share=0.89,
    tensor_share_wgmma=0.9,
    tensor_share_fp8=0.8,
    shared_gb_s=180.0,
    l2_gb_s=60.0,
    short_row_l2=0.3,
    l2_held_share=0.4,
    load_us=0.5,
    load_us_per_16k=0.13,
    serial_share=0.5,
    scale_us=0.1,
    # One fused multiply-add a product: 128 lanes at the H200's 1.755 GHz.
    rescale_g_s=225.0,
    block_us=2.0,
    store_us=0.01,
    spill_bytes_that_double=200.0,
    overlap=2.7,
    step_overlap=6.0,
    call_us=12.0,
    quantize_us=10.0,
    call_cache_share=1.0,
    hot_share=1.0,
    empty_block_us=2.0,
)
OF_TABLES = (
    "launch_us", "bandwidth_share", "short_row_loss", "short_row_growth", "tensor_share", "tensor_share_wgmma",
    "tensor_share_fp8", "shared_gb_s", "l2_gb_s", "short_row_l2", "l2_held_share", "load_us", "load_us_per_16k",
    "serial_share", "scale_us", "rescale_g_s", "block_us", "store_us", "spill_bytes_that_double", "overlap",
    "step_overlap",
)  # fmt: skip
OF_FIELD = (
    "launch_us", "bandwidth_share", "short_row_loss", "short_row_growth", "tensor_share_fp8", "l2_gb_s", "load_us",
    "block_us", "overlap", "call_us", "quantize_us", "call_cache_share", "hot_share", "empty_block_us",
)  # fmt: skip
CARRIED = (
    "shared_gb_s", "l2_held_share", "load_us_per_16k", "serial_share", "scale_us", "rescale_g_s", "store_us",
    "spill_bytes_that_double", "step_overlap",
)  # fmt: skip
"""From sm90 to sm120: three default tiles cannot tell them apart."""
SET_ON_SM120 = {"short_row_l2": 0.001}
"""bf16 default tiles of more than 16 rows all have rows of 64 bytes: there it is one with a lower ``l2_gb_s``."""

NEAR = 0.5
"""A tile this much slower than the best weighs half: the choice is among the fast ones."""
PULL = 0.5
"""Weight of staying near the start, for what the data leaves open."""
RIDGE = 0.01
FIELD_ROWS = 3000
"""Rows of the field table with ep 1, and as many with ep > 1, that a fit draws."""
FIELD_LEAST_M = 8
"""Below it the field's times are L2-hot."""


def solve(
    predict: Callable[[Constants], Array], us: Array, weight: Array, start: Constants, free: Sequence[str], edge: float
) -> Constants:
    """Return the constants that minimize the weighted soft-L1 of log residuals; ``edge`` is where it turns linear."""
    values = np.log([getattr(start, name) for name in free])
    low, high = (np.log([LIMITS.get(name, (1e-6, 1e6))[side] for name in free]) for side in (0, 1))
    values = np.clip(values, low + 1e-6, high - 1e-6)
    log_us, root = np.log(us), np.sqrt(weight)

    def residuals(x: Array) -> Array:
        c = replace(start, **dict(zip(free, np.exp(x).tolist(), strict=True)))
        return np.concatenate([(np.log(predict(c)) - log_us) * root, PULL * (x - values)])

    found = least_squares(residuals, values, bounds=(low, high), loss="soft_l1", f_scale=edge, max_nfev=40)
    return replace(start, **dict(zip(free, np.exp(found.x).tolist(), strict=True)))


def fit_tables(tables: Sequence[Recorded], fixed: Mapping[str, float] | None = None) -> Constants:
    """Fit a GEMM's constants on tables, all but those that are fixed."""
    fixed = fixed or {}
    free = [name for name in OF_TABLES if name not in fixed]

    def predict(c: Constants) -> Array:
        return np.concatenate([us for table in tables for us in table.times(c)])

    us, weight = _measured(tables)
    return solve(predict, us, 100 * weight, replace(START, **fixed), free, 0.5)


def fit_correction(tables: Sequence[Recorded], c: Constants) -> Correction:
    """Fit what the formula leaves over on tables."""
    found, predicted = [], []
    for table in tables:
        for one in table.launches:
            result = terms(one.load, one.arrays, table.device, c)
            found.append(features(one.load, one.arrays, result))
            predicted.append(result.us)
    us, weight = _measured(tables)
    return Correction.fit(np.concatenate(found), np.log(us / np.concatenate(predicted)), weight, RIDGE)


def fit_field(field: Field, card: DeviceSpec, tables: Constants) -> Constants:
    """Fit a card's constants on the whole fused call's times with default tiles."""
    usable = (field.m >= FIELD_LEAST_M) & ~field.tuned.astype(bool)
    rng = np.random.default_rng(0)
    rows = np.concatenate(
        [rng.permutation(np.flatnonzero(usable & one))[:FIELD_ROWS] for one in (field.ep == 1, field.ep > 1)]
    )
    few = field[rows]
    arrays = field_tiles(few.default_tiles(), card)
    start = replace(START, **{name: getattr(tables, name) for name in CARRIED}, **SET_ON_SM120)
    weight = np.full(len(few.us), 1.0)
    return solve(lambda c: few.call_us((arrays, arrays), card, c), few.us, weight, start, OF_FIELD, 0.05)


def _measured(tables: Sequence[Recorded]) -> tuple[Array, Array]:
    us = [one.us for table in tables for one in table.launches]
    return np.concatenate(us), np.concatenate([1 / (1 + (each / each.min() - 1) / NEAR) for each in us])
