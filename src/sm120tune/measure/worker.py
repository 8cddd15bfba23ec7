"""What runs inside a GPU's own process: the only place of the project that starts CUDA.

A fault that leaves the CUDA context unusable ends the process with an exit code of its own; the parent records the
candidate and starts another worker.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sm120tune.compiler.build import captured_output, use_cache_folder
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.results import GemmRequest, Measured, RaceLane, RaceRequest, VerifyRequest
from sm120tune.measure.routing import Routing
from sm120tune.problem import MoEProblem

if TYPE_CHECKING:
    from sm120tune.accuracy import ErrorMeasure
    from sm120tune.compiler.spec import KernelSource
    from sm120tune.measure.cuda import CudaTimer

EXIT_CONTEXT_LOST = 77
"""Exit code of a worker whose CUDA context a candidate destroyed."""

_FATAL = ("illegal memory access", "illegal instruction", "misaligned address", "unspecified launch failure")
_WARM_UP_S = 0.3


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs to time a problem on its GPU; picklable."""

    visible_device: str
    """Goes into CUDA_VISIBLE_DEVICES before CUDA starts."""
    source: KernelSource
    routing: Routing
    max_m: int
    copies: int
    seed: int
    triton_folder: Path
    resident: int | None = None
    """Experts whose weights are held, None for all; the others read theirs."""

    @property
    def problem(self) -> MoEProblem:
        """The problem that the worker allocates."""
        return self.source.template.problem


_setup: WorkerSetup | None = None
_timer: CudaTimer | None = None


def start(setup: WorkerSetup) -> None:
    """Initialize the process: everything that must precede CUDA."""
    global _setup
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = setup.visible_device
    # A second lazy compiler thread pool per worker would compete with the compile processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    use_cache_folder(setup.triton_folder)
    _setup = setup


def prepare() -> str | Failure:
    """Allocate the workload, warm the card up and report; the first task of every worker."""
    import torch

    try:
        timer = _get_timer()
    except torch.cuda.OutOfMemoryError as error:
        return Failure(FailureKind.OUT_OF_MEMORY, str(error).splitlines()[0])
    except Exception as error:
        return Failure(FailureKind.LAUNCH_ERROR, f"{type(error).__name__}: {error}".splitlines()[0])
    allocated = torch.cuda.memory_allocated() / 2**30
    bandwidth = _copy_bandwidth(timer.l2_bytes) / 1e12
    return f"{torch.cuda.get_device_name()}, {allocated:.1f} GiB allocated, copies {bandwidth:.2f} TB/s"


def time_gemm(request: GemmRequest) -> Measured | Failure:
    """Time one GEMM; a candidate that cannot run comes back as a failure."""
    return _guarded(lambda timer: timer.time_gemm(request))  # type: ignore[no-any-return]


def race(request: RaceRequest) -> list[RaceLane] | Failure:
    """Time several chains, interleaved."""
    return _guarded(lambda timer: timer.race(request))  # type: ignore[no-any-return]


def verify(request: VerifyRequest) -> ErrorMeasure | Failure:
    """Compare one pair's chain with the reference."""
    return _guarded(lambda timer: timer.verify(request))  # type: ignore[no-any-return]


def busy_s() -> float:
    """Return the seconds that this process's GPU spent on launches, by CUDA events."""
    from sm120tune.measure.cuda import BusyClock

    return BusyClock.us / 1e6


def _guarded(task: Any) -> Any:
    import torch

    with captured_output() as noise:
        try:
            return task(_get_timer())
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return Failure(FailureKind.OUT_OF_MEMORY, str(error).splitlines()[0])
        except Exception as error:
            failure = _classify(error, noise())
    if failure.kind is FailureKind.ILLEGAL_ACCESS:
        _leave(failure)
    return failure


def _classify(error: Exception, noise: str) -> Failure:
    text = f"{type(error).__name__}: {error}"
    lowered = text.lower()
    if any(fatal in lowered for fatal in _FATAL):
        return Failure(FailureKind.ILLEGAL_ACCESS, text.splitlines()[0])
    if "out of resource" in lowered:
        kind = FailureKind.SHARED_MEMORY if "shared memory" in lowered else FailureKind.REGISTERS
        return Failure(kind, text.splitlines()[0])
    extra = next((f" ({line.strip()[:160]})" for line in noise.splitlines() if "error" in line.lower()), "")
    return Failure(FailureKind.LAUNCH_ERROR, text.splitlines()[0][:200] + extra)


def _leave(failure: Failure) -> NoReturn:
    print(failure.message, file=sys.stderr, flush=True)
    os._exit(EXIT_CONTEXT_LOST)


def _get_timer() -> CudaTimer:
    global _timer
    if _timer is None:
        _timer = _make_timer()
    return _timer


def _make_timer() -> CudaTimer:
    import torch

    from sm120tune.measure.cuda import CudaTimer
    from sm120tune.measure.launcher import Launcher
    from sm120tune.measure.workload import Workload

    if _setup is None:
        raise RuntimeError("worker.start() was not called")
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    workload = Workload(
        _setup.problem,
        _setup.routing,
        max_m=_setup.max_m,
        copies=_setup.copies,
        resident=_setup.resident,
        seed=_setup.seed,
        device=device,
    )
    warm_up(device)
    return CudaTimer(workload, Launcher(_setup.source), torch.cuda.get_device_properties(device).L2_cache_size)


def warm_up(device: Any) -> None:
    """Run the card up to its clocks: the first candidates would otherwise be timed on an idle card."""
    import time

    import torch

    matrix = torch.randn((4096, 4096), dtype=torch.bfloat16, device=device)
    end = time.monotonic() + _WARM_UP_S
    while time.monotonic() < end:
        matrix @ matrix
        torch.cuda.synchronize()


def _copy_bandwidth(l2_bytes: int) -> float:
    import torch

    size = max(256 * 2**20, 8 * l2_bytes)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * size / (begin.elapsed_time(end) * 1e-3))
    del source, target
    torch.cuda.empty_cache()
    return best
