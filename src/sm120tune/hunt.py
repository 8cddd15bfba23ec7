"""The search phase: one step per M, compilers and lanes kept busy, every finished trial in the journal."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from sm120tune.budget import Budget
from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.compiler.pool import VariantPool
from sm120tune.compiler.spec import within_limits
from sm120tune.failures import Failure, FailureKind, was_killed
from sm120tune.job import Job
from sm120tune.measure.lane import GemmTime, Timer, read_timing
from sm120tune.measure.results import GemmRequest
from sm120tune.observer import Observer, Standing
from sm120tune.problem import Gemm
from sm120tune.search.board import Half, halves, result_from_json, result_to_json
from sm120tune.search.journal import Journal
from sm120tune.search.step import SearchStep, StepSettings
from sm120tune.seeds import Seeds
from sm120tune.spread import spread
from sm120tune.tiles import Tile, TilePair
from sm120tune.tma import TMA_FINALISTS, tma_variants

_DEPTH = 8
"""Pairs under way at one M, so that compilers and GPU both have work."""
_ACTIVE = 4
"""Values of M that one lane searches at a time: while one waits for compilers another is timed."""
_STOP_FACTOR = 1.2
"""A tile slower than this times the best is not timed to the end: two replays tell enough."""
_SPILL_LIMIT = 512
"""Stack bytes a thread from which on a tile is not timed.

On seven recorded H200 tables none of 6,748 times of such tiles is below 2.7 times the best, and one launch can take as
long as a hundred good ones.
"""
NEIGHBOUR_SEEDS = 6
EXCHANGE_PAIRS = 8
EXCHANGE_NEIGHBOURS = 4
"""How many pairs of how many other M are timed at an M between passes; their binaries are there already."""
PASSES = (0.4, 0.8, 1.0)
"""Shares of the trials between which neighbours' winners are exchanged."""
_EXCHANGED = "exchanged"
"""The journal's name for what was timed without a trial."""
_GLANCE = 0.1
"""The share of a budget's first pass."""


