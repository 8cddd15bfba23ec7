"""What a timer is asked for and what it answers; a measurement and an estimate are different types."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sm120tune.problem import Gemm
from sm120tune.tiles import Tile, TilePair


class What(enum.StrEnum):
    """What a time covers."""

    GATE_UP = "gate_up"
    DOWN = "down"
    CHAIN = "chain"
    """gate_up, activation and down back to back, as SGLang launches them."""


@dataclass(frozen=True)
class Measured:
    """A time taken on a GPU."""

    us: float
    """Median microseconds of one launch (of the three launches for a chain)."""
    spread_us: float
    """Half the distance between the quartiles of the repeats."""
    repetitions: int
    what: What
    stopped_early: bool = False
    """Far beyond the best, so it was timed once and the figure is rough."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {
            "us": self.us,
            "spread_us": self.spread_us,
            "repetitions": self.repetitions,
            "what": self.what.value,
            "stopped_early": self.stopped_early,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        """Rebuild a measurement."""
        return cls(**{**data, "what": What(data["what"])})


@dataclass(frozen=True)
class Estimated:
    """A time that a model expects; it was never measured."""

    us: float
    bound: str
    """What limits the launch, in the model's words."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {"us": self.us, "bound": self.bound}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Estimated:
        """Rebuild an estimate."""
        return cls(**data)


@dataclass(frozen=True)
class GemmRequest:
    """Time one GEMM of the layer with one tile at one M."""

    m: int
    gemm: Gemm
    tile: Tile
    stop_above_us: float | None = None
    """Give up repeating beyond this time: the tile cannot win."""


@dataclass(frozen=True)
class RaceRequest:
    """Time the chains of several pairs, interleaved, at one M."""

    m: int
    pairs: tuple[TilePair, ...]
    rounds: int


@dataclass(frozen=True)
class RaceLane:
    """One pair's chain times in a race, µs per call, one per round; rounds are common to all lanes."""

    pair: TilePair
    samples_us: tuple[float, ...]


@dataclass(frozen=True)
class VerifyRequest:
    """Run one pair's chain on fresh data and compare it with the reference."""

    m: int
    pair: TilePair
    seed: int


def half_quartile_distance(samples: Sequence[float]) -> float:
    """Return half the interquartile range of the samples, 0 for a single one."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2
