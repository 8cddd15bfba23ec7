"""Constants that made the times come back; what the times do not tell stays as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_cards import CLASS, LAYER, TRUTH, make_calibration_job

from sm120tune.calibrate.choice import choose_tiles
from sm120tune.calibrate.fit import OF_GEMMS, TOLD, fit, limits, sensitivities, weights
from sm120tune.calibrate.launches import Launch, Launches, launches_of
from sm120tune.calibrate.quality import left_out, quality, spearman
from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.job import Job
from sm120tune.measure.cost_constants import LIMITS
from sm120tune.measure.model import estimate_gemm, facts_without_compiling
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile

CARD = find_device(DEFAULT_DEVICE_NAME)
SIZES = (1, 64, 4096, 16384)


def launches(tiles: list[Tile], sizes: tuple[int, ...] = SIZES) -> Launches:
    each = [
        Launch(gemm, tile, m, facts_without_compiling(tile, LAYER, CARD))
        for tile in tiles
        for gemm in Gemm
        for m in sizes
    ]
    return launches_of(each, LAYER, CARD, UNIFORM)


@pytest.fixture(scope="module")
def job(sglang_0_5_23: Path) -> Job:
    return make_calibration_job(sglang_0_5_23)


@pytest.fixture(scope="module")
def some(job: Job) -> Launches:
    return launches([one.tile for one in choose_tiles(job, CLASS)])


def noisy(some: Launches, spread: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.asarray(some.us(TRUTH) * np.exp(rng.normal(0, spread, len(some.each))))


def test_arrays_give_what_one_estimate_after_the_other_gives(some: Launches) -> None:
    us = some.us(CLASS.constants, CLASS.correction)
    for index in range(0, len(us), 17):
        one = some.each[index]
        expected = estimate_gemm(LAYER, one.gemm, one.tile, one.m, CARD, one.facts, UNIFORM).us
        assert us[index] == pytest.approx(expected, rel=1e-12)
    half = np.arange(len(us)) % 2 == 0
    assert some.where(half).us(CLASS.constants).tolist() == us[half].tolist()


def test_the_constants_that_made_the_times_come_back(some: Launches) -> None:
    us = noisy(some, 0.02)
    found = fit(some, us, weights(some, us), CLASS)
    for name in ("launch_us", "bandwidth_share", "l2_gb_s", "load_us", "block_us", "tensor_share"):
        assert name in found.refitted
        before, after, truth = (getattr(c, name) for c in (CLASS.constants, found.constants, TRUTH))
        assert abs(math.log(after / truth)) < 0.25 * abs(math.log(before / truth)), name
    error = np.abs(some.us(found.constants) / us - 1)
    assert np.median(error) < 0.03
    assert np.median(np.abs(some.us(CLASS.constants) / us - 1)) > 0.15


def test_what_the_times_do_not_tell_is_the_class_s(some: Launches) -> None:
    us = noisy(some, 0.02)
    found = fit(some, us, weights(some, us), CLASS)
    left = set(OF_GEMMS) - set(found.refitted)
    # No fp8, and mma.sync at every BLOCK_SIZE_M on this card.
    assert {"tensor_share_fp8", "tensor_share_wgmma"} <= left
    assert found.told["tensor_share_fp8"] == pytest.approx(0.0, abs=1e-6)
    for name in vars(CLASS.constants):
        if name not in found.refitted:
            assert getattr(found.constants, name) == getattr(CLASS.constants, name)
    assert all((found.told[name] >= TOLD) == (name in found.refitted) for name in OF_GEMMS)


def test_small_m_alone_tells_nothing_of_the_tensor_cores(some: Launches) -> None:
    small = some.where(np.array([one.m == 1 and one.tile.BLOCK_SIZE_M == 16 for one in some.each]))
    us = small.us(TRUTH)
    found = fit(small, us, weights(small, us), CLASS)
    assert "tensor_share" not in found.refitted
    assert found.constants.tensor_share == CLASS.constants.tensor_share


def test_few_wild_times_change_little(some: Launches) -> None:
    us = noisy(some, 0.02)
    wild = us.copy()
    wild[::11] *= 6
    found = fit(some, wild, weights(some, us), CLASS).constants
    calm = np.ones(len(us), dtype=bool)
    calm[::11] = False
    error = np.abs(some.us(found) / us - 1)[calm]
    # Plain least squares would leave 16 %.
    assert np.median(error) < 0.045


@pytest.mark.parametrize("factor", [1 / 3, 3])
def test_no_constant_leaves_its_limits(some: Launches, factor: float) -> None:
    us = some.us(TRUTH) * factor
    found = fit(some, us, weights(some, us), CLASS).constants
    for name in LIMITS:
        low, high = limits(name, getattr(CLASS.constants, name))
        assert low * 0.999 <= getattr(found, name) <= high * 1.001


def test_tensor_cores_may_run_above_the_specified_clock_and_memory_may_not(some: Launches) -> None:
    faster = replace(TRUTH, tensor_share=1.15, l2_gb_s=200.0, shared_gb_s=600.0)
    us = some.us(faster)
    assert fit(some, us, weights(some, us), CLASS).constants.tensor_share > 1.05
    assert limits("bandwidth_share", CLASS.constants.bandwidth_share)[1] == 1.0


def test_slopes_are_those_of_the_formula() -> None:
    # One row block of 16 rows at M=1: weights through memory bind, so that time is nearly inverse to the bandwidth.
    bound = launches([Tile(16, 64, 128, 1, 4, 3)], (64,))
    slopes = dict(zip(OF_GEMMS, sensitivities(bound, CLASS)[0], strict=True))
    assert -1.0 < slopes["bandwidth_share"] < -0.7
    assert 0.0 <= slopes["launch_us"] < 0.1
    assert slopes["tensor_share_wgmma"] == slopes["tensor_share_fp8"] == 0.0


def test_weights_fall_with_the_distance_from_the_best() -> None:
    some = launches([Tile(16, 64, 64, 1), Tile(32, 64, 64, 1), Tile(64, 64, 64, 1)], (1,))
    us = np.array([10.0, 20.0, 15.0, 20.0, 20.0, 60.0])  # three tiles, gate_up and down of each
    assert weights(some, us).tolist() == pytest.approx([1.0, 1.0, 1 / 2, 1.0, 1 / 3, 1 / 5])


def test_quality_of_a_perfect_and_of_a_reversed_model() -> None:
    some = launches([Tile(16, 64, 64, 1), Tile(32, 64, 64, 1), Tile(64, 64, 64, 1)], (1,))
    us = np.array([10.0, 10.0, 20.0, 20.0, 40.0, 40.0])
    same = quality(some, us, us)
    assert (same.median, same.p90, same.rank_correlation, same.first, same.best_of_5) == (0.0, 0.0, 1.0, 1.0, 1.0)
    wrong = quality(some, us, us[::-1])
    assert wrong.rank_correlation == -1.0
    assert wrong.first == pytest.approx(4.0)
    assert wrong.best_of_5 == pytest.approx(1.0)
    assert wrong.median == pytest.approx(0.75)


def test_equal_predictions_say_nothing_of_the_order() -> None:
    assert spearman(np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0])) == 0.0
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(0.866, abs=1e-3)


def test_what_is_left_out_is_never_shown() -> None:
    parts = [np.array([True, False, False]), np.array([False, True, True])]
    shown: list[list[bool]] = []

    def predict(mask: np.ndarray) -> np.ndarray:
        shown.append(mask.tolist())
        return np.full(3, float(len(shown)))

    assert left_out(parts, predict).tolist() == [1.0, 2.0, 2.0]
    assert shown == [[False, True, True], [True, False, False]]
