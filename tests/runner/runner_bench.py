"""What the tests of the runner share."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from synthetic import StubPool, SyntheticLane, open_journal

from sm120tune.compiler import TileFacts
from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.measure.results import GemmRequest
from sm120tune.observer import Silent, Standing
from sm120tune.provenance import RowProvenance
from sm120tune.runner import Runner, RunResult


class Recorder(Silent):
    """An observer that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.rows: list[RowProvenance] = []
        self.standings: list[Standing] = []
        self.counts: Counter[str] = Counter()
        self.threads: set[int] = set()
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)

    def phase(self, name: str, total: int) -> None:
        self.phases.append(name)
        self.threads.add(threading.get_ident())

    def standing(self, standing: Standing) -> None:
        self.standings.append(standing)
        self.threads.add(threading.get_ident())

    def failures(self, counts: Counter[str]) -> None:
        self.counts = counts

    def row(self, row: RowProvenance) -> None:
        self.rows.append(row)


class Bench:
    """Runs jobs in one folder, with lanes that are ended afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lanes: list[SyntheticLane] = []

    def lane(self, *args: Any, **options: Any) -> SyntheticLane:
        lane = SyntheticLane(*args, **options)
        self.lanes.append(lane)
        return lane

    def run(
        self, job: Job, *lanes: Timer, pool: Any = None, observer: Recorder | None = None, fresh: bool = False
    ) -> RunResult:
        journal = open_journal(self.folder / "runs", job.identity(), fresh=fresh)
        runner = Runner(job, pool or StubPool(), lanes, journal, observer or Recorder())
        return asyncio.run(asyncio.wait_for(runner.run(), 120))


class BrokenLane(SyntheticLane):
    """A lane whose machine fails after a while."""

    def __init__(self, after: int, error: BaseException) -> None:
        super().__init__()
        self._left, self._broken = after, error

    def time_gemm(self, request: GemmRequest, facts: TileFacts) -> Future[Any]:
        self._left -= 1
        if self._left >= 0:
            return super().time_gemm(request, facts)
        future: Future[Any] = Future()
        future.set_exception(self._broken)
        return future


def timed_halves(lane: SyntheticLane) -> list[tuple[int, Any, Any]]:
    return [(request.m, request.gemm, request.tile) for request in lane.gemms]
