"""A small learned correction on top of the formula: ridge regression on what the formula left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_LARGEST = 0.25
"""In logarithms: the formula stays in charge where the regression would leave what it was fitted on."""
_FAR = 2.5
"""Standard deviations at which a feature is cut off, for the same reason."""


@dataclass(frozen=True)
class Correction:
    """``log(measured / formula)`` as a quadratic function of standardized features.

    The features are those of :func:`sm120tune.measure.cost_terms.features`: the tile's sizes, its occupancy, and how
    the formula's terms compare. ``mean`` and ``scale`` hold one value a feature, ``weights`` one a column of
    :func:`columns`.
    """

    mean: Array
    scale: Array
    weights: Array

    def factor(self, features: Array) -> Array:
        """Return what the formula's times are to be multiplied with; ``features`` is ``[rows, features]``."""
        log_factor = columns(features, self.mean, self.scale) @ self.weights
        return np.asarray(np.exp(np.clip(log_factor, -_LARGEST, _LARGEST)))

    @classmethod
    def fit(cls, features: Array, log_ratio: Array, weight: Array, ridge: float) -> Correction:
        """Fit by weighted ridge regression; ``ridge`` is the penalty on squared weights, a row."""
        mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-9
        x = columns(features, mean, scale)
        normal = x.T @ (x * weight[:, None]) + ridge * len(x) * np.eye(x.shape[1])
        target = np.clip(log_ratio, -2 * _LARGEST, 2 * _LARGEST)
        weights = np.linalg.solve(normal, x.T @ (weight * target))
        return cls(mean, scale, np.asarray(weights, dtype=np.float64))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, numbers at six digits."""
        return {name: [float(f"{v:.6g}") for v in getattr(self, name)] for name in ("mean", "scale", "weights")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Correction:
        """Rebuild a correction from :meth:`to_json`."""
        return cls(*(np.array(data[name], dtype=np.float64) for name in ("mean", "scale", "weights")))


def columns(features: Array, mean: Array, scale: Array) -> Array:
    """Return ``[rows, 1 + n + n(n+1)/2]``: a constant, the standardized features, and all products of two."""
    z = np.clip((features - mean) / scale, -_FAR, _FAR)
    first, second = np.triu_indices(z.shape[1])
    return np.column_stack([np.ones(len(z)), z, z[:, first] * z[:, second]])
