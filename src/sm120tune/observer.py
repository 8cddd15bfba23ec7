"""What a run tells whoever watches it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from sm120tune.provenance import RowProvenance


@dataclass(frozen=True)
class Standing:
    """How the search at one M stands."""

    lane: str
    m: int
    told: int
    trials: int
    best_us: float | None
    today_us: float | None


class Observer(Protocol):
    """Every call returns at once; it runs in the runner's own thread."""

    def phase(self, name: str, total: int) -> None:
        """A phase begins; ``total`` is its number of steps."""

    def advance(self, steps: int = 1) -> None:
        """Steps of the phase are done, or with a negative number are not needed."""

    def standing(self, standing: Standing) -> None:
        """A trial ended."""

    def compiling(self, pending: int) -> None:
        """How many variants wait for a compiler."""

    def failures(self, counts: Counter[str]) -> None:
        """Failed candidates so far, by kind."""

    def row(self, row: RowProvenance) -> None:
        """One M is decided."""

    def event(self, text: str) -> None:
        """Something a person should know: a worker was replaced, for example."""


class Silent:
    """An observer that shows nothing."""

    def phase(self, name: str, total: int) -> None:
        """Ignore."""

    def advance(self, steps: int = 1) -> None:
        """Ignore."""

    def standing(self, standing: Standing) -> None:
        """Ignore."""

    def compiling(self, pending: int) -> None:
        """Ignore."""

    def failures(self, counts: Counter[str]) -> None:
        """Ignore."""

    def row(self, row: RowProvenance) -> None:
        """Ignore."""

    def event(self, text: str) -> None:
        """Ignore."""
