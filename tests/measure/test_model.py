from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from sm120tune.errors import UserError
from sm120tune.measure.cost_constants import model_version
from sm120tune.measure.model import GROUPS, estimate_gemm, estimate_tiles, likely_group, other_group
from sm120tune.measure.occupancy import StoredFacts
from sm120tune.measure.roofline import floor_us, gemm_work
from sm120tune.measure.routing import BALANCED, UNIFORM, tokens_per_expert
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile


@dataclass(frozen=True)
class Card:
    arch: int = 120
    sm_count: int = 188
    shared_memory_per_sm: int = 102400
    registers_per_sm: int = 65536
    max_warps_per_sm: int = 48
    l2_bytes: int = 128 * 2**20
    bandwidth: float = 1.792e12
    bf16_flops: float = 467.8e12


CARD = Card()
QWEN = MoEProblem(experts=256, intermediate=512, hidden=2048, topk=8, router_experts=256)
DEFAULT_SMALL = Tile(16, 32, 64, 1)
DEFAULT_LARGE = Tile(64, 64, 32, 8)


def both(problem: MoEProblem, tile: Tile, m: int) -> float:
    return sum(estimate_gemm(problem, gemm, tile, m, CARD, None, BALANCED).us for gemm in Gemm)


# µs of SGLang 0.5.14's whole fused_moe call on an RTX PRO 6000 Server Edition, bf16, balanced, ep 1, from
# ai-dynamo/aiconfigurator (Apache-2.0, commit 095f58a5). E, N, hidden, topk, M, µs.
PUBLIC_TIMES = [
    (128, 768, 2048, 8, 32, 807.1),
    (128, 768, 2048, 8, 256, 1192.6),
    (128, 768, 2048, 8, 1024, 1288.1),
    (128, 768, 2048, 8, 4096, 1555.4),
    (128, 768, 2048, 8, 16384, 5710.7),
    (8, 14336, 4096, 2, 8, 1866.3),
    (8, 14336, 4096, 2, 64, 2860.1),
    (8, 14336, 4096, 2, 4096, 12744.9),
]


@pytest.mark.parametrize(("e", "n", "hidden", "topk", "m", "us"), PUBLIC_TIMES)
def test_public_times_of_default_tiles(e: int, n: int, hidden: int, topk: int, m: int, us: float) -> None:
    problem = MoEProblem(experts=e, intermediate=n, hidden=hidden, topk=topk, router_experts=e)
    # Align, activation and sum: fitted on the same data.
    rest = 10 + m * topk * (3 * n + hidden) * 2 / 2.6e12 * 1e6
    estimate = both(problem, DEFAULT_SMALL if m <= e else DEFAULT_LARGE, m) + rest
    assert estimate == pytest.approx(us, rel=0.2)


@pytest.mark.parametrize("tile", [Tile(64, 128, 64, 8), Tile(128, 128, 64, 8, 8, 3), Tile(64, 64, 64, 8)], ids=str)
def test_tuned_tiles_beat_the_default_at_prefill(tile: Tile) -> None:
    assert both(QWEN, tile, 4096) < 0.9 * both(QWEN, DEFAULT_LARGE, 4096)


def test_narrow_tile_rows_cost_bandwidth() -> None:
    wide = estimate_gemm(QWEN, Gemm.GATE_UP, Tile(64, 64, 64, 8), 512, CARD, None, BALANCED)
    narrow = estimate_gemm(QWEN, Gemm.GATE_UP, Tile(64, 64, 32, 8), 512, CARD, None, BALANCED)
    assert wide.bound == narrow.bound == "bandwidth"
    assert 1.3 < narrow.us / wide.us < 1.6


@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("m", [1, 64, 1024, 16384])
def test_no_estimate_is_below_the_roofline(gemm: Gemm, m: int) -> None:
    floor, _ = floor_us(gemm_work(QWEN, gemm, m, UNIFORM), CARD.bandwidth, CARD.bf16_flops)
    for tile in (DEFAULT_SMALL, DEFAULT_LARGE, Tile(128, 128, 64, 8, 8, 3)):
        assert estimate_gemm(QWEN, gemm, tile, m, CARD, None, UNIFORM).us > floor


