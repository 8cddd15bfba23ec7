from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from settling import Run, by_m, check_written
from synthetic import RIGHT, WRONG, SyntheticLane, bowl, flat, make_job, pair_us

from sm120tune.accuracy import ErrorMeasure
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.results import RaceLane, RaceRequest, VerifyRequest
from sm120tune.problem import Gemm
from sm120tune.provenance import RowStatus
from sm120tune.search.board import halves
from sm120tune.tiles import Tile, TilePair

# Who wins


def test_a_winner_is_faster_right_and_measured(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane(noise=0.005)
    result = run(job, lane)
    check_written(job, result)
    for m in job.batch_sizes:
        row = by_m(result)[m]
        today = job.today(m).pair
        assert today is not None
        assert row.status is RowStatus.TUNED
        assert row.today == today
        assert row.measured
        assert row.timer == "cuda"
        assert row.error == RIGHT.relative
        assert row.repetitions > 1
        assert row.chosen_us is not None
        assert row.chosen_us == pytest.approx(pair_us(bowl, row.chosen, m), rel=0.02)
        assert row.today_us == pytest.approx(pair_us(bowl, today, m), rel=0.02)
        assert row.chosen_spread_us is not None
        assert 0 < row.chosen_spread_us < 0.02 * row.chosen_us
        true_ratio = pair_us(bowl, row.chosen, m) / pair_us(bowl, today, m)
        assert row.ratio == pytest.approx(true_ratio, rel=0.01)
        assert row.ratio_interval is not None
        assert row.ratio_interval[0] <= true_ratio <= row.ratio_interval[1] < 1
        floor_us, bound = job.floor(m)
        assert row.roofline_share == pytest.approx(floor_us / row.chosen_us)
        assert row.bound == bound
        # The pair that is written is the one that was checked, on data of its own.
        assert [request.pair for request in lane.checks if request.m == m][-1] == row.chosen
    assert len({request.seed for request in lane.checks}) == len(lane.checks)
    lane.stop()


def test_the_last_word_is_a_race_against_today_alone(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    lane = SyntheticLane()
    row = by_m(run(job, lane))[512]
    lane.stop()
    races = [request for request in lane.races if request.m == 512]
    last = races[-1]
    assert set(last.pairs) == {job.today(512).pair, row.chosen}
    alone = [request.rounds for request in races if set(request.pairs) == set(last.pairs)]
    assert row.repetitions == sum(alone) >= 10
    # Everyone who could win was raced beside today's pair before.
    first = races[0]
    assert job.today(512).pair in first.pairs
    assert row.chosen in first.pairs
    assert len(set(first.pairs)) == len(first.pairs) >= 3


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_equal_tiles_leave_todays_pair(sglang_0_5_23: Path, tmp_path: Path, run: Run, noise: float) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(1, 16, 64, 512), trials=15)
    lane = SyntheticLane(flat, name="equal", noise=noise)
    result = run(job, lane)
    lane.stop()
    check_written(job, result)
    for m in job.batch_sizes:
        row = by_m(result)[m]
        assert row.status is RowStatus.KEPT
        assert row.chosen == row.today == job.today(m).pair
        assert row.chosen_us == row.today_us
        assert row.ratio == 1.0


def test_where_today_is_the_optimum_it_stays(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    today = job.today(512).pair
    assert today is not None

    def cost(gemm: Gemm, tile: Tile, m: int) -> float:
        return bowl(gemm, tile, m) if (gemm, tile) not in halves(today) else 1.0

    lane = SyntheticLane(cost)
    row = by_m(run(job, lane))[512]
    lane.stop()
    assert row.status is RowStatus.KEPT
    assert row.chosen == today
    assert row.today_us == 2.0


def test_a_gain_below_what_matters_changes_nothing(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,), trials=10)
    today = job.today(512).pair
    assert today is not None

    def cost(gemm: Gemm, tile: Tile, _m: int) -> float:
        return 100.0 if (gemm, tile) in halves(today) else 99.5

    lane = SyntheticLane(cost)
    row = by_m(run(job, lane))[512]
    lane.stop()
    assert row.status is RowStatus.KEPT
    assert row.chosen == today


def test_a_lucky_search_does_not_win(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    # Alone each new tile looks twice as fast; in the chain it is slower than today's.
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    today = job.today(512).pair
    assert today is not None

    class Lucky(SyntheticLane):
        def _race(self, request: RaceRequest) -> Any:
            lanes = super()._race(request)
            assert not isinstance(lanes, Failure)
            slow = {one.pair: 1.0 if one.pair == today else 3.0 for one in lanes}
            return [RaceLane(one.pair, tuple(slow[one.pair] * us for us in one.samples_us)) for one in lanes]

    lane = Lucky()
    row = by_m(run(job, lane))[512]
    lane.stop()
    assert row.status is RowStatus.KEPT
    assert row.chosen == today


def test_a_time_below_the_cards_floor_is_called_impossible(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(64, 4096), trials=10)

    def cost(gemm: Gemm, tile: Tile, m: int) -> float:
        # At 64 half of what the card's bandwidth allows, at 4096 twice as much time as needed.
        return job.floor(m)[0] * (0.25 if m == 64 else 1.0) * bowl(gemm, tile, m) / bowl(gemm, Tile(16, 64, 128, 1), m)

    lane = SyntheticLane(cost)
    rows = by_m(run(job, lane))
    lane.stop()
    assert rows[64].roofline_share is not None
    assert (rows[64].roofline_share > 1) == ("impossible" in rows[64].note)
    assert rows[64].roofline_share > 1
    assert "impossible" not in rows[4096].note


# What is wrong is never written


def test_a_wrong_winner_is_counted_and_the_next_is_taken(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    first: list[TilePair] = []

    def error(request: VerifyRequest) -> ErrorMeasure:
        first.append(request.pair)
        return WRONG if request.pair == first[0] else RIGHT

    lane = SyntheticLane(error=error)
    result = run(job, lane)
    lane.stop()
    row = by_m(result)[512]
    assert row.status is RowStatus.TUNED
    assert row.chosen != first[0]
    assert row.chosen in first
    assert row.error == RIGHT.relative
    assert result.failures["wrong_result"] == 1
    assert pair_us(bowl, first[0], 512) <= pair_us(bowl, row.chosen, 512)


@pytest.mark.parametrize(
    "error",
    [WRONG, ErrorMeasure(math.inf, math.inf, 1), ErrorMeasure(0.004, 0.9, 0), ErrorMeasure(0.2, 0.004, 0)],
    ids=["wrong", "nan", "one-row", "everywhere"],
)
def test_where_every_result_is_wrong_every_row_is_kept(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, error: ErrorMeasure
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane(error=lambda _request: error)
    result = run(job, lane)
    lane.stop()
    check_written(job, result)
    for row in result.rows:
        assert row.status is RowStatus.KEPT
        assert row.chosen == job.today(row.m).pair
        assert row.error is None
    assert result.failures["wrong_result"] == len(lane.checks) >= 2


@pytest.mark.parametrize("kind", [FailureKind.ILLEGAL_ACCESS, FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY])
def test_a_check_that_fails_keeps_every_row(sglang_0_5_23: Path, tmp_path: Path, run: Run, kind: FailureKind) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane(fault=lambda request: Failure(kind) if isinstance(request, VerifyRequest) else None)
    result = run(job, lane)
    lane.stop()
    assert {row.status for row in result.rows} == {RowStatus.KEPT}
    assert result.failures[kind.value] >= 2
