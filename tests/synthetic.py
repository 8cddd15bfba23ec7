"""A made-up card for the tests of what searches and decides: its times follow a formula, its faults are ordered."""

from __future__ import annotations

import math
import random
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sm120tune.accuracy import ErrorMeasure
from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job, Settings
from sm120tune.measure.lane import GemmTime, TimerName
from sm120tune.measure.results import GemmRequest, Measured, RaceLane, RaceRequest, VerifyRequest, What
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.resolve import Card, JobRequest, resolve_job
from sm120tune.search.board import halves
from sm120tune.search.journal import Journal
from sm120tune.search_space import staged_shared_bytes
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.arguments import Variant

SMALL = MoEProblem(experts=16, intermediate=256, hidden=512, topk=2, router_experts=16)

RIGHT = ErrorMeasure(relative=0.004, worst_row=0.005, nan_rows=0)
WRONG = ErrorMeasure(relative=0.5, worst_row=3.0, nan_rows=0)

Cost = Callable[[Gemm, Tile, int], float]
Fault = Callable[[GemmRequest | RaceRequest | VerifyRequest], Failure | None]


def bowl(gemm: Gemm, tile: Tile, m: int) -> float:
    """Return a time with one optimum that moves with M and differs between the GEMMs; today's tiles are far off."""
    block_m = 16 if m <= 64 else 64
    block_n = 64 if gemm is Gemm.GATE_UP else 128
    octaves = (
        0.20 * abs(math.log2(tile.BLOCK_SIZE_M / block_m))
        + 0.15 * abs(math.log2(tile.BLOCK_SIZE_N / block_n))
        + 0.15 * abs(math.log2(tile.BLOCK_SIZE_K / 128))
        + 0.03 * abs(math.log2(tile.GROUP_SIZE_M))
        + 0.05 * abs(math.log2(tile.num_warps / 4))
        + 0.04 * abs(tile.num_stages - 3)
    )
    return (10 + m / 20) * (1 + octaves)


def flat(_gemm: Gemm, _tile: Tile, m: int) -> float:
    """Return the same time for every tile."""
    return 10 + m / 20


def pair_us(cost: Cost, pair: TilePair, m: int) -> float:
    """Return what a pair's chain takes."""
    return sum(cost(gemm, tile, m) for gemm, tile in halves(pair))


def no_fault(_request: GemmRequest | RaceRequest | VerifyRequest) -> Failure | None:
    """Let everything run."""
    return None


class SyntheticLane:
    """A ``Timer`` whose answers come from a thread, as a worker's do, and from a formula, as no worker's do."""

    def __init__(
        self,
        cost: Cost = bowl,
        *,
        name: str = "synthetic",
        timer: TimerName = "cuda",
        noise: float = 0.0,
        fault: Fault = no_fault,
        error: Callable[[VerifyRequest], ErrorMeasure] = lambda _request: RIGHT,
        before: Callable[[Any], None] = lambda _request: None,
        ready: str | Failure = "",
    ) -> None:
        self.name = name
        self.timer: TimerName = timer
        self.gemms: list[GemmRequest] = []
        self.races: list[RaceRequest] = []
        self.checks: list[VerifyRequest] = []
        self.facts: dict[GemmRequest, TileFacts] = {}
        self.stopped = False
        self._cost, self._noise, self._fault, self._error, self._before = cost, noise, fault, error, before
        self._ready = ready
        self._random = random.Random(name)
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()

    def prepare(self) -> Future[str | Failure]:
        """Get ready, after what was asked for before."""
        return self._thread.submit(lambda: self._ready)

    def time_gemm(self, request: GemmRequest, facts: TileFacts) -> Future[GemmTime | Failure]:
        """Time one GEMM."""
        self.gemms.append(request)
        self.facts[request] = facts
        return self._thread.submit(self._gemm, request)

    def race(self, request: RaceRequest) -> Future[list[RaceLane] | Failure]:
        """Time chains in rounds that drift together."""
        self.races.append(request)
        return self._thread.submit(self._race, request)

    def verify(self, request: VerifyRequest) -> Future[ErrorMeasure | Failure | None]:
        """Say how wrong a pair is."""
        self.checks.append(request)
        return self._thread.submit(self._verify, request)

    def busy_s(self) -> Future[float]:
        """No GPU, no seconds of it."""
        return self._thread.submit(float)

    def stop(self) -> None:
        """End the thread."""
        self.stopped = True
        self._thread.shutdown()

    def _noisy(self) -> float:
        return math.exp(self._random.gauss(0, self._noise)) if self._noise else 1.0

    def _gemm(self, request: GemmRequest) -> GemmTime | Failure:
        self._before(request)
        fault = self._fault(request)
        us = self._cost(request.gemm, request.tile, request.m) * self._noisy()
        return fault or Measured(us, 0.01 * us, 5, What(request.gemm.value))

    def _race(self, request: RaceRequest) -> list[RaceLane] | Failure:
        self._before(request)
        fault = self._fault(request)
        if fault is not None:
            return fault
        rounds = [self._noisy() for _ in range(request.rounds)]
        return [
            RaceLane(pair, tuple(pair_us(self._cost, pair, request.m) * drift * self._noisy() for drift in rounds))
            for pair in request.pairs
        ]

    def _verify(self, request: VerifyRequest) -> ErrorMeasure | Failure | None:
        self._before(request)
        return self._fault(request) or self._error(request)


