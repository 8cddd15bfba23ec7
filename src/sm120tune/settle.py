"""From searched candidates to rows: the finalists' race, the check against the reference, the decision."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sm120tune.accuracy import ErrorMeasure, is_correct
from sm120tune.compiler.pool import VariantPool
from sm120tune.estimates import estimated_ratio, out_of_reach
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.measure.results import VerifyRequest
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.racing import race_against, race_beside
from sm120tune.rows import Decision, make_row, not_compared, why_not_runnable
from sm120tune.search.race import Ratio
from sm120tune.search.step import SearchStep
from sm120tune.tiles import TilePair
from sm120tune.tma import TMA_FINALISTS, tma_variants
from sm120tune.upstream.lookup import Today

FINALISTS = 5


@dataclass
class _Final:
    """What is known of one M on the way to its row."""

    today: Today
    runnable_today: TilePair | None = None
    today_problem: str = ""
    order: list[TilePair] = field(default_factory=list)
    """Finalists, best first."""
    lanes: dict[TilePair, tuple[float, ...]] = field(default_factory=dict)
    winner: TilePair | None = None
    error: ErrorMeasure | None = None
    ratio: Ratio | None = None
    failures: Counter[str] = field(default_factory=Counter)
    note: str = ""

    def leave(self, why: Failure) -> None:
        """Keep today's pair without a comparison: nothing was found out of it."""
        self.runnable_today = self.today.pair
        self.note = not_compared(why)


