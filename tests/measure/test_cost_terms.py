from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.measure.cost_constants import card_class
from sm120tune.measure.cost_terms import FEATURES, Load, Terms, TileArrays, features, smooth_max, terms

CARD = find_device(DEFAULT_DEVICE_NAME)
HOPPER = find_device("NVIDIA H200")
C = card_class(120).constants
DECODE = Load(1024.0, 2048.0, 512.0, 256.0, 64.0, 512.0, 256.0, 2.0, 2.0)
PREFILL = Load(1024.0, 2048.0, 131072.0, 256.0, 16384.0, 131072.0, 2048.0, 2.0, 2.0)


def tile(**changes: float) -> TileArrays:
    values = {
        "block_m": 64, "block_n": 64, "block_k": 64, "group": 1, "warps": 4, "stages": 3, "spill_bytes": 0,
        "occupancy": 2,
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


def rows_read(load: Load, one: TileArrays, card: object) -> float:
    """Return how many rows of A and B a step reads from shared memory, those of all warps together."""
    found = terms(load, one, card, C)  # type: ignore[arg-type]
    blocks = np.ceil(load.row_blocks * np.ceil(load.n / one.block_n[0]) / card.sm_count)  # type: ignore[attr-defined]
    a_step = found.shared_reads[0] / (blocks * np.ceil(load.k / one.block_k[0]))
    return float(a_step * C.shared_gb_s * 1e3 / (one.block_k[0] * np.asarray(load.activation_bytes)))


@pytest.mark.parametrize(
    ("m", "n", "warps", "layout"),
    [
        (16, 64, 8, (1, 8)), (32, 32, 4, (2, 2)), (32, 32, 8, (2, 4)), (32, 64, 4, (1, 4)), (32, 64, 8, (2, 4)),
        (64, 32, 4, (2, 2)), (64, 64, 4, (2, 2)), (64, 128, 4, (1, 4)), (64, 128, 8, (2, 4)), (64, 256, 8, (1, 8)),
        (128, 32, 4, (4, 1)), (128, 64, 4, (2, 2)), (128, 64, 8, (4, 2)), (128, 128, 4, (2, 2)), (128, 128, 8, (2, 4)),
        (256, 32, 8, (8, 1)), (256, 64, 8, (4, 2)),
    ],
)  # fmt: skip
def test_warps_of_mma_sync_read_as_triton_lays_them_out(m: int, n: int, warps: int, layout: tuple[int, int]) -> None:
    """``warpsPerCTA`` that Triton 3.8.0 gave these tiles for SM120, bf16 and fp8 alike."""
    down, across = layout
    one = tile(block_m=m, block_n=n, warps=warps)
    assert rows_read(PREFILL, one, CARD) == pytest.approx(across * m + down * n)


def test_warpgroups_read_one_operand_each_and_the_other_every_64_rows() -> None:
    assert rows_read(PREFILL, tile(block_m=64, block_n=128), HOPPER) == pytest.approx(64 + 128)
    assert rows_read(PREFILL, tile(block_m=64, block_n=128, warps=8), HOPPER) == pytest.approx(2 * 64 + 128)
    assert rows_read(PREFILL, tile(block_m=128, block_n=128, warps=8), HOPPER) == pytest.approx(128 + 2 * 128)
    fp8 = replace(PREFILL, weight_bytes=1.0, activation_bytes=1.0, fp8=1.0)
    # Swapped: the tile's columns are what lies down.
    assert rows_read(fp8, tile(block_m=32, block_n=128), HOPPER) == pytest.approx(2 * 32 + 128)


def test_small_fp8_tiles_are_unpacked_on_hopper_alone() -> None:
    c = replace(C, tensor_share=0.4, tensor_share_fp8=0.8)
    eight = replace(PREFILL, weight_bytes=1.0, activation_bytes=1.0)
    small, swapped = tile(block_m=32, block_n=32), tile(block_m=32, block_n=64)

    def compute(load: Load, one: TileArrays, card: object) -> float:
        return float(terms(load, one, card, c).compute[0])  # type: ignore[arg-type]

    fp8 = replace(eight, fp8=1.0)
    assert compute(fp8, small, HOPPER) == pytest.approx(4 * compute(eight, small, HOPPER))
    assert compute(fp8, swapped, HOPPER) == compute(eight, swapped, HOPPER)
    assert compute(fp8, small, CARD) == compute(eight, small, CARD)


def test_experts_that_the_l2_does_not_hold_are_read_again_for_every_group() -> None:
    wide = replace(PREFILL, n=7168.0, k=8192.0, touched=8.0, row_blocks=256.0)

    def l2(load: Load, group: int) -> float:
        return float(terms(load, tile(group=group), CARD, C).l2[0])

    assert l2(wide, 1) > l2(wide, 16) > l2(wide, 64)
    assert l2(wide, 64) < 1.02 * l2(replace(wide, touched=256.0), 1)
    assert l2(PREFILL, 1) == l2(PREFILL, 16)


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
    assert features(DECODE, tile(), found).shape == (1, FEATURES)
    assert np.isfinite(features(DECODE, tile(), found)).all()
