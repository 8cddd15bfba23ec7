from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import make_job

from sm120tune.job import Job
from sm120tune.measure.model import estimate_gemm
from sm120tune.measure.occupancy import binary_key
from sm120tune.problem import Gemm
from sm120tune.seeds import Seeds, model_leaders
from sm120tune.tiles import TilePair


def us(job: Job, pair: TilePair, m: int) -> float:
    halves = ((Gemm.GATE_UP, pair.gate_up), (Gemm.DOWN, pair.down))
    return sum(estimate_gemm(job.problem, gemm, tile, m, job.device, None, job.routing).us for gemm, tile in halves)


@pytest.mark.parametrize("m", [1, 64, 4096])
def test_leaders_are_the_models_best_in_order_and_each_tells_of_two_new_tiles(
    sglang_0_5_23: Path, tmp_path: Path, m: int
) -> None:
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=(m,))
    leaders = model_leaders(job, m)
    assert len(leaders) == 16
    times = [us(job, pair, m) for pair in leaders[:12]]
    assert times == sorted(times)
    for half in ("gate_up", "down"):
        assert len({binary_key(getattr(pair, half)) for pair in leaders[:12]}) == 12
    space = job.space(m)
    for pair in leaders:
        assert space.allows(pair.gate_up)
        assert space.allows(pair.down)
    best = min(us(job, TilePair.same(tile), m) for tile in space.tiles() if tile.GROUP_SIZE_M == 1)
    assert times[0] <= best * (1 + 1e-9)


def test_rows_that_fill_many_blocks_are_grouped_in_down(sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=(1, 16384))
    assert {pair.down.GROUP_SIZE_M for pair in model_leaders(job, 16384)[:12]} == {16}
    assert {pair.down.GROUP_SIZE_M for pair in model_leaders(job, 1)} == {1}


def test_the_last_quarter_repeats_the_first_leaders_with_the_other_group(sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=(1, 4096))
    leaders = model_leaders(job, 4096)
    assert len(set(leaders)) == len(leaders)
    for first, again in zip(leaders[:4], leaders[12:], strict=True):
        for half in ("gate_up", "down"):
            one, other = getattr(first, half), getattr(again, half)
            assert {one.GROUP_SIZE_M, other.GROUP_SIZE_M} == {1, 16}
            assert binary_key(one) == binary_key(other)
    # Eight blocks are no more than one group.
    assert len({binary_key(pair.down) for pair in model_leaders(job, 1)}) == 16


def test_fewer_leaders_are_the_first_of_more(sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=(64,))
    assert model_leaders(job, 64, 4)[0] == model_leaders(job, 64, 12)[0]


def test_seeds_begin_with_todays_pair_and_hold_the_leaders(sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=(64,))
    seeds = Seeds(job).at(64)
    assert seeds[0] == job.today(64).pair
    assert set(model_leaders(job, 64)) <= set(seeds)


def test_the_larger_gain_is_expected_where_the_default_is_worst(sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=(8, 4096))
    seeds = Seeds(job)
    assert seeds.expected_gain(4096) < seeds.expected_gain(8) <= 1.0
