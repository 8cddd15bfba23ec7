"""Compile in parallel on the CPU; a candidate that crashes or hangs costs its process, never the run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from concurrent.futures import CancelledError, Future, InvalidStateError, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol

from pebble import ProcessExpired, ProcessPool

from sm120tune._interrupt import started_without_interrupts
from sm120tune.compiler.build import compile_facts, use_cache_folder
from sm120tune.compiler.cache import CompileCache, Outcome
from sm120tune.compiler.spec import CompileSpec
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.state import make_writable

DEFAULT_TIMEOUT_S = 60.0
_TASKS_PER_PROCESS = 500
_NICENESS = 5
"""Compilers yield to the processes that feed the GPUs."""


class VariantPool(Protocol):
    """Where outcomes come from: compilers, or a recorded table."""

    compiled: int
    """Variants that were really compiled."""

    @property
    def pending(self) -> int:
        """Variants that are waiting or being compiled."""

    def knows(self, spec: CompileSpec) -> bool:
        """Whether the outcome is there already."""

    def submit(self, spec: CompileSpec) -> Future[Outcome]:
        """Return a future of the outcome; a candidate's failure is one."""

    def stop(self) -> None:
        """End at once."""


def _start_worker(triton_folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ctrl-C reaches the whole group: ptxas, which this process starts, would die of it and look like a crash.
    os.setsid()
    os.nice(_NICENESS)
    use_cache_folder(triton_folder)


def _unusable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"the compilers cannot write their cache {folder}: {error.strerror or error}; make room or set XDG_CACHE_HOME"
    )


class CompilePool:
    """A pool of compile processes in front of the cache of outcomes."""

    def __init__(self, cache: CompileCache, workers: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Start the processes; raises UserError where the cache cannot be written."""
        self._cache = cache
        self._timeout_s = timeout_s
        self.compiled = 0
        """Variants that were compiled rather than found in the cache."""
        self._pending: dict[CompileSpec, Future[Outcome]] = {}
        self._workers = workers
        self._stopped = False
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPool:
        folder = self._cache.triton_folder
        try:
            make_writable(folder)
        except OSError as error:
            raise _unusable(folder, error) from None
        return ProcessPool(
            max_workers=self._workers,
            max_tasks=_TASKS_PER_PROCESS,
            initializer=_start_worker,
            initargs=(self._cache.triton_folder,),
            context=multiprocessing.get_context("spawn"),
        )

    @property
    def pending(self) -> int:
        """Variants that are waiting or being compiled."""
        return len(self._pending)

    def knows(self, spec: CompileSpec) -> bool:
        """Whether the outcome is in the cache."""
        return self._cache.get(spec) is not None

    def submit(self, spec: CompileSpec) -> Future[Outcome]:
        """Return a future of the outcome; a candidate's failure is one.

        It raises UserError only where the compilers cannot write. A known variant answers at once, and one that is
        already on its way is not compiled twice. Call from one thread only.
        """
        # In this order: an outcome is in the cache before it leaves the pending ones.
        pending = self._pending.get(spec)
        if pending is not None:
            return pending
        known = self._cache.get(spec)
        if known is not None:
            done: Future[Outcome] = Future()
            done.set_result(known)
            return done
        result: Future[Outcome] = Future()
        # A waiter that is cancelled must not cancel what others wait for too.
        result.set_running_or_notify_cancel()
        self._pending[spec] = result
        try:
            self._start(spec, result)
        except RuntimeError:
            if self._stopped:
                del self._pending[spec]
                raise
            self._restart()
        self.compiled += 1
        return result

    def _restart(self) -> None:
        """Begin anew: Pebble gives up when a process dies that had nothing to do, say by the OOM killer."""
        self._pool.stop()
        self._pool.join()
        self._pool = self._new_pool()
        for spec, result in list(self._pending.items()):
            self._start(spec, result)

    def _start(self, spec: CompileSpec, result: Future[Outcome]) -> None:
        with started_without_interrupts():
            task = self._pool.schedule(compile_facts, args=[spec], timeout=self._timeout_s)
        task.add_done_callback(lambda done: self._finish(spec, done, result))

    def _finish(self, spec: CompileSpec, task: Future[Any], result: Future[Outcome]) -> None:
        outcome: Outcome
        try:
            outcome = task.result()
        except TimeoutError:
            outcome = Failure(FailureKind.COMPILE_TIMEOUT, f"not compiled within {self._timeout_s:g} s")
        except ProcessExpired as error:
            # No compiler does that to itself.
            killed = error.exitcode == -signal.SIGKILL
            kind = FailureKind.COMPILE_KILLED if killed else FailureKind.COMPILE_CRASH
            outcome = Failure(kind, f"the compiler process died (exit code {error.exitcode})")
        except BrokenProcessPool as error:
            outcome = Failure(FailureKind.COMPILE_KILLED, f"the compiler processes died: {error}")
        except OSError as error:
            self._settle(spec, result, _unusable(self._cache.triton_folder, error))
            return
        except BaseException as error:
            self._settle(spec, result, error)
            return
        if self._stopped and isinstance(outcome, Failure):
            # The stop itself looks like a death or a broken pool.
            self._settle(spec, result, CancelledError(outcome.message))
            return
        self._cache.put(spec, outcome)
        self._settle(spec, result, outcome)

    def _settle(self, spec: CompileSpec, result: Future[Outcome], outcome: Outcome | BaseException) -> None:
        self._pending.pop(spec, None)
        # stop() and the last tasks may want to settle the same one.
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, BaseException):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)

    def stop(self) -> None:
        """End every process at once; what was not finished stays uncompiled, and whoever waits is let go."""
        self._stopped = True
        self._pool.stop()
        self._pool.join()
        for spec, result in list(self._pending.items()):
            self._settle(spec, result, CancelledError("the compile pool was stopped"))
