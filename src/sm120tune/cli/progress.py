"""Live progress on stderr: a small display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sm120tune.cli.report import row_line
from sm120tune.observer import Observer, Silent, Standing
from sm120tune.provenance import RowProvenance

_PLAIN_EVERY_S = 10.0


@contextmanager
def make_observer(console: Console, *, quiet: bool) -> Iterator[Observer]:
    """Yield the observer that suits the console."""
    if quiet:
        yield Silent()
    elif console.is_terminal:
        with LiveObserver(console) as live:
            yield live
    else:
        yield PlainObserver(console)


class _OnConsole:
    """What both displays do alike: rows and events are printed, the rest is kept for the next standing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending = 0
        self._failures: Counter[str] = Counter()

    def compiling(self, pending: int) -> None:
        """Remember for the next standing."""
        self._pending = pending

    def failures(self, counts: Counter[str]) -> None:
        """Remember for the next standing."""
        self._failures = counts

    def row(self, row: RowProvenance) -> None:
        """One M is decided."""
        self._console.print(row_line(row))

    def event(self, text: str) -> None:
        """Print at once."""
        self._console.print(text)


class PlainObserver(_OnConsole):
    """One line per phase, per decided M, per event, and a standing every ten seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._next = 0.0
        self._name = ""
        self._total = self._done = 0
        self._begin = time.monotonic()

    def phase(self, name: str, total: int) -> None:
        """A phase begins."""
        self._name, self._total, self._done = name, total, 0
        self._begin = time.monotonic()
        self._next = self._begin + _PLAIN_EVERY_S
        self._console.print(f"{name} ...")

    def advance(self, steps: int = 1) -> None:
        """Steps are done."""
        self._done += steps

    def standing(self, standing: Standing) -> None:
        """Print a standing if the last is old enough."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PLAIN_EVERY_S
        self._console.print(
            f"{self._name}: {self._done}/{self._total} trials{_left(self._begin, self._done, self._total)}; "
            f"{standing_text(standing)}; compiling {self._pending}{_failed(self._failures)}"
        )


class LiveObserver(_OnConsole):
    """A progress bar, one line per GPU and M, and what failed; rows and events scroll above."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("start", total=1)
        self._standings: dict[tuple[str, int], Standing] = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveObserver:
        self._live.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._live.stop()

    def phase(self, name: str, total: int) -> None:
        """A phase begins."""
        self._standings.clear()
        self._bar.reset(self._task, description=name, total=total or None)

    def advance(self, steps: int = 1) -> None:
        """Steps are done."""
        self._bar.advance(self._task, steps)

    def standing(self, standing: Standing) -> None:
        """Show the newest few."""
        key = (standing.lane, standing.m)
        self._standings.pop(key, None)
        self._standings[key] = standing

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, show_header=False)
        for standing in list(self._standings.values())[-6:]:
            table.add_row(Text(standing_text(standing)))
        return Group(self._bar, table, Text(f"compiling {self._pending}{_failed(self._failures)}"))


def standing_text(standing: Standing) -> str:
    """Return how one M stands, in one phrase."""
    best = "-" if standing.best_us is None else f"{standing.best_us:.1f}"
    today = "-" if standing.today_us is None else f"{standing.today_us:.1f}"
    return f"{standing.lane} M={standing.m}: {standing.told}/{standing.trials}, best {best} us, today {today} us"


def _left(begin: float, done: int, total: int) -> str:
    if not done or done >= total:
        return ""
    return f", about {(time.monotonic() - begin) * (total - done) / done:.0f} s left"


def _failed(counts: Counter[str]) -> str:
    return "; failures: " + ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items())) if counts else ""