def test_time_grows_with_m() -> None:
    times = [both(QWEN, Tile(64, 128, 64, 8), m) for m in (1, 8, 64, 1024, 4096, 16384)]
    assert times == sorted(times)
    assert times[-1] > 20 * times[0]


def test_what_bounds() -> None:
    def bound(tile: Tile, m: int) -> str:
        return estimate_gemm(QWEN, Gemm.GATE_UP, tile, m, CARD, None, BALANCED).bound

    assert bound(Tile(16, 128, 64, 1), 64) == "bandwidth"
    assert bound(Tile(128, 256, 64, 8, 8, 3), 16384) == "compute"
    assert bound(Tile(64, 64, 64, 8, 4, 3), 16384) == "l2"
    few = MoEProblem(experts=8, intermediate=64, hidden=2048, topk=1, router_experts=8)
    alone = estimate_gemm(few, Gemm.GATE_UP, Tile(16, 64, 64, 1, 4, 2), 1, CARD, None, BALANCED)
    assert alone.bound == "latency"


def test_faster_card_is_faster_where_it_counts() -> None:
    def us(card: Card, m: int) -> float:
        tile = Tile(16 if m == 64 else 64, 128, 64, 8)
        return estimate_gemm(QWEN, Gemm.GATE_UP, tile, m, card, None, BALANCED).us

    slow_memory, slow_cores = replace(CARD, bandwidth=273e9), replace(CARD, bf16_flops=100e12)
    assert us(slow_memory, 64) > 4 * us(CARD, 64)
    assert us(slow_cores, 64) < 1.5 * us(CARD, 64)
    assert us(slow_cores, 16384) > 2.5 * us(CARD, 16384)


def test_one_warp_feeds_one_of_four_tensor_cores() -> None:
    facts = StoredFacts(shared_bytes=101376, registers=128, spill_bytes=0)
    one, four = (
        estimate_gemm(QWEN, Gemm.GATE_UP, Tile(64, 64, 64, 8, warps, 3), 16384, CARD, facts, BALANCED).us
        for warps in (1, 4)
    )
    assert one > 1.3 * four


def test_spills_are_expensive() -> None:
    tile = Tile(128, 256, 64, 8, 4, 2)
    clean = StoredFacts(shared_bytes=49152, registers=255, spill_bytes=0)
    times = [
        estimate_gemm(QWEN, Gemm.GATE_UP, tile, 16384, CARD, facts, BALANCED).us
        for facts in (clean, replace(clean, spill_bytes=5400))
    ]
    assert 6 < times[1] / times[0] < 13


def test_tile_that_cannot_run_is_infinite_and_says_why() -> None:
    estimate = estimate_gemm(QWEN, Gemm.DOWN, Tile(256, 256, 128, 1, 8, 3), 64, CARD, None, BALANCED)
    assert math.isinf(estimate.us)
    assert estimate.bound == "shared_memory"


def test_compiler_facts_replace_the_guess() -> None:
    tile = Tile(64, 64, 64, 8)
    guessed = estimate_gemm(QWEN, Gemm.GATE_UP, tile, 16384, CARD, None, BALANCED)
    crowded = StoredFacts(shared_bytes=101376, registers=255, spill_bytes=0)
    assert estimate_gemm(QWEN, Gemm.GATE_UP, tile, 16384, CARD, crowded, BALANCED).us > guessed.us


def test_many_tiles_at_once_are_the_same_as_one_by_one() -> None:
    tiles = [DEFAULT_SMALL, DEFAULT_LARGE, Tile(256, 256, 128, 1, 8, 3), Tile(16, 16, 32, 1, 4, 2)]
    for gemm in Gemm:
        together = estimate_tiles(QWEN, gemm, tiles, 512, CARD, UNIFORM)
        alone = [estimate_gemm(QWEN, gemm, tile, 512, CARD, None, UNIFORM).us for tile in tiles]
        assert together.tolist() == pytest.approx(alone)
        assert math.isinf(together[2])


