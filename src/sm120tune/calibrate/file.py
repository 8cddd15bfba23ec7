"""The calibration file: one JSON object with everything that was measured and the constants that came of it.

docs/calibrate.md lists the fields. Nothing in it names a machine or a person.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sm120tune._jsonfile import Fields, read_object
from sm120tune.calibrate.timed import TimedTile
from sm120tune.devices import DeviceSpec
from sm120tune.errors import UserError
from sm120tune.measure.correction import Correction
from sm120tune.measure.cost_constants import CardClass, Constants, MeasuredMargins, class_names, formula_version
from sm120tune.problem import MoEProblem
from sm120tune.provenance import problem_from_json

SCHEMA_VERSION = 1
_KIND = "sm120tune calibration"
_DIGEST = 8


@dataclass(frozen=True)
class Origin:
    """Where the times come from."""

    tool_version: str
    date: str
    timer: str
    """``cuda``, or ``replay`` for a rehearsal on a recorded table."""
    device: DeviceSpec
    driver: str
    clocks: Mapping[str, float] | None
    """What nvidia-smi said in the midst of the work; None where it did not."""
    versions: Mapping[str, str]
    kernel_source_hash: str
    problem: MoEProblem
    routing: str
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        device = asdict(self.device)
        return {
            **{entry.name: getattr(self, entry.name) for entry in fields(self)},
            "device": {**device, "capability": list(self.device.capability)},
            "clocks": None if self.clocks is None else dict(self.clocks),
            "versions": dict(self.versions),
            "problem": self.problem.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> Origin:
        """Rebuild it; raises ValueError naming the field."""
        file = Fields(data, "origin.")
        clocks = None
        if file.take("clocks") is not None:
            given = file.mapping("clocks")
            clocks = {key: Fields(given, "origin.clocks.").number(key) for key in given}
        versions = file.mapping("versions")
        result = cls(
            tool_version=file.text("tool_version"),
            date=file.text("date"),
            timer=file.text("timer"),
            device=DeviceSpec.from_json(file.mapping("device")),
            driver=file.text("driver"),
            clocks=clocks,
            versions={key: Fields(versions, "origin.versions.").text(key) for key in versions},
            kernel_source_hash=file.text("kernel_source_hash"),
            problem=problem_from_json(file.take("problem"), "origin.problem."),
            routing=file.text("routing"),
            seed=file.integer("seed"),
        )
        file.finish()
        return result


@dataclass(frozen=True)
class Model:
    """The constants, and what they were before."""

    formula: str
    start: str
    """The class that the fit began with."""
    start_version: str
    constants: Constants
    refitted: tuple[str, ...]
    left: Mapping[str, str]
    """Of each constant of a GEMM that kept its class's value: why."""
    correction: Correction | None
    """The class's."""
    margins: tuple[tuple[int, float], ...]
    """(M, error at the 90th percentile on unseen tiles near the best)."""

    @property
    def digest(self) -> str:
        """What tells these estimates from others."""
        content = {key: value for key, value in self.to_json().items() if key not in {"left", "refitted"}}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGEST]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {
            "formula": self.formula,
            "start": self.start,
            "start_version": self.start_version,
            "constants": {name: float(f"{value:.6g}") for name, value in asdict(self.constants).items()},
            "refitted": list(self.refitted),
            "left": dict(self.left),
            "correction": None if self.correction is None else self.correction.to_json(),
            "margins": [list(margin) for margin in self.margins],
        }

    @classmethod
    def from_json(cls, data: object) -> Model:
        """Rebuild it; raises ValueError naming the field."""
        file = Fields(data, "model.")
        formula, start = file.text("formula"), file.text("start")
        if formula != formula_version():
            raise ValueError(f"model.formula is {formula}, this release's is {formula_version()}: calibrate again")
        if start not in class_names():
            raise ValueError(f"model.start must be one of {', '.join(class_names())}, not {start!r}")
        left = file.mapping("left")
        result = cls(
            formula=formula,
            start=start,
            start_version=file.text("start_version"),
            constants=_constants(file.mapping("constants")),
            refitted=tuple(_names(file.items("refitted"))),
            left={key: Fields(left, "model.left.").text(key) for key in left},
            correction=_correction(file.take("correction")),
            margins=_margins(file.items("margins")),
        )
        file.finish()
        if result.refitted and not result.margins:
            raise ValueError("model.margins is empty beside refitted constants")
        return result

    def card_class(self, of_class: CardClass, dtype: str) -> CardClass:
        """Return the class of this one card; ``of_class`` has the margins where none was measured."""
        measured = MeasuredMargins(dtype, self.margins)
        return CardClass(f"{self.start} calibrated", self.constants, self.correction, of_class.margins, measured)


