"""What was found of one tile at one M on the card: both GEMMs' times, and whether the layer comes out right."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sm120tune._jsonfile import LARGEST_INTEGER, Fields
from sm120tune.accuracy import ErrorMeasure, is_correct
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.lane import GemmTime
from sm120tune.measure.occupancy import StoredFacts, TileFacts
from sm120tune.measure.results import Measured, What
from sm120tune.problem import LARGEST, Gemm
from sm120tune.tiles import Tile

_PATH = re.compile(r"(?:[A-Za-z]:)?[/\\][^\s:'\"]+")
_LONGEST = 160
_DIGITS = 6


@dataclass(frozen=True)
class Checked:
    """The layer's output beside the float32 reference."""

    correct: bool
    relative: float
    """Norm of the difference over norm of the reference; infinite where the output is not finite."""

    @classmethod
    def of(cls, error: ErrorMeasure, dtype: str) -> Checked:
        """Judge an error by the bound of the layer's dtype."""
        return cls(is_correct(error, dtype), error.relative)


@dataclass(frozen=True)
class GemmResult:
    """One GEMM: its binary's resources, None where it could not be compiled, and its time or why there is none."""

    facts: StoredFacts | None
    time: Measured | Failure

    @classmethod
    def of(cls, facts: TileFacts | None, answer: GemmTime | Failure) -> GemmResult:
        """Keep what a lane answered; raises TypeError for an estimate, which is no measurement."""
        if not isinstance(answer, Measured | Failure):
            raise TypeError(f"{answer} was not measured")
        if isinstance(answer, Failure):
            answer = _shareable(answer)
        else:
            # As the file keeps them, so that its times give its constants again.
            answer = replace(answer, us=_short(answer.us), spread_us=_short(answer.spread_us))
        stored = None if facts is None else StoredFacts(facts.shared_bytes, facts.registers, facts.spill_bytes)
        return cls(stored, answer)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        facts = None
        if self.facts is not None:
            facts = [self.facts.shared_bytes, self.facts.registers, self.facts.spill_bytes]
        if isinstance(self.time, Failure):
            return {"facts": facts, "failure": self.time.to_json()}
        time = {
            "us": self.time.us,
            "spread_us": self.time.spread_us,
            "repetitions": self.time.repetitions,
            **({"at_least": True} if self.time.stopped_early else {}),
        }
        return {"facts": facts, **time}

    @classmethod
    def from_json(cls, data: object, gemm: Gemm, prefix: str) -> GemmResult:
        """Rebuild a result; raises ValueError naming the field."""
        fields = Fields(data, prefix)
        facts = None
        if fields.take("facts") is not None:
            numbers = fields.items("facts")
            sound = all(type(number) is int and 0 <= number <= LARGEST_INTEGER for number in numbers)
            if len(numbers) != len(_FACTS) or not sound:
                raise ValueError(f"{prefix}facts must be {', '.join(_FACTS)}, not {numbers!r:.60}")
            facts = StoredFacts(*numbers)
        if fields.has("failure"):
            result = cls(facts, _failure(fields.take("failure"), f"{prefix}failure."))
        else:
            us = fields.number("us")
            if us <= 0 or facts is None:
                raise ValueError(f"{prefix}us must be above 0 and have facts beside it, not {us}")
            early = fields.flag("at_least") if fields.has("at_least") else False
            spread, repetitions = fields.number("spread_us"), fields.integer("repetitions", least=1)
            if spread < 0:
                raise ValueError(f"{prefix}spread_us must be 0 or more, not {spread}")
            result = cls(facts, Measured(us, spread, repetitions, What(gemm.value), early))
        fields.finish()
        return result


_FACTS = ("shared bytes", "registers", "spill bytes")


@dataclass(frozen=True)
class TimedTile:
    """One tile at one M."""

    tile: Tile
    m: int
    gemms: Mapping[Gemm, GemmResult]
    check: Checked | Failure | None
    """None where it was not checked: a GEMM failed, or there is no card."""

    @property
    def wrong(self) -> bool:
        """Whether the layer came out wrong, or could not be checked although both GEMMs ran."""
        return isinstance(self.check, Failure) or (self.check is not None and not self.check.correct)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Everything that went wrong, a wrong result included."""
        found = [result.time for result in self.gemms.values() if isinstance(result.time, Failure)]
        if isinstance(self.check, Failure):
            found.append(self.check)
        elif self.check is not None and not self.check.correct:
            found.append(Failure(FailureKind.WRONG_RESULT, f"relative error {self.check.relative:.3g}"))
        return tuple(found)

    def usable(self) -> dict[Gemm, tuple[StoredFacts, float]]:
        """Return resources and µs of the GEMMs that a fit may take: timed to the end, and not known to be wrong."""
        if self.wrong:
            return {}
        return {
            gemm: (result.facts, result.time.us)
            for gemm, result in self.gemms.items()
            if isinstance(result.time, Measured) and not result.time.stopped_early and result.facts is not None
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        check: dict[str, Any] | None = None
        if isinstance(self.check, Failure):
            check = {"failure": self.check.to_json()}
        elif self.check is not None:
            error = self.check.relative
            check = {"correct": self.check.correct, "error": _short(error) if math.isfinite(error) else None}
        times = {gemm.value: result.to_json() for gemm, result in self.gemms.items()}
        return {"tile": self.tile.to_row(), "m": self.m, **times, "check": check}

    @classmethod
    def from_json(cls, data: object, prefix: str = "") -> TimedTile:
        """Rebuild a tile's results; raises ValueError naming the field."""
        fields = Fields(data, prefix)
        tile, m = Tile.from_row(fields.mapping("tile")), fields.integer("m", least=1, most=LARGEST)
        gemms = {gemm: GemmResult.from_json(fields.take(gemm.value), gemm, f"{prefix}{gemm.value}.") for gemm in Gemm}
        result = cls(tile, m, gemms, _check(fields.take("check"), f"{prefix}check."))
        fields.finish()
        return result


def _check(data: object, prefix: str) -> Checked | Failure | None:
    if data is None:
        return None
    fields = Fields(data, prefix)
    if fields.has("failure"):
        return _failure(fields.take("failure"), f"{prefix}failure.")
    error = fields.optional_number("error")
    return Checked(fields.flag("correct"), math.inf if error is None else error)


def _failure(data: object, prefix: str) -> Failure:
    fields = Fields(data, prefix)
    try:
        return Failure(FailureKind(fields.text("kind")), fields.text("message"))
    except ValueError as error:
        raise ValueError(f"{prefix}kind: {error}") from None


def _shareable(failure: Failure) -> Failure:
    """Shorten a message and take out paths: the file is passed on, and a path names its owner."""
    return Failure(failure.kind, _PATH.sub("…", failure.message)[:_LONGEST])


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
