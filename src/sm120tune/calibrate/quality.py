"""How wrong a model is on measured times: errors, order, and what trusting its choice would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np
import numpy.typing as npt

from sm120tune.calibrate.launches import Launches

Array = npt.NDArray[np.float64]

FIRST = 5
"""How many of the model's first tiles are tried for :attr:`Quality.best_of_5`."""


@dataclass(frozen=True)
class Quality:
    """Of a model's times beside the measured ones."""

    median: float
    """Relative error."""
    p90: float
    """The same at the 90th percentile."""
    rank_correlation: float
    """Spearman's within one GEMM at one M, mean."""
    first: float
    """Time of the model's first tile over that of the best measured one, within one GEMM at one M, geometric mean."""
    best_of_5: float
    """The same of the best of the model's first 5."""
    launches: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, figures at four digits."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def quality(launches: Launches, us: Array, predicted: Array) -> Quality:
    """Return the quality over all launches."""
    error = np.abs(predicted / us - 1)
    orders, firsts, fives = [], [], []
    for here in groups(launches):
        if here.sum() > 1:
            orders.append(spearman(predicted[here], us[here]))
        ranked = us[here][np.argsort(predicted[here], kind="stable")]
        firsts.append(float(ranked[0] / ranked.min()))
        fives.append(float(ranked[:FIRST].min() / ranked.min()))
    return Quality(
        median=float(np.median(error)),
        p90=float(np.quantile(error, 0.9)),
        rank_correlation=float(np.mean(orders)) if orders else 1.0,
        first=geometric_mean(firsts),
        best_of_5=geometric_mean(fives),
        launches=len(us),
    )


def groups(launches: Launches) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield a mask for each GEMM at each M."""
    keys = [(one.m, one.gemm) for one in launches.each]
    for key in sorted(set(keys)):
        yield np.array([other == key for other in keys])


def left_out(parts: Sequence[npt.NDArray[np.bool_]], predict: Callable[[npt.NDArray[np.bool_]], Array]) -> Array:
    """Return times of every launch, each by a fit without its part; ``predict`` takes the mask of what is fitted."""
    predicted = np.zeros(len(parts[0]))
    for part in parts:
        predicted[part] = predict(~part)[part]
    return predicted


def spearman(one: Array, other: Array) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank, constants correlate with nothing."""
    a, b = _ranks(one), _ranks(other)
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Array) -> Array:
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    # Tiles that differ in GROUP_SIZE_M alone have equal predictions.
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.bincount(inverse, ranks) / counts)[inverse])
