"""From measured times to constants, and to what they are worth on launches that they were not fitted on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sm120tune.calibrate.fit import OF_GEMMS, TOLD, Fit, fit, weights
from sm120tune.calibrate.launches import Launch, Launches, Layer, launches_of
from sm120tune.calibrate.quality import Array, Quality, left_out, quality
from sm120tune.calibrate.timed import TimedTile
from sm120tune.measure.cost_constants import CardClass
from sm120tune.measure.occupancy import binary_key

FOLDS = 5
LEAST_TILES = 10
"""Tiles with times below which nothing is fitted."""
COVERED, CONFIDENCE = 0.9, 0.9
"""A margin is to hold for this share of launches, and the times are to say so with this confidence."""
_NOTHING = 0.01


@dataclass(frozen=True)
class Compared:
    """Before: the class's constants. After: fits without what they predict, by tile and by M."""

    before: Quality
    unseen_tiles: Quality
    unseen_m: Quality

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "before": self.before.to_json(),
            "unseen_tiles": self.unseen_tiles.to_json(),
            "unseen_m": self.unseen_m.to_json(),
        }


@dataclass(frozen=True)
class Assessment:
    """What a calibration comes to."""

    fitted: Fit
    reasons: Mapping[str, str]
    """Of every constant that kept its class's value: why."""
    overall: Compared | None
    """None where there were too few times."""
    by_m: Mapping[int, Compared]
    margins: tuple[tuple[int, float], ...]
    """(M, error that the launches of unseen tiles stay within: :func:`margin`), the same at every M."""


def assess(timed: Sequence[TimedTile], layer: Layer, start: CardClass) -> Assessment:
    """Fit, and predict every tile by a fit without it, and every M likewise.

    Raises UserError for an M that cannot be routed.
    """
    launches, us = usable_launches(timed, layer)
    keys = [binary_key(one.tile) for one in launches.each]
    tiles = list(dict.fromkeys(keys))
    few = f"fewer than {LEAST_TILES} tiles could be timed"
    if len(tiles) < LEAST_TILES:
        return _nothing(start, few)
    weight = weights(launches, us)

    def predict(shown: npt.NDArray[np.bool_]) -> Array:
        found = fit(launches.where(shown), us[shown], weight[shown], start)
        return launches.us(found.constants, start.correction)

    before = launches.us(start.constants, start.correction)
    fold_of = np.array([tiles.index(key) % FOLDS for key in keys])
    unseen_tiles = left_out([fold_of == fold for fold in range(FOLDS)], predict)
    sizes = np.array([one.m for one in launches.each])
    each_m = sorted(set(sizes.tolist()))
    unseen_m = left_out([sizes == m for m in each_m], predict) if len(each_m) > 1 else unseen_tiles

    def compared(chosen: npt.NDArray[np.bool_]) -> Compared:
        shown = launches.where(chosen)
        return Compared(*(quality(shown, us[chosen], one[chosen]) for one in (before, unseen_tiles, unseen_m)))

    found = fit(launches, us, weight, start)
    reasons = _reasons(found)
    if _loss(unseen_tiles, us, weight) >= _loss(before, us, weight):
        reasons = dict.fromkeys(OF_GEMMS, "fits did not predict unseen tiles better than the class's constants")
        found = replace(found, constants=start.constants, refitted=())
        unseen_tiles = unseen_m = before
    return Assessment(
        found,
        reasons,
        compared(np.ones(len(us), dtype=bool)),
        {m: compared(sizes == m) for m in each_m},
        tuple((m, margin(unseen_tiles / us)) for m in each_m),
    )


def usable_launches(timed: Sequence[TimedTile], layer: Layer) -> tuple[Launches, Array]:
    """Return the launches that a fit may take, and their µs."""
    each, us = [], []
    for one in timed:
        for gemm, (facts, time) in one.usable().items():
            each.append(Launch(gemm, one.tile, one.m, facts))
            us.append(time)
    return launches_of(each, layer.problem, layer.device, layer.routing), np.array(us)


def _nothing(start: CardClass, why: str) -> Assessment:
    nothing = Fit(start.constants, dict.fromkeys(OF_GEMMS, 0.0), ())
    return Assessment(nothing, dict.fromkeys(OF_GEMMS, why), None, {}, ())


def _reasons(found: Fit) -> dict[str, str]:
    reasons = {}
    for name in OF_GEMMS:
        if name not in found.refitted:
            little = f"the times tell less than {TOLD:.0%} of it"
            reasons[name] = little if found.told[name] > _NOTHING else "the times do not depend on it"
    return reasons


def _loss(predicted: Array, us: Array, weight: Array) -> float:
    """Return the weighted mean of the squared logarithmic error."""
    return float(np.average(np.log(predicted / us) ** 2, weights=weight))


def margin(ratio: Array) -> float:
    """Return the error that 90 % of launches stay within, with a confidence of 90 %; ``ratio`` is model over measured.

    The upper tolerance limit that needs no distribution: the order statistic ``k`` of ``n`` errors with
    ``P(Binomial(n, COVERED) < k) >= CONFIDENCE`` (Wilks, Annals of Mathematical Statistics 12, 1941; NIST/SEMATECH
    e-Handbook 7.2.6.4), the largest where so few errors tell no more.
    """
    error = np.sort(np.abs(ratio - 1))
    n, below, k = len(error), 0.0, 0
    while below < CONFIDENCE and k < n:
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        below += math.exp(ways + k * math.log(COVERED) + (n - k) * math.log(1 - COVERED))
        k += 1
    return round(float(error[k - 1]), 4)
