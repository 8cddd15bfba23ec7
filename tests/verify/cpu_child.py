"""The child of ``sm120tune verify`` with a stopwatch that asks the made-up kernel for its time."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Sequence

import torch

from sm120tune.verify.child import main
from sm120tune.verify.stopwatch import Call, Recording


class _Recorded:
    def __init__(self, us: float) -> None:
        self._us = us
        self._noise = random.Random(0)

    def replay_us(self) -> float:
        return self._us * (1 + 0.001 * self._noise.random())

    def close(self) -> None:
        pass


class CpuStopwatch:
    device = torch.device("cpu")
    l2_bytes = 1

    def record(self, calls: Sequence[Call]) -> Recording:
        kernel = importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe")
        calls[0]()
        return _Recorded(kernel.last_us)


if __name__ == "__main__":
    main(sys.argv[1], CpuStopwatch)
