"""What the processes of ``test_gpu_lane`` do in the place of the real worker's tasks; found there by name."""

from __future__ import annotations

import enum
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from sm120tune.accuracy import ErrorMeasure
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure import worker
from sm120tune.measure.results import GemmRequest, Measured, RaceLane, RaceRequest, VerifyRequest, What

FOLDER = "SM120TUNE_TEST_FOLDER"
"""Environment variable: where the tasks leave marks."""

US = 12.5


class Do(enum.IntEnum):
    """What a request's M asks of the process."""

    WORK = 1
    LOSE_CONTEXT = 2
    DIE_ONCE = 3
    DIE = 4
    EXIT = 5
    HANG = 6
    RAISE = 7
    FAIL = 8


def mark(name: str) -> Path:
    """Append one line with the process's id to a file, and return it."""
    path = Path(os.environ[FOLDER]) / name
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return path


def time_gemm(request: GemmRequest) -> Measured | Failure:
    """Do what the request's M says."""
    path = mark(str(request.m))
    match Do(request.m):
        case Do.LOSE_CONTEXT:
            os._exit(worker.EXIT_CONTEXT_LOST)
        case Do.DIE_ONCE if len(path.read_text().split()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case Do.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        case Do.EXIT:
            os._exit(3)
        case Do.HANG:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        case Do.RAISE:
            raise ValueError("a fault of our own")
        case Do.FAIL:
            return Failure(FailureKind.REGISTERS, "an answer like any other")
    return Measured(US, 0.1, 5, What(request.gemm.value))


def race(request: RaceRequest) -> list[RaceLane] | Failure:
    """Time every pair at the same value, or lose the context."""
    if request.m == Do.LOSE_CONTEXT:
        os._exit(worker.EXIT_CONTEXT_LOST)
    return [RaceLane(pair, (US,) * request.rounds) for pair in request.pairs]


def verify(request: VerifyRequest) -> ErrorMeasure | Failure:
    """Say that all is right."""
    return ErrorMeasure(0.001, 0.002, 0)


def prepare() -> str:
    """Report what the real initializer left."""
    mark("prepare")
    return f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.environ.get('TRITON_CACHE_DIR')}"


def busy_s() -> float:
    """Return a figure."""
    return 2.5


def guarded(request: GemmRequest) -> Any:
    """Run the real worker's guard over an error that CUDA or Triton raises, chosen by M."""
    worker._timer = object()  # type: ignore[assignment]

    def task(_timer: Any) -> Any:
        os.write(2, b"note: a dump\nptxas error: something\n")
        raise ERRORS[request.m]

    return worker._guarded(task)


ERRORS: dict[int, Exception] = {
    1: RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ..."),
    2: RuntimeError("Triton Error [CUDA]: misaligned address"),
    3: RuntimeError("CUDA error: unspecified launch failure"),
    4: RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376."),
    5: RuntimeError("out of resource: registers, Required: 70000"),
    6: torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"),
    7: RuntimeError("PassManager::run failed"),
    8: KeyError("x"),
}
