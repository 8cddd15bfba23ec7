from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.measure.cost_constants import card_class
from sm120tune.measure.cost_terms import Load, Terms, TileArrays, features, smooth_max, terms

CARD = find_device(DEFAULT_DEVICE_NAME)
HOPPER = find_device("NVIDIA H200")
C = card_class(120).constants
DECODE = Load(1024.0, 2048.0, 512.0, 256.0, 64.0, 512.0, 256.0, 2.0, 2.0)
PREFILL = Load(1024.0, 2048.0, 131072.0, 256.0, 16384.0, 131072.0, 2048.0, 2.0, 2.0)


def tile(**changes: float) -> TileArrays:
    values = {
        "block_m": 64, "block_n": 64, "block_k": 64, "warps": 4, "stages": 3, "spill_bytes": 0, "occupancy": 2,
    }  # fmt: skip
    return TileArrays(**{name: np.array([float(changes.get(name, value))]) for name, value in values.items()})


def time(load: Load, one: TileArrays, card: object = CARD) -> float:
    return float(terms(load, one, card, C).us[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_more_of_what_hides_latency_never_costs(load: Load) -> None:
    assert time(load, tile(stages=4)) < time(load, tile(stages=3)) < time(load, tile(stages=2))
    assert time(load, tile(occupancy=3)) <= time(load, tile(occupancy=1))


@pytest.mark.parametrize("load", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_spills_cost_in_proportion_to_the_stack(load: Load) -> None:
    clean, once, some, many = (time(load, tile(spill_bytes=size)) for size in (0, 24, 200, 5400))
    assert clean == once < some < many
    if load is PREFILL:
        assert many > 4 * clean


@pytest.mark.parametrize(
    "field", ["n", "k", "rows_of_c", "row_blocks"], ids=["columns", "depth", "rows written", "blocks"]
)
def test_more_work_takes_longer(field: str) -> None:
    for load in (DECODE, PREFILL):
        assert time(replace(load, **{field: 2 * float(getattr(load, field))}), tile()) > time(load, tile())


def test_touched_experts_cost_bandwidth_and_a_warm_cache_saves_it() -> None:
    half = replace(DECODE, touched=128.0)
    assert time(half, tile()) < 0.7 * time(DECODE, tile())
    assert time(replace(DECODE, cold=0.0), tile()) < 0.5 * time(DECODE, tile())


def test_short_rows_cost_bandwidth_and_long_ones_next_to_nothing() -> None:
    found = [float(terms(DECODE, tile(block_k=size), CARD, C).bandwidth[0]) for size in (32, 64, 128, 256)]
    assert 1.2 < found[0] / found[1] < 1.6
    assert 1.0 < found[1] / found[2] < 1.15
    assert 1.0 < found[2] / found[3] < 1.02


def test_a_half_empty_wave_costs_a_whole_one() -> None:
    slots = CARD.sm_count * 2

    def latency(blocks: int) -> float:
        return float(terms(replace(PREFILL, n=64.0, row_blocks=float(blocks)), tile(), CARD, C).latency[0])

    assert latency(slots) == latency(1)
    assert latency(slots + 1) == latency(2 * slots) == pytest.approx(2 * latency(slots))


def test_wgmma_only_on_hopper_and_from_64_rows() -> None:
    c = replace(C, tensor_share=0.4, tensor_share_wgmma=0.8)
    large, small = (terms(PREFILL, tile(block_m=rows), HOPPER, c).compute[0] for rows in (64, 32))
    # Half the rows a block, half the operations: the rate alone makes up the difference.
    assert small == pytest.approx(large)
    assert terms(PREFILL, tile(), CARD, c).compute[0] == pytest.approx(
        terms(PREFILL, tile(), CARD, replace(c, tensor_share_wgmma=0.1)).compute[0]
    )


def test_dtypes_count_by_their_bytes() -> None:
    fp8 = replace(DECODE, weight_bytes=1.0, activation_bytes=1.0)
    weight_only = replace(DECODE, weight_bytes=1.0)
    both, weights, full = (terms(load, tile(block_k=128), CARD, C) for load in (fp8, weight_only, DECODE))
    assert both.bandwidth < weights.bandwidth < 0.6 * full.bandwidth
    assert weights.compute == full.compute > both.compute


@pytest.mark.parametrize(
    ("load", "one", "bound"),
    [
        (DECODE, tile(block_m=16), "bandwidth"),
        (replace(PREFILL, rows=4096.0), tile(block_n=16, block_m=16, warps=8, occupancy=6), "shared_reads"),
        (PREFILL, tile(block_m=16, block_n=32, occupancy=6), "l2"),
        (replace(DECODE, n=64.0, touched=1.0, rows=1.0, row_blocks=1.0, rows_of_c=1.0), tile(), "latency"),
        (replace(PREFILL, row_blocks=512.0), tile(block_m=256, block_n=256, warps=8, stages=5), "compute"),
    ],
    ids=["bandwidth", "shared_reads", "l2", "latency", "compute"],
)
def test_the_bound_is_the_largest_term(load: Load, one: TileArrays, bound: str) -> None:
    found = terms(load, one, CARD, C)
    assert found.bounds() == [bound]
    names = ("bandwidth", "compute", "shared_reads", "l2", "latency")
    assert getattr(found, bound)[0] == max(getattr(found, name)[0] for name in names)


def test_time_is_at_least_the_largest_term_and_the_launch() -> None:
    found: Terms = terms(PREFILL, tile(), CARD, C)
    largest = max(found.bandwidth[0], found.throughput[0], found.latency[0])
    assert C.launch_us + largest < found.us[0] < C.launch_us + 3 * largest


def test_smooth_maximum() -> None:
    assert smooth_max(4.0, np.array([3.0]), np.array([3.0])) == pytest.approx([3 * 2**0.25])
    assert smooth_max(4.0, np.array([3.0]), np.array([1e-9])) == pytest.approx([3.0])
    assert smooth_max(4.0, np.array([0.0]), 0.0) == pytest.approx([0.0], abs=1e-6)
    assert smooth_max(4.0, np.array([1e9]), 1e9) == pytest.approx([1e9 * 2**0.25])


def test_features_are_one_finite_row_a_launch() -> None:
    found = terms(DECODE, tile(), CARD, C)
    assert features(DECODE, tile(), found).shape == (1, 12)
    assert np.isfinite(features(DECODE, tile(), found)).all()
