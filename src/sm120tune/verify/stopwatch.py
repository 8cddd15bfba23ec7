"""Times whole calls on a GPU: one CUDA graph for each side, replayed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sm120tune.measure.worker import warm_up

Call = Callable[[], torch.Tensor]


class Recording(Protocol):
    """Calls that can be timed again and again."""

    def replay_us(self) -> float:
        """Run all of them once and return µs per call."""

    def close(self) -> None:
        """Free what they hold."""


class Stopwatch(Protocol):
    """Where calls run and how they are timed."""

    device: torch.device
    l2_bytes: int

    def record(self, calls: Sequence[Call]) -> Recording:
        """Run some calls, so that a fault shows and everything is compiled, and record them."""


class CudaStopwatch:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.l2_bytes = int(torch.cuda.get_device_properties(self.device).L2_cache_size)
        warm_up(self.device)

    def record(self, calls: Sequence[Call]) -> Recording:
        """Capture the calls in a CUDA graph."""
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        return _Graph(calls)


class _Graph:
    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = len(calls)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def replay_us(self) -> float:
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / self._calls

    def close(self) -> None:
        self._graph.reset()