class Hunt:
    """Searches every M of a job."""

    def __init__(self, job: Job, pool: VariantPool, journal: Journal, observer: Observer, budget: Budget) -> None:
        self._job = job
        self._pool = pool
        self._journal = journal
        self._observer = observer
        self._budget = budget
        self._seeds = Seeds(job)
        self._inflight: dict[tuple[int, Half], asyncio.Task[None]] = {}
        self._exchanged: dict[int, list[Any]] = {}
        """Per M what :meth:`_exchange` timed, as the journal keeps it."""
        self.steps: dict[int, SearchStep] = {}
        self.resumed = 0
        """Pairs taken from the journal."""
        self.timed = 0
        """Requests that a lane answered."""

    async def run(self, lanes: Sequence[Timer], finish: Callable[[int, Timer], Awaitable[None]]) -> None:
        """Search in passes, between which every M times what the nearest ones found.

        ``finish`` is called for an M as soon as its last pass is over: the GPU has time for it while compilers work
        for the others. Under a budget nothing is finished here, since what is left decides what is worth it.

        Under a budget there is a short first pass, so that no M is left out; it begins with the M where the model
        expects most, the later ones with those that gained most so far.
        """
        trials = self._job.settings.trials
        sizes: Sequence[int] = self._job.batch_sizes
        if self._budget.limited:
            sizes = sorted(sizes, key=self._seeds.expected_gain)
        passes = (_GLANCE, *PASSES) if self._budget.limited else PASSES

        async def follow(m: int, lane: Timer) -> None:
            if not self._budget.search_is_over:
                await self._exchange(m, lane)
            await self._continue(m, lane)

        async def last(m: int, lane: Timer) -> None:
            await follow(m, lane)
            if not self._budget.limited:
                self._compile_ahead(m)
                await self._exchange(m, lane)
                await finish(m, lane)

        for number, share in enumerate(passes):
            limit = max(1, round(share * trials))
            if number == 0:
                await spread(sizes, lanes, partial(self._begin, limit=limit), cost=self._cost, active=_ACTIVE)
                continue
            if self._budget.search_is_over:
                break
            for step in self.steps.values():
                step.allow(limit)
            work = last if number == len(passes) - 1 else follow
            await spread(self.by_gain(), lanes, work, cost=self._cost, active=_ACTIVE)
        if self._budget.limited:
            # What the time did not suffice to search still gets what the others found.
            await spread(self.by_gain(), lanes, self._exchange, cost=self._cost, active=_ACTIVE)

    def by_gain(self) -> list[int]:
        """Return the M that were begun: in order, or under a budget those with the largest gain first."""
        if not self._budget.limited:
            return list(self.steps)

        def share_of_today(m: int) -> float:
            best, today = self._best_and_today(self.steps[m])
            return best / today if best is not None and today is not None else 1.0

        return sorted(self.steps, key=share_of_today)

    def _cost(self, m: int) -> float:
        return 5_000.0 + 20 * self._job.floor(m)[0]

    async def _begin(self, m: int, lane: Timer, *, limit: int) -> None:
        settings = self._job.settings
        step = SearchStep(self._job.space(m), StepSettings(trials=limit, seed=settings.seed + m), [])
        step.resume(self._journal.trials(m), lambda data: read_timing(self._job.timer, data))
        self._resume_exchanged(step)
        self.resumed += step.told
        self._observer.advance(min(step.told, settings.trials))
        today, *others = self._seeds.at(m)
        step.add_seeds([today, *self._neighbours(m, NEIGHBOUR_SEEDS), *others])
        self.steps[m] = step
        await self._continue(m, lane)

    async def _continue(self, m: int, lane: Timer) -> None:
        """Ask, time and tell until the step proposes nothing more."""
        step = self.steps[m]
        pending: set[asyncio.Task[None]] = set()
        while True:
            if self._budget.search_is_over:
                step.give_up()
            while len(pending) < _DEPTH and (pair := step.ask()) is not None:
                pending.add(_start(self._trial(step, lane, pair)))
            if not pending:
                return
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    def _compile_ahead(self, m: int) -> None:
        """Begin to compile what the race will want with TMA, while the GPU is busy with the last exchange."""
        for pair in self.steps[m].board.best_pairs(TMA_FINALISTS):
            for variant in tma_variants(self._job, m, pair):
                for spec in self._job.chain_specs(m, variant):
                    self._pool.submit(spec)

    async def _exchange(self, m: int, lane: Timer) -> None:
        """Time what is best at the nearest M and already compiled: it costs the GPU milliseconds and no compiler."""
        step = self.steps[m]
        others = sorted((other for other in self.steps if other != m), key=lambda other: abs(math.log(other / m)))
        wanted: set[Half] = set()
        for other in others[:EXCHANGE_NEIGHBOURS]:
            for pair in self.steps[other].board.best_pairs(EXCHANGE_PAIRS):
                wanted.update(half for half in step.board.missing(pair) if self._is_free(step, half))
        if not wanted:
            return
        await asyncio.gather(*(self._time_half(step, lane, half) for half in sorted(wanted)))
        exchanged = self._exchanged.setdefault(m, [])
        for gemm, tile in sorted(wanted):
            result = step.board.get((gemm, tile))
            if result is not None:
                exchanged.append([gemm.value, tile.to_row(), result_to_json(result)])
        self._journal.save_note(m, _EXCHANGED, exchanged)

    def _is_free(self, step: SearchStep, half: Half) -> bool:
        return step.space.allows(half[1]) and self._pool.knows(self._job.spec(self._job.variant(step.m, *half)))

    def _resume_exchanged(self, step: SearchStep) -> None:
        found = self._exchanged[step.m] = list(self._journal.note(step.m, _EXCHANGED) or [])
        for gemm, row, result in found:
            timing = result_from_json(result, lambda data: read_timing(self._job.timer, data))
            step.board.put((Gemm(gemm), Tile.from_row(row)), timing)

    async def _time_half(self, step: SearchStep, lane: Timer, half: Half) -> None:
        if step.board.get(half) is not None:
            # Another pair's wish for it may have been answered before this one came to its turn.
            return
        key = (step.m, half)
        if key not in self._inflight:
            self._inflight[key] = _start(self._half(step, lane, half))
        await self._inflight[key]

    async def _trial(self, step: SearchStep, lane: Timer, pair: TilePair) -> None:
        await asyncio.gather(*(self._time_half(step, lane, half) for half in step.board.missing(pair)))
        trial = step.tell(pair)
        if not any(was_killed(step.board.get(half)) for half in halves(pair)):
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
            elif outcome.spill_bytes >= _SPILL_LIMIT and half not in self._baseline(step.m):
                result = Failure(FailureKind.SPILLS, f"spills {outcome.spill_bytes:,} B a thread")
            else:
                best = step.board.best_us(gemm)
                request = GemmRequest(step.m, gemm, tile, None if best is None else _STOP_FACTOR * best)
                self.timed += 1
                result = await asyncio.wrap_future(lane.time_gemm(request, outcome))
            step.board.put(half, result)
        finally:
            del self._inflight[step.m, half]

    def _baseline(self, m: int) -> set[Half]:
        """Return the halves that are timed whatever they are: what SGLang runs there today, and by default."""
        pairs = (self._job.today(m).pair, self._job.lookup.builtin_pair(self._job.problem, m))
        return {half for pair in pairs if pair is not None for half in halves(pair)}

    async def _compile(self, spec: CompileSpec) -> TileFacts | Failure:
        future = self._pool.submit(spec)
        self._observer.compiling(self._pool.pending)
        return within_limits(await asyncio.wrap_future(future), self._job.limits)

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

    def _best_and_today(self, step: SearchStep) -> tuple[float | None, float | None]:
        best = step.board.best_pairs(1)
        today = self._job.today(step.m).pair
        scores = (step.board.score(pair) if pair is not None else None for pair in (best[0] if best else None, today))
        best_us, today_us = (score if isinstance(score, float) else None for score in scores)
        return best_us, today_us

    def _report(self, step: SearchStep, lane: Timer) -> None:
        best_us, today_us = self._best_and_today(step)
        self._observer.standing(
            Standing(lane.name, step.m, step.told, self._job.settings.trials, best_us=best_us, today_us=today_us)
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
