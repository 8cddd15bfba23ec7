"""Compile, time and check the chosen tiles on one lane; every finished one is in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sm120tune.accuracy import ErrorMeasure
from sm120tune.calibrate.choice import Chosen
from sm120tune.calibrate.timed import Checked, GemmResult, TimedTile
from sm120tune.compiler.pool import VariantPool
from sm120tune.compiler.spec import within_limits
from sm120tune.errors import UserError
from sm120tune.failures import Failure, was_killed
from sm120tune.job import Job
from sm120tune.measure.lane import Timer, answered, started
from sm120tune.measure.results import GemmRequest, Measured, VerifyRequest
from sm120tune.observer import Observer
from sm120tune.problem import Gemm
from sm120tune.search.journal import Journal
from sm120tune.spread import spread
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.arguments import Variant

JOURNAL_SPACE = "calibrate-1"
"""Names the journal's studies; changes with what :class:`TimedTile` keeps."""
_CLOCKS = "clocks"
_ACTIVE = 4
"""Tiles under way at a time: while one waits for its check another is timed, and each is soon whole."""

Clocks = Mapping[str, float]


@dataclass(frozen=True)
class Found:
    """Everything that was measured."""

    timed: tuple[TimedTile, ...]
    """Tiles in the order in which they were chosen, M ascending."""
    resumed: int
    """Of them, those that an earlier run had measured."""
    clocks: Clocks | None
    """What the card said of its clocks in the midst of the work."""


class Measuring:
    """One run over the tiles."""

    def __init__(
        self,
        job: Job,
        pool: VariantPool,
        lane: Timer,
        journal: Journal,
        observer: Observer,
        read_clocks: Callable[[], Clocks | None],
    ) -> None:
        self._job, self._pool, self._lane = job, pool, lane
        self._journal, self._observer, self._read_clocks = journal, observer, read_clocks
        self._done = 0
        self._half = 0

    async def run(self, chosen: Sequence[Chosen]) -> Found:
        """Measure every tile at every M; a candidate's failure is a result.

        Raises a group of UserErrors where the environment fails. Interrupted, what is finished is in the journal, and
        the same job goes on from there.
        """
        sizes = self._job.batch_sizes
        known = {(one.tile, m): self._known(one.tile, m) for one in chosen for m in sizes}
        resumed = sum(found is not None for found in known.values())
        self._observer.phase("calibrate", len(known))
        self._half = (len(known) - resumed + 1) // 2
        # Where nothing is left to measure no worker need be started.
        said: Future[str | Failure] = self._lane.prepare() if resumed < len(known) else answered("")
        for (tile, m), timed in known.items():
            if timed is None:
                # The compilers work while the lane still starts, and ahead of it.
                for spec in self._job.chain_specs(m, TilePair.same(tile)):
                    self._pool.submit(spec)
        found: dict[Tile, list[TimedTile]] = {}

        async def measure(one: Chosen, _lane: Timer) -> None:
            found[one.tile] = await self._tile(one.tile, [(m, known[one.tile, m]) for m in sizes])

        async with asyncio.TaskGroup() as group:
            group.create_task(spread(chosen, [self._lane], measure, cost=lambda _one: 1.0, active=_ACTIVE))
            if answer := await started(self._lane, said):
                self._observer.event(f"{self._lane.name}: {answer}")
        timed_tiles = tuple(timed for one in chosen for timed in found[one.tile])
        return Found(timed_tiles, resumed, self._journal.note(sizes[0], _CLOCKS))

    async def _tile(self, tile: Tile, at: Sequence[tuple[int, TimedTile | None]]) -> list[TimedTile]:
        found = []
        for m, known in at:
            timed = known
            if timed is None:
                timed = await self._measure(tile, m)
                if not any(map(was_killed, timed.failures)):
                    self._journal.save_note(m, _note(tile), timed.to_json())
                await self._count()
            self._observer.advance()
            found.append(timed)
        self._observer.event(_line(tile, found))
        return found

    async def _measure(self, tile: Tile, m: int) -> TimedTile:
        pair = TilePair.same(tile)
        binaries = [(spec, asyncio.wrap_future(self._pool.submit(spec))) for spec in self._job.chain_specs(m, pair)]
        gemms: dict[Gemm, GemmResult] = {}
        broken: Failure | None = None
        for spec, future in binaries:
            outcome = within_limits(await future, self._job.limits)
            if not isinstance(spec.variant, Variant):
                broken = outcome if isinstance(outcome, Failure) else broken
            elif isinstance(outcome, Failure):
                gemms[spec.variant.gemm] = GemmResult.of(None, outcome)
            else:
                request = GemmRequest(m, spec.variant.gemm, tile)
                answer = await asyncio.wrap_future(self._lane.time_gemm(request, outcome))
                gemms[spec.variant.gemm] = GemmResult.of(outcome, answer)
        check: Checked | Failure | None = broken
        if broken is None and all(isinstance(result.time, Measured) for result in gemms.values()):
            seed = self._job.settings.seed + 7919 * m + 1
            error = await asyncio.wrap_future(self._lane.verify(VerifyRequest(m, pair, seed)))
            check = Checked.of(error, self._job.problem.dtype) if isinstance(error, ErrorMeasure) else error
        return TimedTile(tile, m, gemms, check)

    async def _count(self) -> None:
        self._done += 1
        if self._done == self._half:
            clocks = await asyncio.to_thread(self._read_clocks)
            if clocks is not None:
                self._journal.save_note(self._job.batch_sizes[0], _CLOCKS, dict(clocks))

    def _known(self, tile: Tile, m: int) -> TimedTile | None:
        note = self._journal.note(m, _note(tile))
        try:
            return None if note is None else TimedTile.from_json(note)
        except ValueError as error:
            raise UserError(f"the journal {self._journal.path} is damaged ({error}); start over with --fresh") from None


def _note(tile: Tile) -> str:
    return f"tile {tile}"


def _line(tile: Tile, found: Sequence[TimedTile]) -> str:
    cells = []
    for one in found:
        times = [result.time for result in one.gemms.values()]
        us = [time.us for time in times if isinstance(time, Measured)]
        failed = one.failures
        cells.append(failed[0].kind.value if failed else f"{sum(us):.1f} us")
    return f"{tile}: " + ", ".join(f"M={one.m} {cell}" for one, cell in zip(found, cells, strict=True))
