from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from settling import CRASH, Run, by_m, check_written
from synthetic import RIGHT, StubPool, SyntheticLane, bowl, make_job, pair_us

from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.failures import INCONCLUSIVE, Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.lane import TimerName
from sm120tune.measure.results import GemmRequest, RaceRequest, VerifyRequest
from sm120tune.provenance import RowStatus
from sm120tune.search.board import halves
from sm120tune.tiles import TilePair

# Failures in the race


def test_one_finalist_that_fails_takes_no_other_along(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    bad: list[TilePair] = []

    def fault(request: Any) -> Failure | None:
        if not isinstance(request, RaceRequest):
            return None
        if not bad:
            # The best of the finalists.
            bad.append(min(request.pairs, key=lambda pair: pair_us(bowl, pair, request.m)))
        return CRASH if bad[0] in request.pairs else None

    lane = SyntheticLane(fault=fault)
    result = run(job, lane)
    lane.stop()
    row = by_m(result)[512]
    assert row.status is RowStatus.TUNED
    assert row.chosen != bad[0]
    assert row.ratio is not None
    assert row.ratio < 1
    assert result.failures["illegal_access"] == 1


def test_a_decision_that_fails_keeps_todays_pair(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    checked: list[TilePair] = []

    def fault(request: Any) -> Failure | None:
        if isinstance(request, VerifyRequest):
            checked.append(request.pair)
        return CRASH if isinstance(request, RaceRequest) and checked else None

    lane = SyntheticLane(fault=fault)
    result = run(job, lane)
    lane.stop()
    row = by_m(result)[512]
    assert checked
    assert row.status is RowStatus.KEPT
    assert row.chosen == job.today(512).pair
    assert result.failures["illegal_access"] == 1


def test_where_no_race_can_be_run_every_row_is_kept(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane(fault=lambda request: CRASH if isinstance(request, RaceRequest) else None)
    result = run(job, lane)
    lane.stop()
    check_written(job, result)
    assert {row.status for row in result.rows} == {RowStatus.KEPT}
    assert result.failures["illegal_access"] >= 2


# Today's pair cannot run


def _compile_fault(job: Job, how: Failure | TileFacts) -> StubPool:
    today = {job.today(m).pair for m in job.batch_sizes}
    tiles = {half for pair in today if pair for half in halves(pair)}

    def fault(spec: CompileSpec) -> Failure | TileFacts | None:
        variant = spec.variant
        return how if (getattr(variant, "gemm", None), getattr(variant, "tile", None)) in tiles else None

    return StubPool(fault)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Failure(FailureKind.COMPILE_CRASH, "pass failed"), "compile_crash: pass failed"),
        (TileFacts(147456, 128, 0, 8), "147,456 of 101,376 B"),
        (TileFacts(1024, 255, 0, 16), "registers"),
    ],
    ids=["compile_crash", "shared_memory", "registers"],
)
def test_a_pair_of_today_that_does_not_fit_is_replaced_and_the_row_says_why(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, how: Failure | TileFacts, said: str
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane()
    result = run(job, lane, _compile_fault(job, how))
    lane.stop()
    check_written(job, result)
    for m in job.batch_sizes:
        row = by_m(result)[m]
        assert row.status is RowStatus.TUNED
        assert "today's pair cannot run" in row.note
        assert said in row.note
        assert row.today_us is None
        assert row.ratio is None
        assert row.chosen_us == pytest.approx(pair_us(bowl, row.chosen, m))
        assert row.error == RIGHT.relative
        # Still right, and still the best of what runs.
        assert row.chosen in [request.pair for request in lane.checks]


@pytest.mark.parametrize("kind", sorted(INCONCLUSIVE))
@pytest.mark.parametrize("timer", ["cuda", "model"])
def test_a_pair_of_today_that_nothing_is_known_of_is_kept(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, kind: FailureKind, timer: TimerName
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512), timer=timer)
    lane = SyntheticLane(timer=timer)
    result = run(job, lane, _compile_fault(job, Failure(kind, "exit code -9")))
    lane.stop()
    check_written(job, result)
    for m in job.batch_sizes:
        row = by_m(result)[m]
        assert (row.status, row.chosen) == (RowStatus.KEPT, job.today(m).pair)
        assert row.note == f"not compared: nothing is known of today's pair ({kind.value}: exit code -9)"
    assert not result.missing


def test_a_race_that_lacks_todays_pair_decides_nothing(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))

    def lacks(request: GemmRequest | RaceRequest | VerifyRequest) -> Failure | None:
        today = isinstance(request, RaceRequest) and job.today(request.m).pair in request.pairs
        return Failure(FailureKind.NOT_RECORDED, "not in the table") if today else None

    lane = SyntheticLane(fault=lacks)
    rows = by_m(run(job, lane))
    lane.stop()
    for m in job.batch_sizes:
        assert (rows[m].status, rows[m].chosen) == (RowStatus.KEPT, job.today(m).pair)
        assert "not_recorded" in rows[m].note


def test_a_pair_of_today_that_crashes_is_replaced_and_the_row_says_why(
    sglang_0_5_23: Path, tmp_path: Path, run: Run
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))

    def fault(request: Any) -> Failure | None:
        return CRASH if isinstance(request, RaceRequest) and job.today(request.m).pair in request.pairs else None

    lane = SyntheticLane(fault=fault)
    result = run(job, lane)
    lane.stop()
    for m in job.batch_sizes:
        row = by_m(result)[m]
        assert row.status is RowStatus.TUNED
        assert "today's pair cannot run: illegal_access" in row.note
        assert row.today_us is None
        assert row.chosen != job.today(m).pair


def test_where_neither_today_nor_anything_else_runs_the_row_says_so(
    sglang_0_5_23: Path, tmp_path: Path, run: Run
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16,), trials=10)
    lane = SyntheticLane()
    result = run(job, lane, StubPool(lambda _spec: Failure(FailureKind.COMPILE_CRASH, "pass failed")))
    lane.stop()
    row = by_m(result)[16]
    assert row.status is RowStatus.KEPT
    assert row.today_us is row.chosen_us is row.ratio is None
    assert "today's pair cannot run: compile_crash" in row.note
    assert (lane.gemms, lane.races, lane.checks) == ([], [], [])
