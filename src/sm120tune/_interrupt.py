"""Ctrl-C reaches a whole process group, but only the parent is to act on it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def started_without_interrupts() -> Iterator[None]:
    """Start threads and processes here that never get SIGINT, not even while they import.

    They inherit this thread's signal mask; a handler set by the process itself would come seconds too late.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # It unblocks SIGINT in passing: started later, on demand, it would do so unseen.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
