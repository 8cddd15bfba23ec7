"""Sharing work between lanes, splitting a budget, and writing the fewest keys."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import StubPool, SyntheticLane, bowl, make_job, open_journal, pair_us

from sm120tune.budget import Budget
from sm120tune.measure.lane import Timer
from sm120tune.observer import Silent
from sm120tune.provenance import RowStatus
from sm120tune.runner import Runner
from sm120tune.search.ladder import nearest
from sm120tune.spread import contiguous, spread


def test_contiguous_parts_are_whole_and_in_order() -> None:
    items = list(range(20))
    for parts in (1, 2, 3, 7, 30):
        shares = contiguous(items, [1.0 + item for item in items], parts)
        assert len(shares) == parts
        assert [item for share in shares for item in share] == items


def test_contiguous_parts_cost_about_the_same() -> None:
    costs = [1.0] * 10 + [10.0] * 10
    shares = contiguous(list(range(20)), costs, 2)
    totals = [sum(costs[item] for item in share) for share in shares]
    assert abs(totals[0] - totals[1]) <= 10.0


def test_every_item_is_worked_on_once_and_an_idle_lane_helps() -> None:
    lanes: list[Timer] = [SyntheticLane(name="quick"), SyntheticLane(name="slow")]
    seen: list[tuple[int, str]] = []

    async def work(item: int, lane: Timer) -> None:
        seen.append((item, lane.name))
        await asyncio.sleep(0.2 if lane.name == "slow" else 0)

    asyncio.run(spread(list(range(12)), lanes, work, cost=lambda _item: 1.0, active=2))
    for lane in lanes:
        lane.stop()
    assert sorted(item for item, _ in seen) == list(range(12))
    assert sum(name == "quick" for _, name in seen) > 6


def test_an_error_ends_the_spread() -> None:
    lane = SyntheticLane()

    async def work(item: int, _lane: Timer) -> None:
        if item == 1:
            raise ValueError("one")
        await asyncio.sleep(0.01)

    with pytest.raises(ExceptionGroup):
        asyncio.run(spread(list(range(50)), [lane], work, cost=lambda _item: 1.0))
    lane.stop()


def test_no_budget_never_ends(sglang_0_5_23: Path, tmp_path: Path) -> None:
    budget = Budget.of(make_job(sglang_0_5_23, tmp_path), 1, 0.0)
    assert not budget.limited
    assert not budget.is_over
    assert not budget.search_is_over


@pytest.mark.parametrize("seconds", [10.0, 60.0, 600.0])
def test_a_budget_leaves_time_for_what_follows_the_search(sglang_0_5_23: Path, tmp_path: Path, seconds: float) -> None:
    began = time.monotonic()
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=(1, 64, 4096), budget_s=seconds)
    budget = Budget.of(job, 1, began)
    assert budget.search_until is not None
    assert budget.end is not None
    assert began + 0.4 * seconds <= budget.search_until < budget.end <= began + seconds


def test_a_budget_that_is_used_up_is_over(sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path, budget_s=10.0)
    assert Budget.of(job, 1, time.monotonic() - 11).is_over


def test_under_a_budget_every_m_is_looked_at_before_any_is_searched_deeply(sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=(1, 16, 64, 512, 4096), trials=40, budget_s=3600.0)
    lane = SyntheticLane(bowl)
    journal = open_journal(tmp_path / "runs", job.identity())
    asyncio.run(Runner(job, StubPool(), [lane], journal, Silent()).run())
    lane.stop()
    first_seen = {m: next(i for i, request in enumerate(lane.gemms) if request.m == m) for m in job.batch_sizes}
    last_first = max(first_seen.values())
    for m in job.batch_sizes:
        assert sum(request.m == m for request in lane.gemms[:last_first]) < 20


def test_the_fewest_keys_serve_every_m_within_two_percent(sglang_0_5_23: Path, tmp_path: Path) -> None:
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
    job = make_job(sglang_0_5_23, tmp_path, batch_sizes=sizes)
    job = replace(job, settings=replace(job.settings, fewest_keys=True))
    lane = SyntheticLane(bowl)
    journal = open_journal(tmp_path / "runs", job.identity())
    runner = Runner(job, StubPool(), [lane], journal, Silent())
    result = asyncio.run(runner.run())
    lane.stop()
    rows = {row.m: row for row in result.rows}
    tuned = {m for m in rows if m in sizes}
    assert 2 <= len(tuned) < len(sizes)
    assert all(rows[m].status is RowStatus.TUNED for m in tuned)
    # Keys that were not asked for stay: a shorter file would serve them with its last row.
    assert {2048, 16384} <= set(rows)
    for m in sizes:
        own = pair_us(bowl, runner.steps[m].board.best_pairs(1)[0], m)
        assert pair_us(bowl, rows[nearest(tuple(rows), m)].chosen, m) <= 1.021 * own
