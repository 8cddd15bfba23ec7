"""How wide a margin has to be, so that few times say with some confidence that it holds."""

from __future__ import annotations

import numpy as np
import pytest

from sm120tune.calibrate.assess import CONFIDENCE, COVERED, margin


@pytest.mark.parametrize(
    # Wilks' numbers for 90 % with a confidence of 90 %: 22 for the largest, 38, 52 and 65 for those before it.
    ("count", "after_it"),
    [(5, 0), (21, 0), (22, 0), (37, 0), (38, 1), (51, 1), (52, 2), (64, 2), (65, 3)],
)
def test_it_is_the_order_statistic_that_the_count_allows(count: int, after_it: int) -> None:
    error = np.arange(1, count + 1) / 1000
    shuffled = np.random.default_rng(count).permutation(error)
    assert margin(1 + shuffled) == pytest.approx(error[-1 - after_it])


def test_many_times_need_little_more_than_the_share_itself() -> None:
    error = np.arange(1, 5001) / 5000
    assert COVERED < margin(1 + error) < COVERED + 0.01


def test_too_low_and_too_high_count_alike() -> None:
    ratio = np.full(30, 1.0)
    ratio[3], ratio[7] = 0.6, 1.2
    assert margin(ratio) == pytest.approx(0.4)


@pytest.mark.parametrize("count", [40, 120, 240])
def test_it_holds_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(0)
    errors = rng.exponential(0.1, (4000, count))
    within = 1 - np.exp(-np.array([margin(1 + one) for one in errors]) / 0.1)
    enough = float(np.mean(within >= COVERED))
    # And it is not wider than that needs: one order statistic less would say it too seldom.
    assert CONFIDENCE - 0.02 < enough < CONFIDENCE + 0.09
