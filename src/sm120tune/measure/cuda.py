"""Time launches on a GPU: one CUDA graph over a rotation of calls, cold L2, median of repeats."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

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
from sm120tune.measure.workload import Workload
from sm120tune.problem import Gemm
from sm120tune.reference import ErrorMeasure, measure_error, reference_moe
from sm120tune.tiles import TilePair

_MIN_REPEATS = 5
_MAX_REPEATS = 15
_TARGET_US = 6_000.0
"""Timed GPU work per candidate; short calls are repeated until it is reached."""

_RACE_WARMUP = 2
_SUM_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class CudaTimer:
    """Times tiles of one workload on the current device."""

    workload: Workload
    launcher: Launcher
    l2_bytes: int

    def time_gemm(self, request: GemmRequest) -> Measured:
        """Return the time of one GEMM alone; raises what Triton or CUDA raises when it cannot run."""
        sorted_rows = request.gemm is Gemm.DOWN and request.tile.USE_TMA
        problem = self.workload.problem
        m, block_m = request.m, request.tile.BLOCK_SIZE_M
        work = gemm_work(problem, request.gemm, m, self.workload.routing)
        calls = self.workload.rotation(m, self.l2_bytes, work.bytes)
        rows = self.launcher.rows(m, block_m, sorted_rows)

        def launch(index: int) -> None:
            operands = self.workload.operands(m, index, rows)
            alignment = self.workload.alignment(m, index, block_m)
            self.launcher.gemm(request.gemm, request.tile, operands, alignment, sorted_rows=sorted_rows)

        with _Graph(launch, calls) as graph:
            samples, stopped = _repeat(graph, request.stop_above_us)
        return _summary(samples, What(request.gemm.value), stopped)

    def race(self, request: RaceRequest) -> list[RaceLane]:
        """Return every pair's chain times; each round replays all pairs once, in turning order."""
        problem = self.workload.problem
        work = chain_work(problem, request.m, self.workload.routing)
        calls = self.workload.rotation(request.m, self.l2_bytes, work.bytes)
        graphs = [_Graph(self._chain_launch(request.m, pair), calls) for pair in request.pairs]
        try:
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
            from sm120tune.measure.align import align

            alignment = align(operands.route.ids, request.pair.block_size_m, problem.experts)
            self.launcher.chain(request.pair, operands, alignment)
            down = operands.down_out.view(request.m, problem.topk, problem.hidden)
            out = torch.cat([part.float().sum(dim=1) for part in down.split(_SUM_CHUNK_ROWS)])
            expected = reference_moe(
                operands.hidden_states, operands.w1, operands.w2, operands.route.weights, operands.route.ids
            )
            return measure_error(out, expected)
        finally:
            self.workload.refill()

    def _chain_launch(self, m: int, pair: TilePair) -> Callable[[int], None]:
        rows = self.launcher.rows(m, pair.block_size_m, pair.down.USE_TMA)

        def launch(index: int) -> None:
            operands = self.workload.operands(m, index, rows)
            self.launcher.chain(pair, operands, self.workload.alignment(m, index, pair.block_size_m))

        return launch


class _Graph:
    """A CUDA graph of ``calls`` launches; one replay is one sample."""

    def __init__(self, launch: Callable[[int], None], calls: int) -> None:
        self._calls = calls
        for index in range(calls):
            # Outside the capture: loads binaries, makes alignments, and surfaces a fault as an exception here.
            launch(index)
            if index == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Without this, a collection during capture may free tensors and invalidate it.
        gc.disable()
        try:
            with torch.cuda.graph(self._graph):
                for index in range(calls):
                    launch(index)
        finally:
            gc.enable()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def replay_us(self) -> float:
        """Replay once and return microseconds per call."""
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / self._calls

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
