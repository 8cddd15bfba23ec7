"""A finished ladder between its keys: SGLang serves the M there with a neighbour's row.

Where that row is slower than today's pair beyond noise, a key is added; where fewer keys serve every M as well, the
others can be left out (``--keys auto``).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from sm120tune.accuracy import ErrorMeasure, is_correct
from sm120tune.compiler.pool import VariantPool
from sm120tune.failures import Failure
from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.measure.results import RaceRequest, VerifyRequest
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.rows import Decision, Samples, make_row, why_not_runnable
from sm120tune.search.ladder import Gap, fewest_keys, gaps
from sm120tune.search.race import compare
from sm120tune.tiles import TilePair

_ROUNDS = 15
_CROSS_ROUNDS = 9
_WINDOW = 4
"""How many keys away a row is tried in place of another's."""


class Between:
    """Checks one ladder's gaps, and how far its rows reach."""

    def __init__(self, job: Job, pool: VariantPool, rows: Sequence[RowProvenance]) -> None:
        self._job = job
        self._pool = pool
        self._rows = {row.m: row for row in rows}
        self._ladder = {row.m: row.chosen for row in rows} | self._surviving()
        """What the written pair will hold."""
        self.added: dict[int, RowProvenance] = {}
        self._ratio: dict[tuple[int, int], float] = {}

    def _surviving(self) -> dict[int, TilePair]:
        """Return the rows of an earlier run that stay: an untimed row gives way to them."""
        timed = {m for m, row in self._rows.items() if row.repetitions}
        return {m: pair for m, pair in self._job.existing.items() if m not in timed}

    def gaps(self) -> list[Gap]:
        """Return the gaps where other rows than today's serve, as far as the workload's memory reaches.

        Kept rows can be such: a key between two of today's hands M to today's row of another key. Gaps between two
        rows of an earlier run were checked then.
        """
        largest = self._job.largest_m
        surviving = self._surviving()
        return [
            gap
            for gap in gaps(tuple(self._ladder))
            if gap.first_above <= largest and not {gap.below, gap.above} <= surviving.keys() and self._changes(gap)
        ]

    def _changes(self, gap: Gap) -> bool:
        meeting = ((gap.last_below, gap.below), (gap.first_above, gap.above))
        return any(self._ladder[key] != self._job.today(m).pair for m, key in meeting)

    async def check(self, gap: Gap, lane: Timer) -> None:
        """Time both neighbours' rows where they meet, beside today's pair there, and add a key if one loses."""
        m = gap.last_below
        below, above = self._ladder[gap.below], self._ladder[gap.above]
        today = self._job.today(m).pair
        if today is None or await why_not_runnable(self._job, self._pool, m, today) is not None:
            return
        samples = await self._race(m, lane, (today, below, above), _ROUNDS)
        if samples is None:
            return
        for key, served_by in ((m, below), (gap.first_above, above)):
            if served_by != today and compare(samples[served_by], samples[today]).slower:
                await self._add(key, gap, today, samples, lane)
                return

    async def cross(self, m: int, lane: Timer) -> None:
        """Time at M the rows of the keys around it, beside its own."""
        if m not in self._rows:
            return
        ladder = {**self._ladder, **{key: row.chosen for key, row in self.added.items()}}
        keys = sorted(ladder)
        place = keys.index(m)
        around = {key: ladder[key] for key in keys[max(0, place - _WINDOW) : place + _WINDOW + 1]}
        own = ladder[m]
        samples = await self._race(m, lane, (own, *around.values()), _CROSS_ROUNDS)
        if samples is not None:
            own_us = statistics.median(samples[own])
            self._ratio |= {(m, key): statistics.median(samples[pair]) / own_us for key, pair in around.items()}

    def fewest(self) -> tuple[RowProvenance, ...]:
        """Return the rows of the fewest keys that keep every tuned M within tolerance, and of all other keys."""
        sizes = [m for m in self._job.batch_sizes if m in self._rows]
        others = set(self._ladder) - set(sizes)
        keep = {*fewest_keys(sizes, self._ratio, others | set(self.added)), *others}
        return tuple(row for m, row in sorted(self._rows.items()) if m in keep)

    async def _race(self, m: int, lane: Timer, pairs: Sequence[TilePair], rounds: int) -> Samples | None:
        distinct = tuple(dict.fromkeys(pairs))
        if len(distinct) < 2:
            return dict.fromkeys(distinct, (1.0,))
        for pair in distinct:
            if await why_not_runnable(self._job, self._pool, m, pair) is not None:
                return None
        lanes = await asyncio.wrap_future(lane.race(RaceRequest(m, distinct, rounds)))
        return None if isinstance(lanes, Failure) else {one.pair: one.samples_us for one in lanes}

    async def _add(self, key: int, gap: Gap, today: TilePair, samples: Samples, lane: Timer) -> None:
        best = min(samples, key=lambda pair: statistics.median(samples[pair]))
        ratio = compare(samples[best], samples[today])
        error: ErrorMeasure | Failure | None = None
        if best != today and ratio.faster:
            error = await asyncio.wrap_future(lane.verify(VerifyRequest(key, best, self._job.settings.seed + key)))
        right = isinstance(error, ErrorMeasure) and is_correct(error, self._job.problem.dtype)
        self.added[key] = make_row(
            self._job,
            key,
            Decision(
                today=today,
                chosen=best if right else today,
                status=RowStatus.TUNED if right else RowStatus.KEPT,
                samples=samples,
                ratio=ratio if right else None,
                error=error.relative if isinstance(error, ErrorMeasure) and right else None,
                note=f"key added: a row of {gap.below} or {gap.above} was slower than today's pair here",
            ),
        )
