"""CUDA graphs of calls that allocate, as SGLang's do; skipped where torch sees no GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sm120tune.verify.stopwatch import CudaStopwatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_longer_call_takes_longer_and_nothing_stays_allocated() -> None:
    stopwatch = CudaStopwatch()
    matrix = torch.randn((2048, 2048), device=stopwatch.device)

    def work(times: int) -> torch.Tensor:
        out = matrix
        for _ in range(times):
            out = (out @ matrix) / 2048
        return out

    # cuBLAS keeps a workspace for the stream that captures: 32 MiB, once in a process.
    stopwatch.record([partial(work, 1)]).close()
    before = torch.cuda.memory_allocated()
    short, long = (stopwatch.record([partial(work, times)] * 3) for times in (2, 8))
    times = [(short.replay_us(), long.replay_us()) for _ in range(10)]
    assert sorted(b / a for a, b in times)[5] == pytest.approx(4.0, rel=0.4)
    for recording in (short, long):
        recording.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20
