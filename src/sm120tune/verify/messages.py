"""What the parent asks of the child and what it answers, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sm120tune.accuracy import ErrorMeasure
from sm120tune.problem import MoEProblem

REPEATS = 3
"""A pair is slower where it is in every one of them."""

ROUNDS = 15


@dataclass(frozen=True)
class Request:
    """One pair to run."""

    package: str
    """The ``sglang`` package folder."""
    preload: str | None
    problem: MoEProblem
    routing: str
    batch_sizes: tuple[int, ...]
    seed: int
    copies: int
    """Of the weights."""
    without: str | None
    """The SGLANG_MOE_CONFIG_DIR without the pair; None for SGLang's own tree."""
    with_pair: str | None
    rounds: int = ROUNDS

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {**vars(self), "problem": self.problem.to_json(), "batch_sizes": list(self.batch_sizes)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        """Rebuild a request."""
        problem, sizes = MoEProblem.from_json(data["problem"]), tuple(data["batch_sizes"])
        return cls(**{**data, "problem": problem, "batch_sizes": sizes})


@dataclass(frozen=True)
class Side:
    """What one folder of configs came to at one M."""

    repeats: tuple[tuple[float, ...], ...] = ()
    """µs per call: one sample a round, in rounds that both sides share; empty where the call fails."""
    error: ErrorMeasure | None = None
    """Against the reference, on fresh data."""
    said: tuple[str, ...] = ()
    """SGLang's own log lines on its configs."""
    up_rows: dict[int, dict[str, Any]] | None = None
    """What its lookup holds; None for the built-in default."""
    down_rows: dict[int, dict[str, Any]] | None = None
    failure: str = ""

    @property
    def samples(self) -> list[float]:
        """The samples of all repeats."""
        return [sample for repeat in self.repeats for sample in repeat]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {**vars(self), "error": None if self.error is None else vars(self.error)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Side:
        """Rebuild a side; JSON has made texts of the keys of rows."""
        rows = {
            name: None if data[name] is None else {int(m): row for m, row in data[name].items()}
            for name in ("up_rows", "down_rows")
        }
        error = None if data["error"] is None else ErrorMeasure(**data["error"])
        repeats = tuple(tuple(samples) for samples in data["repeats"])
        return cls(**{**data, **rows, "error": error, "repeats": repeats, "said": tuple(data["said"])})


@dataclass(frozen=True)
class Answer:
    """Both sides at one M."""

    m: int
    without: Side = field(default_factory=Side)
    with_pair: Side = field(default_factory=Side)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {"m": self.m, "without": self.without.to_json(), "with_pair": self.with_pair.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        """Rebuild an answer."""
        return cls(data["m"], Side.from_json(data["without"]), Side.from_json(data["with_pair"]))
