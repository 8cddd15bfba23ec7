"""Drive a job: compile processes, one lane per GPU and a search per M, with limits, restarts and a journal.

Phases follow each other over all M: search, polish (neighbours' winners), race, verify, decide. Compiling overlaps
the search. Nothing here knows how times come about or how candidates are chosen.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sm120tune.compiler import TileFacts
from sm120tune.compiler.pool import VariantPool
from sm120tune.compiler.spec import over_limit
from sm120tune.failures import Failure
from sm120tune.job import Job
from sm120tune.measure.lane import GemmTime, Timer, read_timing
from sm120tune.measure.results import GemmRequest
from sm120tune.observer import Observer, Standing
from sm120tune.provenance import RowProvenance
from sm120tune.search.board import Half, halves
from sm120tune.search.journal import Journal
from sm120tune.search.step import SearchStep, StepSettings
from sm120tune.seeds import Seeds
from sm120tune.settle import Settler
from sm120tune.tiles import TilePair

_DEPTH = 8
"""Pairs under way at one M, so that compilers and GPU both have work."""
_ACTIVE = 3
"""Values of M that one lane searches at a time: while one waits for compilers another is timed."""
_STOP_FACTOR = 1.5
"""A tile slower than this times the best is timed once."""
_NEIGHBOUR_SEEDS = 6
_POLISH_SEEDS = 3
_PASSES = (0.4, 0.8, 1.0)
"""Shares of the trials after which neighbours' winners are exchanged."""
_SEARCH_SHARE = 0.75
"""Of a budget; the rest is for races and checks."""


