from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runner_bench import Bench, BrokenLane, Recorder, timed_halves
from synthetic import StubPool, make_job, open_journal

from sm120tune.errors import UserError
from sm120tune.problem import DEFAULT_BATCH_SIZES
from sm120tune.provenance import RowStatus
from sm120tune.runner import Runner
from sm120tune.search.board import halves
from sm120tune.search_space import params_to_pair

# Resuming


def test_a_second_run_of_the_same_job_times_almost_nothing(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(16, 64, 512), trials=30)
    first, second, fresh = bench.lane(), bench.lane(), bench.lane()
    before = bench.run(job, first)
    after = bench.run(job, second)
    assert after.resumed >= 90
    assert len(second.gemms) < 0.1 * len(first.gemms)
    assert not set(timed_halves(first)) & set(timed_halves(second))
    assert [row.m for row in after.rows] == [row.m for row in before.rows]
    again = bench.run(job, fresh, fresh=True)
    assert again.resumed == 0
    assert len(fresh.gemms) > 0.5 * len(first.gemms)


def test_more_trials_go_on_from_there(bench: Bench, sglang_0_5_23: Path) -> None:
    lanes = [bench.lane(), bench.lane()]
    for lane, trials in zip(lanes, (15, 40), strict=True):
        bench.run(make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=trials), lane)
    assert len(lanes[1].gemms) > 10
    assert not set(timed_halves(lanes[0])) & set(timed_halves(lanes[1]))


def test_another_m_adds_to_the_same_run(bench: Bench, sglang_0_5_23: Path) -> None:
    lanes = [bench.lane(), bench.lane()]
    bench.run(make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,)), lanes[0])
    result = bench.run(make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64, 128)), lanes[1])
    assert result.resumed >= 30
    again = Counter(request.m for request in lanes[1].gemms)
    # What the new M found is tried at the old one, but nothing is done twice.
    assert again[128] > 2 * again[64]
    assert not set(timed_halves(lanes[0])) & set(timed_halves(lanes[1]))


def test_a_run_that_broke_off_goes_on_with_what_was_finished(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64, 512), trials=40)
    broken = BrokenLane(60, UserError("gone"))
    bench.lanes.append(broken)
    with pytest.raises((UserError, ExceptionGroup)) as caught:
        bench.run(job, broken)
    assert "UserError: gone" in "".join(traceback.format_exception(caught.value))
    journal = open_journal(bench.folder / "runs", job.identity())
    kept = sum(len(journal.trials(m)) for m in job.batch_sizes)
    assert kept > 10
    known = {
        (m, gemm, tile)
        for m in job.batch_sizes
        for trial in journal.trials(m)
        for gemm, tile in halves(params_to_pair(trial.params))
    }
    second = bench.lane()
    result = bench.run(job, second)
    assert result.resumed == kept
    assert not known & set(timed_halves(second))
    assert {row.status for row in result.rows if row.m in job.batch_sizes} == {RowStatus.TUNED}


# Budget


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("budget_s", [0.01, 3.0])
def test_a_budget_ends_the_run_and_the_ladder_is_whole(
    bench: Bench, sglang_0_5_23: Path, exhaustive: bool, budget_s: float
) -> None:
    options: dict[str, Any] = {"batch_sizes": (16, 512), "trials": 100_000, "exhaustive": exhaustive}
    job = make_job(sglang_0_5_23, bench.folder / "out", budget_s=budget_s, **options)
    lane = bench.lane(before=lambda _request: time.sleep(0.01))
    begin = time.monotonic()
    result = bench.run(job, lane)
    assert time.monotonic() - begin < 30
    # The whole space would be thousands.
    assert len(lane.gemms) < 1000
    rows = {row.m: row for row in result.rows}
    assert set(DEFAULT_BATCH_SIZES) <= set(rows)
    for row in rows.values():
        assert row.chosen == job.today(row.m).pair or row.status is RowStatus.TUNED
        assert row.today_us is None or row.m in job.batch_sizes
    # What was found is there for the next time.
    kept = open_journal(bench.folder / "runs", job.identity())
    assert result.timed == 0 or sum(len(kept.trials(m)) for m in job.batch_sizes) > 0


def test_a_budget_counts_from_the_start_of_the_command(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", trials=100_000, budget_s=60.0)
    journal = open_journal(bench.folder / "runs", job.identity())
    lane = bench.lane(before=lambda _request: time.sleep(0.01))
    runner = Runner(job, StubPool(), [lane], journal, Recorder(), began=time.monotonic() - 100)
    result = asyncio.run(asyncio.wait_for(runner.run(), 60))
    assert len(lane.gemms) < 100
    assert set(DEFAULT_BATCH_SIZES) <= {row.m for row in result.rows}
