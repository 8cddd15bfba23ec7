"""The finalists against today's pair: what the interleaved times allow to claim.

Every lane of a race was timed once in every round, so lanes are compared round by round and whatever slows the
whole card in a round cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.998
"""Two-sided, for one look: at a true ratio of 1.0 a pair is called faster with a probability of at most 0.1 %."""

LOOKS = (11, 31)
"""Rounds after which the decision may fall. More looks would need more confidence in each."""

LOOK_CONFIDENCE = 0.999
"""Of each of the two looks: together they err in the dangerous direction with at most 2 * 0.05 % = 0.1 %."""

LEAST_GAIN = 0.01
"""A pair that gains less is not worth replacing what already runs."""

ESTIMATE_LEAST_M = 8
"""Below it there are no cold-cache measurements that the model could be held against."""


@dataclass(frozen=True)
class Ratio:
    """The time of one lane over that of another."""

    middle: float
    low: float
    high: float

    @property
    def faster(self) -> bool:
        """Below 1 beyond noise, and by enough to matter."""
        return self.high < 1.0 and self.middle <= 1.0 - LEAST_GAIN

    @property
    def slower(self) -> bool:
        """Above 1 beyond noise, and by enough to matter."""
        return self.low > 1.0 and self.middle > 1.0 + LEAST_GAIN

    @property
    def settled(self) -> bool:
        """Whether more rounds cannot change the decision: it is faster, or surely gains too little."""
        return self.faster or self.low > 1.0 - LEAST_GAIN


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median.

    From order statistics: ``P(x(k) <= median <= x(n+1-k)) >= 1 - 2 * sum(binomial(n, i), i < k) / 2**n``, with the
    largest k that keeps the confidence. With too few samples for it (fewer than 10 at 0.998) the interval is the
    whole line.
    """
    ordered = sorted(samples)
    n = len(ordered)
    tail, k = 0.0, 0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        k += 1
    if k == 0:
        return -math.inf, math.inf
    return ordered[k - 1], ordered[n - k]


def compare(lane: Sequence[float], today: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Return the ratio of two lanes that were timed in the same rounds; raises ValueError for unequal lengths."""
    ratios = [a / b for a, b in zip(lane, today, strict=True)]
    low, high = median_interval(ratios, confidence)
    return Ratio(statistics.median(ratios), low, high)


def compare_estimates(lane_us: float, today_us: float, margin: float) -> Ratio:
    """Return the ratio of two estimates with the model's relative error as its interval."""
    ratio = lane_us / today_us
    return Ratio(ratio, ratio * (1 - margin), ratio * (1 + margin))
