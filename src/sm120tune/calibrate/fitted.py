"""The part of a calibration file that estimates are made with: constants, their class's correction, margins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sm120tune._jsonfile import Fields, is_finite
from sm120tune.calibrate.fit import limits
from sm120tune.measure.correction import Correction
from sm120tune.measure.cost_constants import (
    CardClass,
    Constants,
    MeasuredMargins,
    class_names,
    formula_version,
    named_class,
)
from sm120tune.measure.cost_terms import FEATURES
from sm120tune.problem import LARGEST


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
    """(M, error that nine of ten launches of unseen tiles stay within); :func:`sm120tune.calibrate.assess.margin`."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {
            "formula": self.formula,
            "start": self.start,
            "start_version": self.start_version,
            "constants": asdict(self.constants),
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
            raise ValueError(f"model.formula is {formula}, this release's is {formula_version()}")
        if start not in class_names():
            raise ValueError(f"model.start must be one of {', '.join(class_names())}, not {start!r}")
        left = file.mapping("left")
        result = cls(
            formula=formula,
            start=start,
            start_version=file.text("start_version"),
            constants=_constants(file.mapping("constants"), named_class(start)),
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


def rounded(constants: Constants) -> Constants:
    """Return constants as a file keeps them, so that it gives the estimates that its fit gave."""
    return Constants(**{name: float(f"{value:.6g}") for name, value in asdict(constants).items()})


def _constants(given: Mapping[str, Any], of_class: CardClass) -> Constants:
    file = Fields(dict(given), "model.constants.")
    values = {entry.name: file.number(entry.name) for entry in fields(Constants)}
    file.finish()
    for name, value in values.items():
        low, high = limits(name, getattr(of_class.constants, name))
        if not low * (1 - _ROUNDING) <= value <= high * (1 + _ROUNDING):
            raise ValueError(f"model.constants.{name} must be from {low:g} to {high:g}, not {value:g}")
    return Constants(**values)


def _names(given: list[Any]) -> list[str]:
    known = [entry.name for entry in fields(Constants)]
    for name in given:
        # Compared one by one: what a file holds need not be hashable.
        if name not in known:
            raise ValueError(f"model.refitted has {name!r:.60}, which is no constant")
    return given


def _margins(given: list[Any]) -> tuple[tuple[int, float], ...]:
    for one in given:
        numbers = isinstance(one, list) and len(one) == 2 and type(one[0]) is int and is_finite(one[1])
        if not numbers or not 1 <= one[0] <= LARGEST or not 0 <= one[1] <= _MOST_ERROR:
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
        if not all(is_finite(value) for value in parts[name]):
            raise ValueError(f"model.correction.{name} must be numbers")
    size = len(parts["mean"])
    if len(parts["scale"]) != size or len(parts["weights"]) != 1 + size + size * (size + 1) // 2 or size != FEATURES:
        raise ValueError("model.correction has the wrong sizes")
    if not all(0 < scale < _HUGE for scale in parts["scale"]):
        raise ValueError(f"model.correction.scale must be above 0 and below {_HUGE:g}")
    if not all(abs(value) < _HUGE for value in (*parts["mean"], *parts["weights"])):
        raise ValueError(f"model.correction.mean and weights must lie within {_HUGE:g}")
    file.finish()
    return Correction.from_json(parts)


_HUGE = 1e6
"""Far beyond any feature or weight; what is larger overflows to times that are no numbers."""
_MOST_ERROR = 100.0
"""A model that is off by this factor says nothing; no fit leaves so much."""
_ROUNDING = 1e-5
"""Numbers are kept at six digits."""
