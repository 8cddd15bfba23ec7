"""Time launches on a GPU: one CUDA graph over a rotation of calls, cold L2, median of repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sm120tune.accuracy import ErrorMeasure
from sm120tune.measure.align import Alignment
from sm120tune.measure.expected import expected_output
from sm120tune.measure.launcher import Launcher
from sm120tune.measure.results import (
    GemmRequest,
    Measured,
    RaceLane,
    RaceRequest,
    VerifyRequest,
    What,
    half_quartile_distance,
)
from sm120tune.measure.roofline import chain_work, gemm_work
from sm120tune.measure.workload import Operands, Workload
from sm120tune.problem import Gemm
from sm120tune.reference import measure_error

_MIN_REPEATS = 5
_MAX_REPEATS = 15
_TARGET_US = 6_000.0
"""Timed GPU work per candidate; short calls are repeated until it is reached."""

_HOPELESS = 3.0
"""A single launch this many times over the stop limit is not worth a graph."""
_LAUNCH_NOISE_US = 300.0
"""A single launch outside a graph includes the host's own time, up to about this much."""

_RACE_WARMUP = 2
_SUM_CHUNK_ROWS = 4096

_Call = tuple[Operands, Alignment]


class BusyClock:
    """Sums what CUDA events say the GPU spent on launches; one per process."""

    us = 0.0


@dataclass(frozen=True)
class CudaTimer:
    """Times tiles of one workload on the current device."""

    workload: Workload
    launcher: Launcher
    l2_bytes: int

    def time_gemm(self, request: GemmRequest) -> Measured:
        """Return the time of one GEMM alone; raises what Triton or CUDA raises when it cannot run."""
        sorted_rows = request.gemm is Gemm.DOWN and request.tile.USE_TMA
        work = gemm_work(self.workload.problem, request.gemm, request.m, self.workload.routing)
        launches = [
            partial(self.launcher.gemm, request.gemm, request.tile, operands, alignment, sorted_rows=sorted_rows)
            for operands, alignment in self._calls(request.m, request.tile.BLOCK_SIZE_M, sorted_rows, work.bytes)
        ]
        what = What(request.gemm.value)
        once = _time_once(launches)
        if request.stop_above_us is not None and once > max(_HOPELESS * request.stop_above_us, _LAUNCH_NOISE_US):
            return _summary([once], what, stopped_early=True)
        with _Graph(launches) as graph:
            samples, stopped = _repeat(graph, request.stop_above_us)
        return _summary(samples, what, stopped)

    def race(self, request: RaceRequest) -> list[RaceLane]:
        """Return every pair's chain times; each round replays all pairs once, in turning order."""
        work = chain_work(self.workload.problem, request.m, self.workload.routing)
        graphs: list[_Graph] = []
        try:
            for pair in request.pairs:
                calls = self._calls(request.m, pair.block_size_m, pair.down.USE_TMA, work.bytes)
                launches = [partial(self.launcher.chain, pair, *call) for call in calls]
                _time_once(launches)
                graphs.append(_Graph(launches))
            samples: list[list[float]] = [[] for _ in graphs]
            for _ in range(_RACE_WARMUP):
                for graph in graphs:
                    graph.replay_us()
            for turn in range(request.rounds):
                # The order turns, so that no lane always runs behind the same neighbour.
                for lane in [(turn + i) % len(graphs) for i in range(len(graphs))]:
                    samples[lane].append(graphs[lane].replay_us())
        finally:
            for graph in graphs:
                graph.close()
        return [RaceLane(pair, tuple(times)) for pair, times in zip(request.pairs, samples, strict=True)]

    def verify(self, request: VerifyRequest) -> ErrorMeasure:
        """Return the error of one pair's chain on fresh data against the float32 reference.

        The sum over topk is done here in float32, so that an unwritten element of any output shows as NaN.
        """
        problem = self.workload.problem
        sorted_rows = request.pair.down.USE_TMA
        rows = self.launcher.rows(request.m, request.pair.block_size_m, sorted_rows)
        operands = self.workload.fresh(request.m, rows, request.seed)
        try:
            alignment = self.workload.align(operands.route.ids, request.pair.block_size_m)
            self.launcher.chain(request.pair, operands, alignment)
            down = operands.down_out.view(request.m, problem.topk, problem.hidden)
            out = torch.cat([part.float().sum(dim=1) for part in down.split(_SUM_CHUNK_ROWS)])
            return measure_error(out, expected_output(operands, self.workload.held(operands.route.ids)))
        finally:
            self.workload.refill()

    def _calls(self, m: int, block_size_m: int, sorted_rows: bool, bytes_per_call: float) -> list[_Call]:
        """Return the rotation: enough different calls that their bytes outsize the L2."""
        rows = self.launcher.rows(m, block_size_m, sorted_rows)
        return [
            (self.workload.operands(m, index, rows), self.workload.alignment(m, index, block_size_m))
            for index in range(self.workload.rotation(m, self.l2_bytes, bytes_per_call))
        ]


def _time_once(launches: Sequence[Callable[[], None]]) -> float:
    """Load the binaries, surface a fault as an exception, and return the µs of one launch outside a graph."""
    launches[0]()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launches[-1]()
    end.record()
    end.synchronize()
    us = float(start.elapsed_time(end)) * 1e3
    BusyClock.us += us
    return us


class _Graph:
    """A CUDA graph of a rotation of launches; one replay is one sample."""

    def __init__(self, launches: Sequence[Callable[[], None]]) -> None:
        self._calls = len(launches)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # torch.cuda.graph() would collect garbage and empty the allocator's cache each time; nothing is allocated
        # here, so the bare calls are enough.
        with torch.cuda.stream(stream):
            self._graph.capture_begin()
            try:
                for launch in launches:
                    launch()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def replay_us(self) -> float:
        """Replay once and return microseconds per call."""
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        us = float(self._start.elapsed_time(self._end)) * 1e3
        BusyClock.us += us
        return us / self._calls

    @property
    def calls(self) -> int:
        """Launches per replay."""
        return self._calls

    def close(self) -> None:
        """Free the graph; each one pins device memory until then."""
        self._graph.reset()

    def __enter__(self) -> _Graph:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _repeat(graph: _Graph, stop_above_us: float | None) -> tuple[list[float], bool]:
    first = graph.replay_us()
    if stop_above_us is not None and first > stop_above_us:
        second = graph.replay_us()
        if second > stop_above_us:
            return [min(first, second)], True
    wanted = _TARGET_US / max(first * graph.calls, 1.0)
    repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, math.ceil(wanted)))
    return [graph.replay_us() for _ in range(repeats)], False


def _summary(samples: Sequence[float], what: What, stopped_early: bool) -> Measured:
    return Measured(
        us=statistics.median(samples),
        spread_us=half_quartile_distance(samples),
        repetitions=len(samples),
        what=what,
        stopped_early=stopped_early,
    )