class StubPool:
    """A compile pool that knows a tile's resources by formula; ``fault`` makes a variant fail."""

    def __init__(self, fault: Callable[[CompileSpec], Failure | TileFacts | None] = lambda _spec: None) -> None:
        self.submitted: list[CompileSpec] = []
        self.compiled = 0
        self._fault = fault

    @property
    def pending(self) -> int:
        """Nothing ever waits."""
        return 0

    def knows(self, spec: CompileSpec) -> bool:
        return True

    def submit(self, spec: CompileSpec) -> Future[TileFacts | Failure]:
        """Answer at once."""
        self.submitted.append(spec)
        self.compiled = len(set(self.submitted))
        future: Future[TileFacts | Failure] = Future()
        future.set_result(self._fault(spec) or self._facts(spec))
        return future

    def stop(self) -> None:
        """Nothing to end."""

    def _facts(self, spec: CompileSpec) -> TileFacts:
        if not isinstance(spec.variant, Variant):
            return TileFacts(0, 32, 0, 4)
        tile = spec.variant.tile
        return TileFacts(staged_shared_bytes(tile, spec.problem.quantization), 128, 0, tile.num_warps)


def make_job(
    sglang: Path,
    output: Path,
    *,
    problem: MoEProblem = SMALL,
    batch_sizes: Sequence[int] = (16, 512),
    trials: int = 30,
    exhaustive: bool = False,
    budget_s: float | None = None,
    seed: int = 0,
    timer: TimerName = "cuda",
    shared_memory: int = 101376,
) -> Job:
    """Return a job of the default card, which is said to be timed although there is none."""
    card = replace(find_device(DEFAULT_DEVICE_NAME), shared_memory_per_block=shared_memory)
    settings = Settings(trials, exhaustive, budget_s, seed)
    request = JobRequest(problem, tuple(batch_sizes), UNIFORM, settings, sglang, output)
    return replace(resolve_job(request, Card(card, (), "model")), timer=timer)


def open_journal(folder: Path, identity: Mapping[str, Any], *, fresh: bool = False) -> Journal:
    """Return the journal of a run in the whole space."""
    return Journal(folder, identity, fresh=fresh)


def every_kind(key: object, kinds: Sequence[FailureKind], share: float = 0.4) -> Failure | None:
    """Return a failure for a share of all keys, spread over the kinds; the same key always gets the same."""
    number = zlib.crc32(repr(key).encode())
    if number % 1000 >= 1000 * share:
        return None
    return Failure(kinds[number // 1000 % len(kinds)], "injected")
