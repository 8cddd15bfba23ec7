"""Fit a card's constants to a few measured times: damped least squares in log space, held to the class's constants.

What is minimized over the logarithms x of the free constants, starting at the class's x0:

    sum over launches of w * rho(log(model / measured) / NOISE)  +  sum over constants of ((x - x0) / PRIOR)²

``w`` falls with how far a tile is from the fastest of its GEMM and M; ``rho`` is quadratic up to ``EDGE`` and linear
beyond (Huber's), by reweighting. The second sum keeps what the times do not tell at the class's value: that is the
posterior mode of a Gaussian prior, so the curvature at the end says which constants the times did tell. Those they
did not are set back and the others are fitted once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sm120tune.calibrate.launches import Launches
from sm120tune.measure.cost_constants import LIMITS, CardClass, Constants

Array = npt.NDArray[np.float64]

OF_GEMMS = (
    "launch_us", "bandwidth_share", "short_row_loss", "short_row_growth", "tensor_share", "tensor_share_wgmma",
    "tensor_share_fp8", "shared_gb_s", "l2_gb_s", "short_row_l2", "l2_held_share", "load_us", "load_us_per_16k",
    "serial_share", "scale_us", "rescale_g_s", "block_us", "store_us", "spill_bytes_that_double", "overlap",
    "step_overlap",
)  # fmt: skip
"""Constants that a GEMM's time depends on; the others belong to the rest of the fused call, which is not timed here."""

NOISE = 0.15
"""Relative error that the formula itself leaves on a launch. The launches of one tile err together, hence not less."""
PRIOR = 0.7
"""Standard deviation of a constant's logarithm between classes: sm90's and sm120's differ by up to a factor of 2.5."""
EDGE = 1.5
NEAR = 0.5
"""A tile this much slower than the fastest weighs half: the choice is among the fast ones."""
TOLD = 0.5
"""A constant is refitted where the times take this share of the prior's variance away."""
_STEPS = 40
_DONE = 1e-5
_SMALL = 1e-4
_FREE = 100.0
"""Where neither physics nor the formula sets a limit: a factor from the class's value, six times ``PRIOR``."""
_BOOST = 1.3
"""A card may run its tensor cores above the clock that their rate is specified at: GeForce cards do, by up to 1.2."""


@dataclass(frozen=True)
class Fit:
    """Constants of a card."""

    constants: Constants
    told: dict[str, float]
    """Per constant of a GEMM, the share of the prior's variance that the times take away: 1 is known, 0 unknown."""
    refitted: tuple[str, ...]


def limits(name: str, of_class: float) -> tuple[float, float]:
    """Return between what a constant may lie whose class has it at ``of_class``; that value is always between."""
    low, high = LIMITS.get(name, (of_class / _FREE, of_class * _FREE))
    high *= _BOOST if name.startswith("tensor_share") else 1.0
    return min(low, of_class), max(high, of_class)


def weights(launches: Launches, us: Array) -> Array:
    """Return how much each launch counts: 1 for the fastest of its GEMM and M."""
    keys = [(one.gemm, one.m) for one in launches.each]
    best = {key: min(time for other, time in zip(keys, us, strict=True) if other == key) for key in set(keys)}
    return np.array([1 / (1 + (time / best[key] - 1) / NEAR) for key, time in zip(keys, us, strict=True)])


def fit(launches: Launches, us: Array, weight: Array, start: CardClass) -> Fit:
    """Fit to measured µs, one for each launch."""
    problem = _Problem(launches, np.log(us), weight, start)
    every, told = problem.solve(OF_GEMMS)
    refitted = tuple(name for name in OF_GEMMS if told[name] >= TOLD)
    if refitted and refitted != OF_GEMMS:
        every, _ = problem.solve(refitted)
    return Fit(every if refitted else start.constants, told, refitted)


def sensitivities(launches: Launches, start: CardClass, names: Sequence[str] = OF_GEMMS) -> Array:
    """Return d log(time) / d log(constant): ``[launches, constants]``, at the class's constants."""
    x = _logs(start.constants, names)
    return _Problem(launches, np.zeros(len(launches.each)), np.ones(len(launches.each)), start).slopes(x, names)[1]


@dataclass(frozen=True)
class _Problem:
    launches: Launches
    log_us: Array
    weight: Array
    start: CardClass

    def solve(self, names: Sequence[str]) -> tuple[Constants, dict[str, float]]:
        """Return the best constants, and what the launches tell of each (:class:`Fit`)."""
        first = _logs(self.start.constants, names)
        held = np.array([limits(name, getattr(self.start.constants, name)) for name in names])
        low, high = np.log(held[:, 0]), np.log(held[:, 1])
        x, damping = first, 1.0
        cost = self._cost(x, first, names)
        for _ in range(_STEPS):
            log_model, slopes = self.slopes(x, names)
            residual = (log_model - self.log_us) / NOISE
            trust = self.weight / np.maximum(1.0, np.abs(residual) / EDGE)
            scaled = slopes / NOISE
            normal = scaled.T @ (scaled * trust[:, None]) + np.eye(len(x)) / PRIOR**2
            gradient = scaled.T @ (trust * residual) + (x - first) / PRIOR**2
            while True:
                step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
                there = np.clip(x + step, low, high)
                cost_there = self._cost(there, first, names)
                if cost_there <= cost or damping > 1e6:
                    break
                damping *= 4
            moved = float(np.abs(there - x).max())
            if cost_there <= cost:
                x, cost, damping = there, cost_there, damping / 4
            if moved < _DONE or damping > 1e6:
                break
        variance = np.diag(np.linalg.inv(normal))
        told = dict(zip(names, (1 - variance / PRIOR**2).tolist(), strict=True))
        return self._constants(x, names), told

    def slopes(self, x: Array, names: Sequence[str]) -> tuple[Array, Array]:
        """Return the logarithms of the times and their derivatives, by forward differences."""
        here = self._log_model(x, names)
        columns = []
        for index in range(len(x)):
            moved = x.copy()
            moved[index] += _SMALL
            columns.append((self._log_model(moved, names) - here) / _SMALL)
        return here, np.stack(columns, axis=1)

    def _cost(self, x: Array, first: Array, names: Sequence[str]) -> float:
        size = np.abs(self._log_model(x, names) - self.log_us) / NOISE
        loss = np.where(size <= EDGE, size**2, 2 * EDGE * size - EDGE**2)
        return float((self.weight * loss).sum() + (((x - first) / PRIOR) ** 2).sum())

    def _log_model(self, x: Array, names: Sequence[str]) -> Array:
        return np.log(self.launches.us(self._constants(x, names), self.start.correction))

    def _constants(self, x: Array, names: Sequence[str]) -> Constants:
        return replace(self.start.constants, **dict(zip(names, np.exp(x).tolist(), strict=True)))


def _logs(constants: Constants, names: Sequence[str]) -> Array:
    return np.log([getattr(constants, name) for name in names])