def test_no_tiles_is_no_times() -> None:
    assert estimate_tiles(QWEN, Gemm.DOWN, [], 512, CARD, UNIFORM).shape == (0,)


def test_hopper_has_constants_of_its_own() -> None:
    hopper = replace(CARD, arch=90)
    assert both(QWEN, DEFAULT_LARGE, 4096) != sum(
        estimate_gemm(QWEN, gemm, DEFAULT_LARGE, 4096, hopper, None, BALANCED).us for gemm in Gemm
    )


def test_group_goes_with_the_rows_an_expert_has() -> None:
    assert likely_group(QWEN, Gemm.DOWN, 64, 16, CARD, BALANCED) == 1
    assert likely_group(QWEN, Gemm.DOWN, 16384, 128, CARD, BALANCED) == 16
    assert likely_group(QWEN, Gemm.GATE_UP, 16384, 128, CARD, BALANCED) == 1
    assert likely_group(QWEN, Gemm.GATE_UP, 16384, 64, CARD, BALANCED) == 16


def test_a_tile_is_repeated_with_the_other_group() -> None:
    assert [other_group(group) for group in GROUPS] == list(reversed(GROUPS))
    assert other_group(64) == 1


def test_experts_that_fill_the_l2_are_grouped_from_the_second_block_on() -> None:
    few_wide = MoEProblem(experts=8, intermediate=14336, hidden=4096, topk=2, router_experts=8)
    assert likely_group(few_wide, Gemm.GATE_UP, 512, 64, CARD, BALANCED) == 16
    assert likely_group(few_wide, Gemm.GATE_UP, 512, 128, CARD, BALANCED) == 1
    assert likely_group(few_wide, Gemm.GATE_UP, 512, 64, replace(CARD, l2_bytes=2**30), BALANCED) == 1


def test_block_scales_cost_fp8_tiles_a_part_of_every_step() -> None:
    by_block, by_tensor = (replace(QWEN, dtype="fp8_w8a8", block_shape=shape) for shape in ((128, 128), None))
    facts = StoredFacts(shared_bytes=49152, registers=128, spill_bytes=0)

    def us(problem: MoEProblem, block_k: int) -> float:
        tile = Tile(64, 128, block_k, 8)
        return estimate_gemm(problem, Gemm.GATE_UP, tile, 16384, CARD, facts, BALANCED).us

    assert us(by_block, 128) > us(by_tensor, 128)
    assert us(by_block, 64) - us(by_tensor, 64) > 1.5 * (us(by_block, 128) - us(by_tensor, 128))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("arch", [90, 120])
def test_a_rank_without_any_row_only_writes_zeros(arch: int) -> None:
    rank = MoEProblem(experts=2, intermediate=512, hidden=2048, topk=1, router_experts=256)
    empty = next(m for m in range(1, 50) if not tokens_per_expert(rank, m, UNIFORM).any())
    card = replace(CARD, arch=arch)
    for gemm in Gemm:
        estimate = estimate_gemm(rank, gemm, DEFAULT_SMALL, empty, card, None, UNIFORM)
        busy = estimate_gemm(rank, gemm, DEFAULT_SMALL, 4096, card, None, UNIFORM)
        assert 0 < estimate.us < busy.us
        assert likely_group(rank, gemm, empty, 16, card, UNIFORM) == 1


def test_bad_m_is_a_user_error() -> None:
    with pytest.raises(UserError, match="at least 1"):
        estimate_gemm(QWEN, Gemm.GATE_UP, DEFAULT_SMALL, 0, CARD, None, BALANCED)


def test_version_names_the_model() -> None:
    assert model_version().startswith("cost-3.")
