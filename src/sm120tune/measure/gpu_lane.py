"""One GPU's worker process, seen from the parent: started, watched, ended and replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from sm120tune._interrupt import started_without_interrupts
from sm120tune.accuracy import ErrorMeasure
from sm120tune.compiler import TileFacts
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure import worker
from sm120tune.measure.lane import GemmTime, TimerName
from sm120tune.measure.results import GemmRequest, RaceLane, RaceRequest, VerifyRequest

CANDIDATE_TIMEOUT_S = 60.0
"""One request's limit; it also has to cover the start of a replacement worker."""

_PREPARE_TIMEOUT_S = 300.0
_TASKS_PER_PROCESS = 3000
"""A worker is renewed after this many requests: Triton up to 3.7 never unloads a kernel."""

_RETRIES = 1
"""A worker that was killed from outside says nothing of its candidate; a second death is blamed on it."""

_STOPPED = Failure(FailureKind.LAUNCH_ERROR, "stopped")


class GpuLane:
    """Requests to one GPU. ``on_event`` gets a line whenever a worker had to be replaced."""

    def __init__(
        self,
        name: str,
        setup: worker.WorkerSetup,
        on_event: Callable[[str], None],
        timeout_s: float = CANDIDATE_TIMEOUT_S,
    ) -> None:
        self._name = name
        self._on_event = on_event
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._setup = setup
        self._pools = [self._new_pool()]
        """The last one is in use, the others broke."""
        self._changing = threading.Lock()
        self._waiting: set[Future[Any]] = set()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=1,
            max_tasks=_TASKS_PER_PROCESS,
            initializer=worker.start,
            initargs=(self._setup,),
            context=multiprocessing.get_context("spawn"),
        )

    @property
    def name(self) -> str:
        """GPU index and card name."""
        return self._name

    @property
    def timer(self) -> TimerName:
        """Times come from CUDA events."""
        return "cuda"

    def prepare(self) -> Future[str | Failure]:
        """Start the worker and allocate the workload; returns what the worker says of itself."""
        return self._submit("starting", _PREPARE_TIMEOUT_S, worker.prepare)

    def time_gemm(self, request: GemmRequest, facts: TileFacts) -> Future[GemmTime | Failure]:
        """Time one GEMM alone; the compiler's facts are not needed."""
        return self._submit(f"M={request.m} {request.gemm} {request.tile}", self._timeout_s, worker.time_gemm, request)

    def race(self, request: RaceRequest) -> Future[list[RaceLane] | Failure]:
        """Time chains, interleaved."""
        what = f"M={request.m} race of {len(request.pairs)}"
        return self._submit(what, self._timeout_s * len(request.pairs), worker.race, request)

    def verify(self, request: VerifyRequest) -> Future[ErrorMeasure | Failure | None]:
        """Compare a pair with the reference on the GPU."""
        return self._submit(f"M={request.m} check of {request.pair}", self._timeout_s, worker.verify, request)

    def busy_s(self) -> Future[float]:
        """Ask the worker for its GPU's seconds; a replaced worker starts from 0."""
        return self._submit("a question", self._timeout_s, worker.busy_s)

    def stop(self) -> None:
        """Kill the worker, whatever it does."""
        self._stopping.set()
        with self._changing:
            pools = list(self._pools)
        for pool in pools:
            pool.stop()
            pool.join()
        # Pebble may end without a word on what it had not begun.
        for result in list(self._waiting):
            _tell(result, _STOPPED)

    def _submit(self, what: str, timeout_s: float, function: Callable[..., Any], *args: Any) -> Future[Any]:
        result: Future[Any] = Future()
        # A cancelled waiter must not make the answer of a running request an error.
        result.set_running_or_notify_cancel()
        self._waiting.add(result)
        result.add_done_callback(self._waiting.discard)
        self._schedule(what, timeout_s, function, args, result, _RETRIES)
        return result

    def _schedule(
        self,
        what: str,
        timeout_s: float,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        result: Future[Any],
        retries: int,
    ) -> None:
        try:
            task = self._task(function, args, timeout_s)
        except RuntimeError as error:
            if self._stopping.is_set():
                _tell(result, _STOPPED)
            else:
                result.set_exception(UserError(f"{self._name}: the worker cannot be started: {error}"))
            return

        def done(future: Future[Any]) -> None:
            answer = self._answer(future, what, timeout_s)
            if isinstance(answer, _Died) and retries > 0:
                self._on_event(f"{self._name}: worker died ({answer.how}) at {what}; replaced, trying once more")
                self._schedule(what, timeout_s, function, args, result, retries - 1)
            elif isinstance(answer, _Died):
                self._on_event(f"{self._name}: worker died again at {what}; replaced, the candidate is left out")
                _tell(result, Failure(FailureKind.LAUNCH_ERROR, f"the worker died twice ({answer.how})"))
            elif isinstance(answer, BaseException):
                result.set_exception(answer)
            else:
                _tell(result, answer)

        task.add_done_callback(done)

    def _task(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Future[Any]:
        with self._changing, started_without_interrupts():
            try:
                return self._pools[-1].schedule(function, args=list(args), timeout=timeout_s)
            except RuntimeError:
                if self._stopping.is_set():
                    raise
                # Pebble gives its pool up when a process dies that had nothing to do, say by the OOM killer.
                self._pools.append(self._new_pool())
                return self._pools[-1].schedule(function, args=list(args), timeout=timeout_s)

    def _answer(self, future: Future[Any], what: str, timeout_s: float) -> Any:
        if self._stopping.is_set():
            return _STOPPED
        try:
            return future.result()
        except TimeoutError:
            self._on_event(f"{self._name}: nothing for {timeout_s:g} s at {what}; worker killed and replaced")
            return Failure(FailureKind.TIMEOUT, f"not done within {timeout_s:g} s")
        except ProcessExpired as error:
            if error.exitcode == worker.EXIT_CONTEXT_LOST:
                self._on_event(f"{self._name}: illegal access at {what}; worker replaced, the candidate is left out")
                return Failure(FailureKind.ILLEGAL_ACCESS, "the CUDA context was lost")
            code = error.exitcode
            return _Died(f"signal {-code}" if code < 0 else f"exit code {code}")
        except BrokenProcessPool:
            return _Died("before it began")
        except CancelledError:
            return _STOPPED
        except Exception as error:
            return error


def _tell(result: Future[Any], answer: Any) -> None:
    """Answer a request, unless stopping the lane has answered it in another thread."""
    with contextlib.suppress(InvalidStateError):
        result.set_result(answer)


class _Died:
    """A worker ended for a reason that says nothing of its candidate."""

    def __init__(self, how: str) -> None:
        self.how = how