class Settler:
    """Takes each M's best pairs to a decision, one phase at a time."""

    def __init__(self, job: Job, pool: VariantPool, steps: Mapping[int, SearchStep]) -> None:
        self._job = job
        self._pool = pool
        self._steps = steps
        self._finals: dict[int, _Final] = {}
        self.seconds: dict[str, float] = {"race": 0.0, "verify": 0.0, "decide": 0.0}
        """Spent in each part, summed over lanes."""
        self.missing: tuple[int, ...] = ()
        """M without any pair that runs, known once the rows are made."""

    @property
    def settled(self) -> frozenset[int]:
        """M that are decided."""
        return frozenset(self._finals)

    @property
    def finalists(self) -> dict[int, tuple[TilePair, ...]]:
        """The pairs that were raced at each M, best first, without today's."""
        return {m: tuple(final.order) for m, final in self._finals.items()}

    async def settle(self, m: int, lane: Timer) -> None:
        """Race, check and decide one M."""
        for name, part in (("race", self.race), ("verify", self.verify), ("decide", self.decide)):
            begin = time.monotonic()
            await part(m, lane)
            self.seconds[name] += time.monotonic() - begin

    async def race(self, m: int, lane: Timer) -> None:
        """Time the finalists' chains interleaved with today's pair, and order them."""
        final = self._finals[m] = _Final(self._job.today(m))
        if final.today.pair is None:
            final.today_problem = final.today.problem
        else:
            problem = await why_not_runnable(self._job, self._pool, m, final.today.pair)
            if problem is not None and problem.inconclusive:
                final.leave(problem)
                return
            final.today_problem = str(problem or "")
            final.runnable_today = final.today.pair if problem is None else None
        finalists = [pair for pair in self._steps[m].board.best_pairs(FINALISTS) if pair != final.today.pair]
        for leader in finalists[:TMA_FINALISTS]:
            finalists += [pair for pair in tma_variants(self._job, m, leader) if pair != final.today.pair]
        runnable: list[TilePair] = []
        for pair in finalists:
            # What spilling costs on a card is the least certain part of an estimate.
            spills = self._job.timer != "model"
            problem = await why_not_runnable(self._job, self._pool, m, pair, spills=spills)
            if problem is None:
                runnable.append(pair)
            else:
                final.failures[problem.kind.value] += 1
        raced = await race_beside(lane, m, final.runnable_today, runnable)
        final.lanes.update(raced.samples)
        final.failures += raced.failures
        if raced.base_failure is not None:
            if raced.base_failure.inconclusive:
                final.leave(raced.base_failure)
                return
            final.runnable_today = None
            final.today_problem = str(raced.base_failure)
        final.order = sorted(
            (pair for pair in final.lanes if pair in runnable), key=lambda pair: self._rank(final, pair)
        )

    async def verify(self, m: int, lane: Timer) -> None:
        """Find the best finalist whose result is right; one that is wrong is never written."""
        final = self._finals[m]
        final.note = final.note or out_of_reach(self._job, m, today_runs=final.runnable_today is not None)
        if final.note:
            return
        for pair in final.order:
            if self._rank(final, pair) >= 1.0 and final.runnable_today is not None:
                return
            request = VerifyRequest(m, pair, seed=self._job.settings.seed + 7919 * m + 1)
            error = await asyncio.wrap_future(lane.verify(request))
            if isinstance(error, Failure):
                final.failures[error.kind.value] += 1
            elif error is not None and not is_correct(error, self._job.problem.dtype):
                final.failures[FailureKind.WRONG_RESULT.value] += 1
            else:
                final.winner, final.error = pair, error
                return

    async def decide(self, m: int, lane: Timer) -> None:
        """Time the winner against today's pair alone, on new samples: the race's own winner is a lucky one."""
        final = self._finals[m]
        if final.winner is None or final.runnable_today is None:
            return
        if self._job.timer == "model":
            winner_us, today_us = final.lanes[final.winner][0], final.lanes[final.runnable_today][0]
            final.ratio = estimated_ratio(self._job, m, winner_us, today_us)
            return
        found = await race_against(lane, m, final.runnable_today, final.winner)
        if isinstance(found, Failure):
            final.failures[found.kind.value] += 1
            final.winner = None
            return
        samples, final.ratio = found
        final.lanes.update(samples)

    def rows(self) -> tuple[RowProvenance, ...]:
        """Return every row of the ladder, those that were not tuned with today's pair."""
        made = {m: row for m, final in self._finals.items() if (row := self._row(m, final)) is not None}
        self.missing = tuple(m for m in self._finals if m not in made)
        kept = frozenset(m for m, row in made.items() if row.status is RowStatus.KEPT)
        for m in self._job.ladder_keys(kept | (frozenset(self._job.batch_sizes) - set(made))):
            if m not in made:
                made[m] = self._untuned(m)
        return tuple(made[m] for m in sorted(made))

    def failures(self) -> Counter[str]:
        """Return every failed candidate by kind."""
        counts: Counter[str] = Counter()
        for step in self._steps.values():
            counts += step.board.failures()
        for final in self._finals.values():
            counts += final.failures
        return counts

    def _rank(self, final: _Final, pair: TilePair) -> float:
        """Return the pair's ratio to today's, or its time where today's pair cannot run."""
        samples = final.lanes[pair]
        if final.runnable_today is None:
            return statistics.median(samples)
        today = final.lanes[final.runnable_today]
        return statistics.median(samples) / statistics.median(today)

    def _row(self, m: int, final: _Final) -> RowProvenance | None:
        """Return the row, or None where neither today's pair nor any other runs."""
        today = final.runnable_today
        note = final.note
        if today is None and final.today_problem:
            note = f"today's pair cannot run: {final.today_problem}"
        winner = final.winner
        if winner is not None and (today is None or (final.ratio is not None and final.ratio.faster)):
            error = final.error.relative if final.error is not None else None
            decision = Decision(
                final.today.pair, winner, RowStatus.TUNED, final.lanes, final.ratio, error=error, note=note
            )
            return make_row(self._job, m, decision)
        if today is None:
            return None
        return make_row(self._job, m, Decision(today, today, RowStatus.KEPT, final.lanes, note=note))

    def _untuned(self, m: int) -> RowProvenance:
        """Return the row of an M that was not tuned: what SGLang would run there anyway."""
        today = self._job.today(m)
        chosen = today.pair if today.pair is not None else self._job.lookup.builtin_pair(self._job.problem, m)
        final = self._finals.get(m)
        problem = final.today_problem if final is not None else today.problem
        note = f"not tuned; today's pair cannot run: {problem}" if problem else "not tuned"
        return make_row(self._job, m, Decision(today.pair, chosen, RowStatus.KEPT, note=note))