@dataclass
class RunResult:
    """What a run ends with."""

    rows: tuple[RowProvenance, ...]
    failures: Counter[str]
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase."""
    compiled: int = 0
    """Variants compiled, those found in the cache not counted."""
    resumed: int = 0
    """Pairs taken from the journal."""
    timed: int = 0
    """Requests that were answered by a lane."""


class Runner:
    """One run of a job over its lanes."""

    def __init__(
        self, job: Job, pool: VariantPool, lanes: Sequence[Timer], journal: Journal, observer: Observer
    ) -> None:
        self._job = job
        self._pool = pool
        self._lanes = lanes
        self._journal = journal
        self._observer = observer
        self._seeds = Seeds(job)
        self.steps: dict[int, SearchStep] = {}
        """The search of each M, for whoever wants to look afterwards."""
        self._inflight: dict[tuple[int, Half], asyncio.Task[None]] = {}
        self._result = RunResult(rows=(), failures=Counter())
        self._deadline: float | None = None

    async def run(self) -> RunResult:
        """Run every phase; raises UserError where the environment fails, never because of a candidate."""
        begin = time.monotonic()
        budget = self._job.settings.budget_s
        self._deadline = None if budget is None else begin + _SEARCH_SHARE * budget
        trials = self._job.settings.trials
        async with self._phase("search", len(self._job.batch_sizes) * trials):
            await self._search_all(trials)
        settler = Settler(self._job, self._pool, self.steps, self._journal)
        async with self._phase("race", len(self.steps)):
            await self._over_lanes(tuple(self.steps), self._counted(settler.race), active=1)
        async with self._phase("verify", len(self.steps)):
            await self._over_lanes(tuple(self.steps), self._counted(settler.verify), active=1)
        async with self._phase("decide", len(self.steps)):
            await self._over_lanes(tuple(self.steps), self._counted(settler.decide), active=1)
        self._result.rows = settler.rows(self._observer.row)
        self._result.failures = settler.failures()
        self._result.compiled = self._pool.compiled
        return self._result

    async def _search_all(self, trials: int) -> None:
        """Search every M in passes, each seeded with what its neighbours found in the one before."""
        sizes = self._job.batch_sizes
        for number, share in enumerate(_PASSES):
            limit = max(1, round(share * trials))
            if number == 0:
                await self._over_lanes(sizes, partial(self._begin, limit=limit), active=_ACTIVE)
                continue
            if self._late():
                break
            for m, step in self.steps.items():
                step.allow(limit)
                step.add_seeds(self._neighbours(m, _POLISH_SEEDS))
            await self._over_lanes(sizes, self._continue, active=_ACTIVE)

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    @asynccontextmanager
    async def _phase(self, name: str, total: int) -> AsyncIterator[None]:
        self._observer.phase(name, total)
        begin = time.monotonic()
        yield
        self._result.seconds[name] = time.monotonic() - begin

    async def _over_lanes(self, sizes: Sequence[int], work: Any, *, active: int) -> None:
        """Run ``work(m, lane)`` for every M: each lane takes a contiguous share, and helps others when done.

        A contiguous share lets neighbours' winners seed each other early.
        """
        shares = [deque(share) for share in _contiguous(sizes, [self._cost(m) for m in sizes], len(self._lanes))]

        async def serve(index: int) -> None:
            while True:
                own = shares[index]
                fullest = max(shares, key=len)
                if own:
                    m = own.popleft()
                elif fullest:
                    m = fullest.pop()
                else:
                    return
                await work(m, self._lanes[index])

        async with asyncio.TaskGroup() as group:
            for index in range(len(self._lanes)):
                for _ in range(active):
                    group.create_task(serve(index))

    def _cost(self, m: int) -> float:
        return 5_000.0 + 20 * self._job.floor(m)[0]

    def _counted(self, work: Any) -> Any:
        async def counted(m: int, lane: Timer) -> None:
            await work(m, lane)
            self._observer.advance()

        return counted

    async def _begin(self, m: int, lane: Timer, *, limit: int) -> None:
        settings = self._job.settings
        step_settings = StepSettings(trials=limit, seed=settings.seed + m)
        step = SearchStep(self._job.space(m), step_settings, [])
        stored = self._journal.trials(m)
        step.resume(stored, lambda data: read_timing(self._job.timer, data))
        self._result.resumed += step.told
        self._observer.advance(min(step.told, settings.trials))
        step.add_seeds(self._neighbours(m, _NEIGHBOUR_SEEDS))
        step.add_seeds(self._seeds.at(m))
        self.steps[m] = step
        await self._continue(m, lane)

    async def _continue(self, m: int, lane: Timer) -> None:
        """Ask, time and tell until the step proposes nothing more."""
        step = self.steps[m]
        pending: set[asyncio.Task[None]] = set()
        while True:
            if self._late():
                step.give_up()
            while len(pending) < _DEPTH and (pair := step.ask()) is not None:
                pending.add(_start(self._trial(step, lane, pair)))
            if not pending:
                return
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _trial(self, step: SearchStep, lane: Timer, pair: TilePair) -> None:
        for half in step.board.missing(pair):
            key = (step.m, half)
            if key not in self._inflight:
                self._inflight[key] = _start(self._half(step, lane, half))
        waiting = [task for half in halves(pair) if (task := self._inflight.get((step.m, half))) is not None]
        await asyncio.gather(*waiting)
        trial = step.tell(pair)
        self._journal.add(step.m, trial)
        if step.told <= self._job.settings.trials:
            self._observer.advance()
        self._report(step, lane)

    async def _half(self, step: SearchStep, lane: Timer, half: Half) -> None:
        gemm, tile = half
        try:
            outcome = await self._compile(self._job.spec(self._job.variant(step.m, gemm, tile)))
            result: GemmTime | Failure
            if isinstance(outcome, Failure):
                result = outcome
            else:
                best = step.board.best_us(gemm)
                request = GemmRequest(step.m, gemm, tile, None if best is None else _STOP_FACTOR * best)
                self._result.timed += 1
                result = await asyncio.wrap_future(lane.time_gemm(request, outcome))
            step.board.put(half, result)
        finally:
            del self._inflight[step.m, half]

    async def _compile(self, spec: Any) -> TileFacts | Failure:
        future = self._pool.submit(spec)
        self._observer.compiling(self._pool.pending)
        outcome = await asyncio.wrap_future(future)
        if isinstance(outcome, Failure):
            return outcome
        return over_limit(outcome.shared_bytes, outcome.registers, outcome.num_warps, self._job.limits) or outcome

    def _neighbours(self, m: int, count: int) -> list[TilePair]:
        """Return the best pairs of the nearest M on either side that have any."""
        known = [other for other, step in self.steps.items() if other != m and len(step.board)]
        below = max((other for other in known if other < m), default=None)
        above = min((other for other in known if other > m), default=None)
        pairs: list[TilePair] = []
        for other in (below, above):
            if other is not None:
                pairs += self.steps[other].board.best_pairs(count)
        return pairs

    def _report(self, step: SearchStep, lane: Timer) -> None:
        best = step.board.best_pairs(1)
        today = self._job.today(step.m).pair
        best_us = step.board.score(best[0]) if best else None
        today_us = step.board.score(today) if today is not None else None
        self._observer.standing(
            Standing(
                lane=lane.name,
                m=step.m,
                told=step.told,
                trials=self._job.settings.trials,
                best_us=best_us if isinstance(best_us, float) else None,
                today_us=today_us if isinstance(today_us, float) else None,
            )
        )
        counts: Counter[str] = Counter()
        for other in self.steps.values():
            counts += other.board.failures()
        self._observer.failures(counts)


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task; when several fail, one is told, and asyncio shall not print the others."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


def _contiguous(sizes: Sequence[int], costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split the sizes into contiguous parts of about the same cost."""
    total = sum(costs)
    shares: list[list[int]] = [[] for _ in range(parts)]
    done = 0.0
    for m, cost in zip(sizes, costs, strict=True):
        shares[min(parts - 1, int(parts * (done + cost / 2) / total))].append(m)
        done += cost
    return shares
