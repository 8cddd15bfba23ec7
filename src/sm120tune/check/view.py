"""What a server asks for and launches at every M, as far as a check can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sm120tune.check.resources import Use
from sm120tune.problem import MoEProblem
from sm120tune.tiles import TilePair


@dataclass(frozen=True)
class Span:
    """A range of M that is served by the same rows."""

    first: int
    last: int
    up_key: int | None
    """Key of the up row; None for the built-in default."""
    down_key: int | None
    pair: TilePair | None
    """None where the server stops: ``problem`` says how."""
    problem: str = ""
    gate_up: Use | None = None
    down: Use | None = None

    @property
    def label(self) -> str:
        """The range as text."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "first": self.first,
            "last": self.last,
            "up_key": self.up_key,
            "down_key": self.down_key,
            "gate_up": self.pair.gate_up.to_row() if self.pair else None,
            "down": self.pair.down.to_row() if self.pair else None,
            "problem": self.problem,
            "gate_up_use": self.gate_up.to_json() if self.gate_up else None,
            "down_use": self.down.to_json() if self.down else None,
        }


@dataclass(frozen=True)
class ServerView:
    """The two files that a server asks for, and what it runs at each M."""

    problem: MoEProblem
    device: str
    asked: tuple[str, str]
    sources: tuple[str, str]
    """Paths of the files that serve up and down, or "built-in default"; empty where the lookup itself fails."""
    spans: tuple[Span, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "problem": self.problem.to_json(),
            "device": self.device,
            "asked": list(self.asked),
            "sources": list(self.sources),
            "spans": [span.to_json() for span in self.spans],
        }
