"""Compile in parallel on the CPU; a candidate that crashes or hangs costs its process, never the run."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any, Protocol

from pebble import ProcessExpired, ProcessPool

from sm120tune.compiler.build import compile_facts, use_cache_folder
from sm120tune.compiler.cache import CompileCache, Outcome
from sm120tune.compiler.spec import CompileSpec
from sm120tune.failures import Failure, FailureKind

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

    def submit(self, spec: CompileSpec) -> Future[Outcome]:
        """Return a future of the outcome; it never raises, a failure is an outcome."""

    def stop(self) -> None:
        """End at once."""


def _start_worker(triton_folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    use_cache_folder(triton_folder)


class CompilePool:
    """A pool of compile processes in front of the cache of outcomes."""

    def __init__(self, cache: CompileCache, workers: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._cache = cache
        self._timeout_s = timeout_s
        self.compiled = 0
        """Variants that were compiled rather than found in the cache."""
        self._pending: dict[CompileSpec, Future[Outcome]] = {}
        self._pool = ProcessPool(
            max_workers=workers,
            max_tasks=_TASKS_PER_PROCESS,
            initializer=_start_worker,
            initargs=(cache.triton_folder,),
            context=multiprocessing.get_context("spawn"),
        )

    @property
    def pending(self) -> int:
        """Variants that are waiting or being compiled."""
        return len(self._pending)

    def submit(self, spec: CompileSpec) -> Future[Outcome]:
        """Return a future of the outcome; it never raises, a failure is an outcome.

        A known variant answers at once, and one that is already on its way is not compiled twice. Call from one
        thread only.
        """
        known = self._cache.get(spec)
        if known is not None:
            done: Future[Outcome] = Future()
            done.set_result(known)
            return done
        pending = self._pending.get(spec)
        if pending is not None:
            return pending
        result: Future[Outcome] = Future()
        # A waiter that is cancelled must not cancel what others wait for too.
        result.set_running_or_notify_cancel()
        self._pending[spec] = result
        self.compiled += 1
        task = self._pool.schedule(compile_facts, args=[spec], timeout=self._timeout_s)
        task.add_done_callback(lambda done: self._finish(spec, done, result))
        return result

    def _finish(self, spec: CompileSpec, task: Future[Any], result: Future[Outcome]) -> None:
        outcome: Outcome
        try:
            outcome = task.result()
        except TimeoutError:
            outcome = Failure(FailureKind.COMPILE_TIMEOUT, f"not compiled within {self._timeout_s:g} s")
        except ProcessExpired as error:
            outcome = Failure(FailureKind.COMPILE_CRASH, f"the compiler process died (exit code {error.exitcode})")
        except BaseException as error:
            self._pending.pop(spec, None)
            result.set_exception(error)
            return
        self._cache.put(spec, outcome)
        self._pending.pop(spec, None)
        result.set_result(outcome)

    def stop(self) -> None:
        """End every process at once; what was not finished stays uncompiled."""
        self._pool.stop()
        self._pool.join()