@dataclass(frozen=True)
class Calibration:
    """A whole file."""

    origin: Origin
    model: Model
    quality: Mapping[str, Any] | None
    """Before and after, over all M and for each; None where too few tiles could be timed to fit anything."""
    times: tuple[TimedTile, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {
            "kind": _KIND,
            "schema_version": SCHEMA_VERSION,
            "origin": self.origin.to_json(),
            "model": self.model.to_json(),
            "quality": None if self.quality is None else dict(self.quality),
            "times": [one.to_json() for one in self.times],
        }

    @classmethod
    def from_json(cls, data: object) -> Calibration:
        """Rebuild a calibration; raises ValueError naming the field."""
        file = Fields(data)
        if not file.has("kind") or file.take("kind") != _KIND:
            raise ValueError(f'it has no "kind": "{_KIND}"')
        if (schema := file.integer("schema_version")) != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {schema}; this release reads {SCHEMA_VERSION}")
        quality = None if file.take("quality") is None else file.mapping("quality")
        result = cls(
            Origin.from_json(file.take("origin")),
            Model.from_json(file.take("model")),
            quality,
            tuple(TimedTile.from_json(one, f"times[{index}].") for index, one in enumerate(file.items("times"))),
        )
        file.finish()
        return result

    def dumps(self) -> str:
        """Render with one line for each tile and M, so that the file stays short and two can be compared."""
        document = self.to_json()
        times = ",\n".join(f"  {json.dumps(one, allow_nan=False)}" for one in document.pop("times"))
        head = json.dumps(document, indent=1, allow_nan=False)
        return f'{head[:-2]},\n "times": [\n{times}\n ]\n}}\n'


def read_calibration(path: Path, named: str) -> Calibration:
    """Read a file; raises UserError that calls it ``named``, says what is wrong with it and what to do."""
    try:
        return Calibration.from_json(read_object(path))
    except OSError as error:
        raise UserError(f"{named} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{named} is no calibration that can be used: {error}") from None


def _constants(given: Mapping[str, Any]) -> Constants:
    file = Fields(dict(given), "model.constants.")
    values = {entry.name: file.number(entry.name) for entry in fields(Constants)}
    file.finish()
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"model.constants.{name} must be above 0, not {value}")
    return Constants(**values)


def _names(given: list[Any]) -> list[str]:
    known = {entry.name for entry in fields(Constants)}
    for name in given:
        if name not in known:
            raise ValueError(f"model.refitted has {name!r}, which is no constant")
    return given


def _margins(given: list[Any]) -> tuple[tuple[int, float], ...]:
    for one in given:
        number = isinstance(one, list) and len(one) == 2 and type(one[0]) is int and isinstance(one[1], int | float)
        if not number or one[0] < 1 or not 0 <= one[1] < float("inf"):
            raise ValueError(f"model.margins must be pairs of M and an error, not {one!r:.60}")
    sizes = [m for m, _ in given]
    if sizes != sorted(set(sizes)):
        raise ValueError("model.margins must have ascending M")
    return tuple((m, float(error)) for m, error in given)


_CORRECTION = ("mean", "scale", "weights")


def _correction(data: object) -> Correction | None:
    if data is None:
        return None
    file = Fields(data, "model.correction.")
    parts = {}
    for name in _CORRECTION:
        parts[name] = file.items(name)
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in parts[name]):
            raise ValueError(f"model.correction.{name} must be numbers")
    size = len(parts["mean"])
    if len(parts["scale"]) != size or len(parts["weights"]) != 1 + size + size * (size + 1) // 2 or size != _FEATURES:
        raise ValueError("model.correction has the wrong sizes")
    file.finish()
    return Correction.from_json(parts)


_FEATURES = 12
"""Columns of :func:`sm120tune.measure.cost_terms.features`."""
