"""From searched candidates to rows: the finalists' race, the check against the reference, the decision."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sm120tune.compiler.pool import VariantPool
from sm120tune.compiler.spec import over_limit
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.measure.results import RaceRequest, VerifyRequest, What, half_quartile_distance
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.reference import ErrorMeasure, is_correct
from sm120tune.search.journal import Journal
from sm120tune.search.race import ESTIMATE_LEAST_M, Ratio, compare, compare_estimates
from sm120tune.search.step import SearchStep
from sm120tune.tiles import TilePair
from sm120tune.upstream.lookup import Today

FINALISTS = 5
RACE_ROUNDS = 9
DECIDE_ROUNDS = 31
"""Of the winner against today's pair alone, on new samples: the race's own winner is a lucky one."""


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


class Settler:
    """Takes each M's best pairs to a decision, one phase at a time."""

    def __init__(self, job: Job, pool: VariantPool, steps: Mapping[int, SearchStep], journal: Journal) -> None:
        self._job = job
        self._pool = pool
        self._steps = steps
        self._journal = journal
        self._finals: dict[int, _Final] = {}

    async def race(self, m: int, lane: Timer) -> None:
        """Time the finalists' chains interleaved with today's pair, and order them."""
        final = self._finals[m] = _Final(self._job.today(m))
        final.runnable_today, final.today_problem = await self._runnable(m, final.today.pair, final.today.problem)
        finalists = [pair for pair in self._steps[m].board.best_pairs(FINALISTS) if pair != final.today.pair]
        runnable: list[TilePair] = []
        for pair in finalists:
            usable, problem = await self._runnable(m, pair, "")
            if usable is not None:
                runnable.append(usable)
            else:
                final.failures[problem.partition(":")[0]] += 1
        await self._time_lanes(m, lane, final, runnable, RACE_ROUNDS)
        final.order = sorted(
            (pair for pair in final.lanes if pair in runnable), key=lambda pair: self._rank(final, pair)
        )

    async def verify(self, m: int, lane: Timer) -> None:
        """Find the best finalist whose result is right; one that is wrong is never written."""
        final = self._finals[m]
        if self._job.timer == "model" and m < ESTIMATE_LEAST_M:
            final.note = f"an estimate changes no row below M={ESTIMATE_LEAST_M}"
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
        """Time the winner against today's pair alone, on new samples."""
        final = self._finals[m]
        if final.winner is None or final.runnable_today is None:
            return
        if self._job.timer != "cuda":
            winner_us, today_us = final.lanes[final.winner][0], final.lanes[final.runnable_today][0]
            final.ratio = compare_estimates(winner_us, today_us)
            return
        request = RaceRequest(m, (final.runnable_today, final.winner), DECIDE_ROUNDS)
        lanes = await asyncio.wrap_future(lane.race(request))
        if isinstance(lanes, Failure):
            final.failures[lanes.kind.value] += 1
            final.winner = None
            return
        for one in lanes:
            final.lanes[one.pair] = one.samples_us
        final.ratio = compare(final.lanes[final.winner], final.lanes[final.runnable_today])

    def rows(self, show: Callable[[RowProvenance], None]) -> tuple[RowProvenance, ...]:
        """Return every row of the ladder, those that were not tuned with today's pair."""
        rows = {m: self._row(m, final) for m, final in self._finals.items()}
        decided = {m: row for m, row in rows.items() if row is not None}
        kept = frozenset(m for m, row in decided.items() if row.status is RowStatus.KEPT)
        for m in self._job.ladder_keys(kept | (frozenset(self._job.batch_sizes) - set(decided))):
            if m not in decided and (row := self._untuned(m)) is not None:
                decided[m] = row
        ordered = tuple(decided[m] for m in sorted(decided))
        for row in ordered:
            if row.m in self._finals:
                show(row)
        return ordered

    def failures(self) -> Counter[str]:
        """Return every failed candidate by kind."""
        counts: Counter[str] = Counter()
        for step in self._steps.values():
            counts += step.board.failures()
        for final in self._finals.values():
            counts += final.failures
        return counts

    async def _runnable(self, m: int, pair: TilePair | None, problem: str) -> tuple[TilePair | None, str]:
        """Return the pair when every binary of its chain compiles and fits the card, else why not."""
        if pair is None:
            return None, problem
        for spec in self._job.chain_specs(m, pair):
            outcome = await asyncio.wrap_future(self._pool.submit(spec))
            if not isinstance(outcome, Failure):
                over = over_limit(outcome.shared_bytes, outcome.registers, outcome.num_warps, self._job.limits)
                if over is None:
                    continue
                outcome = over
            return None, f"{outcome.kind.value}: {outcome.message}"
        return pair, ""

    async def _time_lanes(self, m: int, lane: Timer, final: _Final, pairs: list[TilePair], rounds: int) -> None:
        failure = await self._lanes(m, lane, final, pairs, rounds)
        if failure is None:
            return
        if not pairs:
            final.runnable_today, final.today_problem = None, f"{failure.kind.value}: {failure.message}"
            return
        # Someone in this race cannot run: race today's pair alone, then each beside it, so that only that one is lost.
        await self._time_lanes(m, lane, final, [], rounds)
        for pair in pairs:
            failure = await self._lanes(m, lane, final, [pair], rounds)
            if failure is not None:
                final.failures[failure.kind.value] += 1

    async def _lanes(self, m: int, lane: Timer, final: _Final, pairs: list[TilePair], rounds: int) -> Failure | None:
        """Race pairs beside today's, where that runs, and keep the times; returns the race's failure."""
        today = [final.runnable_today] if final.runnable_today is not None else []
        if not pairs and not today:
            return None
        lanes = await asyncio.wrap_future(lane.race(RaceRequest(m, (*today, *pairs), rounds)))
        if isinstance(lanes, Failure):
            return lanes
        final.lanes.update({one.pair: one.samples_us for one in lanes})
        return None

    def _rank(self, final: _Final, pair: TilePair) -> float:
        """Return the pair's ratio to today's, or its time where today's pair cannot run."""
        samples = final.lanes[pair]
        if final.runnable_today is None:
            return statistics.median(samples)
        today = final.lanes[final.runnable_today]
        return statistics.median(samples) / statistics.median(today)

    def _row(self, m: int, final: _Final) -> RowProvenance | None:
        today = final.runnable_today
        replaced = final.winner is not None and (today is None or (final.ratio is not None and final.ratio.faster))
        chosen = final.winner if replaced else final.today.pair
        if chosen is None:
            return None
        note = final.note
        if today is None and final.today_problem:
            note = f"today's pair cannot run: {final.today_problem}"
        return self._make_row(m, final, chosen, RowStatus.TUNED if replaced else RowStatus.KEPT, note)

    def _untuned(self, m: int) -> RowProvenance | None:
        today = self._job.today(m)
        chosen = today.pair if today.pair is not None else self._job.lookup.builtin_pair(self._job.problem, m)
        note = "not tuned" if today.pair is not None else f"not tuned; today's pair cannot run: {today.problem}"
        return self._make_row(m, _Final(today), chosen, RowStatus.KEPT, note)

    def _make_row(self, m: int, final: _Final, chosen: TilePair, status: RowStatus, note: str) -> RowProvenance:
        today_samples = final.lanes.get(final.runnable_today, ()) if final.runnable_today else ()
        samples = final.lanes.get(chosen, ())
        floor_us, bound = self._job.floor(m)
        chosen_us = statistics.median(samples) if samples else None
        tuned = status is RowStatus.TUNED
        lane_ratio = final.ratio if final.ratio is not None and chosen == final.winner else None
        return RowProvenance(
            m=m,
            status=status,
            today=final.today.pair,
            chosen=chosen,
            today_us=statistics.median(today_samples) if today_samples else None,
            today_spread_us=half_quartile_distance(today_samples) if today_samples else None,
            chosen_us=chosen_us,
            chosen_spread_us=half_quartile_distance(samples) if samples else None,
            ratio=lane_ratio.middle if lane_ratio else (1.0 if samples and chosen == final.runnable_today else None),
            ratio_interval=(lane_ratio.low, lane_ratio.high) if lane_ratio else None,
            roofline_share=floor_us / chosen_us if chosen_us else None,
            bound=bound,
            timer=self._job.timer,
            measured=self._job.timer == "cuda" and bool(samples),
            what=What.CHAIN.value,
            repetitions=len(samples),
            routing=str(self._job.routing),
            error=final.error.relative if final.error is not None and tuned else None,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            note=note,
        )
