"""Drive a job: compile processes, one lane per GPU and a search per M, with limits, restarts and a journal.

Phases: search (in passes), settle (race, check, decision), between the keys. An M is settled as soon as its search is
over, except under a budget; compiling overlaps all of it and the start of the lanes. Nothing here knows how times come
about or how candidates are chosen.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from sm120tune.between import Between
from sm120tune.budget import Budget
from sm120tune.compiler.pool import VariantPool
from sm120tune.hunt import Hunt
from sm120tune.job import Job
from sm120tune.measure.lane import Timer, started
from sm120tune.observer import Observer
from sm120tune.provenance import RowProvenance
from sm120tune.search.journal import Journal
from sm120tune.search.step import SearchStep
from sm120tune.settle import Settler
from sm120tune.spread import spread
from sm120tune.tiles import TilePair

_T = TypeVar("_T")


@dataclass
class RunResult:
    """What a run ends with."""

    rows: tuple[RowProvenance, ...]
    failures: Counter[str]
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase; race, verify and decide are parts of settling, summed over M, waits for the GPU included."""
    compiled: int = 0
    """Variants compiled, those found in the cache not counted."""
    resumed: int = 0
    """Pairs taken from the journal."""
    timed: int = 0
    """Requests that were answered by a lane."""
    busy_s: float = 0.0
    """GPU seconds of the search phase, by CUDA events, over all GPUs."""
    missing: tuple[int, ...] = ()
    """M without any pair that runs."""
    finalists: dict[int, tuple[TilePair, ...]] = field(default_factory=dict)
    """The pairs that were raced at each M, best first, without today's."""


class Runner:
    """One run of a job over its lanes."""

    def __init__(
        self,
        job: Job,
        pool: VariantPool,
        lanes: Sequence[Timer],
        journal: Journal,
        observer: Observer,
        began: float | None = None,
    ) -> None:
        """Prepare a run; a budget counts from ``began`` (``time.monotonic``), by default from now."""
        self._job = job
        self._pool = pool
        self._lanes = lanes
        self._observer = observer
        self._budget = Budget.of(job, len(lanes), time.monotonic() if began is None else began)
        self._hunt = Hunt(job, pool, journal, observer, self._budget)
        self._seconds: dict[str, float] = {}

    @property
    def steps(self) -> dict[int, SearchStep]:
        """The search of each M, for whoever wants to look afterwards."""
        return self._hunt.steps

    async def run(self) -> RunResult:
        """Run every phase; raises UserError where the environment fails, never because of a candidate."""
        async with asyncio.TaskGroup() as group:
            # The compilers work while the lanes still start; requests to a lane wait in its queue.
            for lane in self._lanes:
                group.create_task(self._start(lane))
            phases = group.create_task(self._phases())
        return phases.result()

    async def _start(self, lane: Timer) -> None:
        if said := await started(lane, lane.prepare()):
            self._observer.event(f"{lane.name}: {said}")

    async def _phases(self) -> RunResult:
        settler = Settler(self._job, self._pool, self.steps)
        async with self._phase("search", len(self._job.batch_sizes) * self._job.settings.trials):
            await self._hunt.run(self._lanes, settler.settle)
        busy_s = sum([await asyncio.wrap_future(lane.busy_s()) for lane in self._lanes])
        left = [m for m in self._hunt.by_gain() if m not in settler.settled]
        async with self._phase("settle", len(left)):
            await self._each(left, settler.settle, lambda m: m)
        rows = settler.rows()
        between = Between(self._job, self._pool, rows)
        gaps = between.gaps() if self._job.timer == "cuda" else []
        async with self._phase("between", len(gaps)):
            await self._each(gaps, between.check, lambda gap: gap.last_below)
            if self._job.settings.fewest_keys and not self._budget.is_over:
                await self._each(self._job.batch_sizes, between.cross, lambda m: m)
                rows = between.fewest()
        rows = tuple(sorted((*rows, *between.added.values()), key=lambda row: row.m))
        for row in rows:
            if row.m in self.steps or row.m in between.added:
                self._observer.row(row)
        return RunResult(
            rows=rows,
            failures=settler.failures(),
            seconds={**self._seconds, **settler.seconds},
            compiled=self._pool.compiled,
            resumed=self._hunt.resumed,
            timed=self._hunt.timed,
            busy_s=busy_s,
            missing=settler.missing,
            finalists=settler.finalists,
        )

    async def _each(
        self, items: Sequence[_T], work: Callable[[_T, Timer], Awaitable[None]], size: Callable[[_T], int]
    ) -> None:
        """Work on every item that the budget still allows; ``size`` gives an item's M."""

        async def within_budget(item: _T, lane: Timer) -> None:
            if not self._budget.is_over:
                await work(item, lane)
            self._observer.advance()

        await spread(items, self._lanes, within_budget, cost=lambda item: 100.0 + self._job.floor(size(item))[0])

    @asynccontextmanager
    async def _phase(self, name: str, total: int) -> AsyncIterator[None]:
        self._observer.phase(name, total)
        begin = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - begin
