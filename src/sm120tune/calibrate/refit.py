"""From the times of a file to this release's constants: times stay good where the formula changes."""

from __future__ import annotations

from collections.abc import Callable

from sm120tune.calibrate.assess import LEAST_TILES, Assessment, assess
from sm120tune.calibrate.file import Calibration, CalibrationFile, Origin, unusable
from sm120tune.calibrate.fitted import Model, rounded
from sm120tune.calibrate.launches import Layer
from sm120tune.calibrate.timed import TimedTile
from sm120tune.errors import UserError
from sm120tune.measure.cost_constants import CardClass, class_names, formula_version, model_version, named_class
from sm120tune.measure.occupancy import blocks_per_sm
from sm120tune.measure.routing import parse_routing

_LEAST_US, _MOST_US = 0.1, 1e9


def usable_calibration(file: CalibrationFile, tell: Callable[[str], None]) -> Calibration:
    """Return a file's calibration; one of another formula is fitted again, in memory, and ``tell`` is told so.

    Raises UserError where its model is damaged, or its times cannot be fitted.
    """
    if file.formula == formula_version():
        return file.calibration()
    found, _ = fit_again(file, start_of(file))
    count = sum(len(one.usable()) for one in file.times)
    tell(
        f"{file.named} was made by formula {file.formula}: its {count} times were fitted again by this release's "
        f"{formula_version()}; calibrate --from-times writes that"
    )
    return found


def start_of(file: CalibrationFile) -> CardClass:
    """Return this release's class of the name that a file's fit began with; raises UserError where it has none."""
    if file.start not in class_names():
        raise UserError(
            f"{file.named} was fitted from class {file.start!r}, which this release does not have; "
            f"calibrate --from-times with --from-class {' or '.join(class_names())} fits its times again"
        )
    return named_class(file.start)


def fit_again(file: CalibrationFile, start: CardClass) -> tuple[Calibration, Assessment]:
    """Fit this release's constants to a file's times.

    Raises UserError for times that are too few, or that no launch on the file's own card can have taken.
    """
    origin = file.origin
    try:
        layer = Layer(origin.problem, origin.device, parse_routing(origin.routing))
        _check(file.times, layer)
        assessment = assess(file.times, layer, start)
    except (UserError, ValueError) as error:
        raise unusable(file.named, error) from None
    if assessment.overall is None:
        raise unusable(file.named, f"it has times of fewer than {LEAST_TILES} tiles, too few to fit; calibrate again")
    return made(origin, file.times, assessment, start), assessment


def made(origin: Origin, times: tuple[TimedTile, ...], assessment: Assessment, start: CardClass) -> Calibration:
    """Return the calibration that a fit comes to."""
    model = Model(
        formula=formula_version(),
        start=start.name,
        start_version=model_version(),
        constants=rounded(assessment.fitted.constants),
        refitted=assessment.fitted.refitted,
        left=assessment.reasons,
        correction=start.correction,
        margins=assessment.margins,
    )
    quality = None
    if assessment.overall is not None:
        quality = {
            "all": assessment.overall.to_json(),
            "by_m": {str(m): one.to_json() for m, one in assessment.by_m.items()},
        }
    return Calibration(origin, model, quality, times)


def _check(times: tuple[TimedTile, ...], layer: Layer) -> None:
    """Raise ValueError for what a measurement cannot have left: a file may come from anyone."""
    for index, one in enumerate(times):
        for gemm, (facts, us) in one.usable().items():
            held, lacks = blocks_per_sm(one.tile, layer.device, facts)
            if not held:
                raise ValueError(f"times[{index}].{gemm.value}.facts do not fit on the card that it names ({lacks})")
            if not _LEAST_US <= us <= _MOST_US:
                raise ValueError(f"times[{index}].{gemm.value}.us is {us:g}, which no launch takes")
