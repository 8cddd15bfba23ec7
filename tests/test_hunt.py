"""What one M takes over from its neighbours between passes, and what a later run remembers of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from synthetic import StubPool, SyntheticLane, bowl, make_job, open_journal

from sm120tune.budget import Budget
from sm120tune.compiler import CompileSpec
from sm120tune.failures import Failure, FailureKind
from sm120tune.hunt import EXCHANGE_NEIGHBOURS, EXCHANGE_PAIRS, Hunt
from sm120tune.job import Job
from sm120tune.measure.results import Measured, What
from sm120tune.observer import Silent
from sm120tune.problem import Gemm
from sm120tune.search.board import Half, halves
from sm120tune.search.journal import Journal
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import Variant

cost = partial(bowl, Gemm.DOWN)

SIZES = (64, 96, 128, 256, 512, 2048)
TRIALS = 8


class Compiled(StubPool):
    """A pool that says of some variants that they are compiled."""

    def __init__(self, knows: Callable[[CompileSpec], bool]) -> None:
        super().__init__()
        self._knows = knows

    def knows(self, spec: CompileSpec) -> bool:
        return self._knows(spec)


@pytest.fixture
def lane() -> Iterator[SyntheticLane]:
    lane = SyntheticLane()
    yield lane
    lane.stop()


@pytest.fixture
def job(sglang_0_5_23: Path, tmp_path: Path) -> Job:
    return make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=SIZES, trials=TRIALS)


def journal_of(job: Job, tmp_path: Path) -> Journal:
    return open_journal(tmp_path / "runs", job.identity())


def begun(job: Job, pool: StubPool, journal: Journal, lane: SyntheticLane) -> Hunt:
    """Return a hunt whose every M had its first trials."""
    hunt = Hunt(job, pool, journal, Silent(), Budget.of(job, 1, time.monotonic()))

    async def begin() -> None:
        for m in SIZES:
            await hunt._begin(m, lane, limit=TRIALS)

    asyncio.run(begin())
    return hunt


def exchange(hunt: Hunt, lane: SyntheticLane, m: int) -> list[Half]:
    """Return what an exchange at one M has timed."""
    before = len(lane.gemms)
    asyncio.run(hunt._exchange(m, lane))
    new = lane.gemms[before:]
    assert all(request.m == m for request in new)
    return [(request.gemm, request.tile) for request in new]


def offered(hunt: Hunt, m: int) -> set[Half]:
    """Return what the nearest M found best and this one has not timed."""
    nearest = sorted((other for other in SIZES if other != m), key=lambda other: abs(math.log(other / m)))
    best = {
        half
        for other in nearest[:EXCHANGE_NEIGHBOURS]
        for pair in hunt.steps[other].board.best_pairs(EXCHANGE_PAIRS)
        for half in halves(pair)
    }
    return {half for half in best - hunt.steps[m].board.known() if hunt.steps[m].space.allows(half[1])}


def test_what_is_best_nearby_and_compiled_is_timed_without_a_trial(
    job: Job, lane: SyntheticLane, tmp_path: Path
) -> None:
    journal = journal_of(job, tmp_path)
    hunt = begun(job, Compiled(lambda _spec: True), journal, lane)
    count = 0
    for m in SIZES:
        wanted, trials, told = offered(hunt, m), len(journal.trials(m)), hunt.steps[m].told
        timed = exchange(hunt, lane, m)
        assert len(timed) == len(set(timed))
        assert set(timed) == wanted
        count += len(timed)
        assert set(timed) <= hunt.steps[m].board.known()
        assert len(journal.trials(m)) == trials
        assert hunt.steps[m].told == told
        # Nothing is left to exchange.
        assert exchange(hunt, lane, m) == []
    assert count > 5


def test_a_neighbours_find_can_be_the_best_here(job: Job, lane: SyntheticLane, tmp_path: Path) -> None:
    hunt = begun(job, Compiled(lambda _spec: True), journal_of(job, tmp_path), lane)
    here, there = hunt.steps[96].board, hunt.steps[128].board
    space = hunt.steps[96].space
    find = min((tile for tile in space.tiles() if (Gemm.DOWN, tile) not in here.known()), key=lambda t: cost(t, 96))
    assert cost(find, 96) < (here.best_us(Gemm.DOWN) or 0)
    there.put((Gemm.DOWN, find), Measured(0.1, 0.0, 5, What("down")))
    assert (Gemm.DOWN, find) in exchange(hunt, lane, 96)
    assert here.best_us(Gemm.DOWN) == cost(find, 96)
    assert here.best_pairs(1)[0].down == find


def test_what_is_not_compiled_is_not_timed(job: Job, lane: SyntheticLane, tmp_path: Path) -> None:
    journal = journal_of(job, tmp_path)
    nothing = begun(job, Compiled(lambda _spec: False), journal, lane)
    assert offered(nothing, 128)
    assert exchange(nothing, lane, 128) == []
    assert journal.note(128, "exchanged") is None


def test_of_a_pair_the_half_that_is_compiled_is_timed(job: Job, lane: SyntheticLane, tmp_path: Path) -> None:
    def gate_up_alone(spec: CompileSpec) -> bool:
        assert spec.problem == job.problem
        return spec.variant.gemm is Gemm.GATE_UP  # type: ignore[union-attr]

    hunt = begun(job, Compiled(gate_up_alone), journal_of(job, tmp_path), lane)
    wanted = {half for half in offered(hunt, 128) if half[0] is Gemm.GATE_UP}
    assert wanted
    assert set(exchange(hunt, lane, 128)) == wanted


def test_a_tile_that_this_m_does_not_allow_stays_away(job: Job, lane: SyntheticLane, tmp_path: Path) -> None:
    hunt = begun(job, Compiled(lambda _spec: True), journal_of(job, tmp_path), lane)
    # Of 64 tokens an expert has 8 rows, of 256 it has 32: blocks of 128 rows are tried from 16 on.
    large = [(gemm, Tile(128, 32, 32, 1)) for gemm in Gemm]
    for half in large:
        hunt.steps[128].board.put(half, Measured(0.1, 0.0, 5, What(half[0].value)))
    assert not set(large) & set(exchange(hunt, lane, 64))
    assert set(large) <= set(exchange(hunt, lane, 256))


def test_a_later_run_remembers_what_was_exchanged(job: Job, lane: SyntheticLane, tmp_path: Path) -> None:
    first = begun(job, Compiled(lambda _spec: True), journal_of(job, tmp_path), lane)
    timed = {m: exchange(first, lane, m) for m in (128, 512)}
    # A second exchange adds to the first.
    late = (Gemm.DOWN, Tile(16, 32, 256, 8, 8, 2))
    first.steps[512].board.put(late, Measured(0.1, 0.0, 5, What("down")))
    again = exchange(first, lane, 128)
    assert timed[128]
    assert late in again
    timed[128] += again
    second_lane = SyntheticLane()
    try:
        second = begun(job, Compiled(lambda _spec: True), journal_of(job, tmp_path), second_lane)
        assert second.resumed == TRIALS * len(SIZES)
        for m, found in timed.items():
            assert found
            for half in found:
                now = second.steps[m].board.get(half)
                assert isinstance(now, Measured)
                assert now == first.steps[m].board.get(half)
            assert second.steps[m].told == TRIALS
        assert exchange(second, second_lane, 512) == []
        assert second_lane.gemms == []
    finally:
        second_lane.stop()


def test_a_trial_whose_compiler_was_killed_is_tried_again_by_the_next_run(
    job: Job, lane: SyntheticLane, tmp_path: Path
) -> None:
    killed: list[CompileSpec] = []

    def fault(spec: CompileSpec) -> Failure | None:
        if isinstance(spec.variant, Variant) and len(killed) < 3:
            killed.append(spec)
            return Failure(FailureKind.COMPILE_KILLED, "the compiler process died (exit code -9)")
        return None

    journal = journal_of(job, tmp_path)
    hunt = begun(job, StubPool(fault), journal, lane)
    told = sum(step.told for step in hunt.steps.values())
    kept = [trial for m in SIZES for trial in journal.trials(m)]
    assert told - len(killed) <= len(kept) < told
    assert not any("compile_killed" in str(trial.user_attrs) for trial in kept)
    again = begun(job, pool := StubPool(), journal_of(job, tmp_path), lane)
    assert again.resumed == len(kept)
    assert set(killed) <= set(pool.submitted)


def test_an_exchanged_failure_is_remembered_too(job: Job, tmp_path: Path) -> None:
    failing = [False]

    def fault(_request: object) -> Failure | None:
        return Failure(FailureKind.LAUNCH_ERROR, "not this one") if failing[0] else None

    lane = SyntheticLane(fault=fault)
    try:
        first = begun(job, Compiled(lambda _spec: True), journal_of(job, tmp_path), lane)
        failing[0] = True
        timed = exchange(first, lane, 128)
        second = begun(job, Compiled(lambda _spec: True), journal_of(job, tmp_path), lane)
        assert timed
        for half in timed:
            assert second.steps[128].board.get(half) == Failure(FailureKind.LAUNCH_ERROR, "not this one")
    finally:
        lane.stop()
