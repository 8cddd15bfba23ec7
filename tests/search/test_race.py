from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from sm120tune.search.race import (
    CONFIDENCE,
    LEAST_GAIN,
    LOOK_CONFIDENCE,
    LOOKS,
    Ratio,
    compare,
    compare_estimates,
    median_interval,
)

ROUNDS = 31


def coverage(n: int, low: int, high: int) -> float:
    """Return the exact chance that the median lies between two order statistics (0-based) of n samples."""
    # Between them exactly when more than `low` and at most `high` samples are below the median.
    return sum(math.comb(n, below) for below in range(low + 1, high + 1)) / float(2**n)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, CONFIDENCE])
def test_interval_is_the_narrowest_that_keeps_the_confidence(confidence: float) -> None:
    for n in range(1, 120):
        low, high = median_interval([float(i) for i in range(n)], confidence)
        if math.isinf(low):
            assert (low, high) == (-math.inf, math.inf)
            # Not even the whole range of the samples would do.
            assert n < 2 or coverage(n, 0, n - 1) < confidence
            continue
        assert low + high == n - 1
        assert coverage(n, int(low), int(high)) >= confidence
        assert low + 1 >= high - 1 or coverage(n, int(low) + 1, int(high) - 1) < confidence


def test_few_samples_claim_nothing() -> None:
    assert median_interval([1.0] * 9) == (-math.inf, math.inf)
    assert median_interval([1.0] * 10) == (1.0, 1.0)
    assert not compare([1.0] * 9, [2.0] * 9).faster
    assert compare([1.0] * 10, [2.0] * 10).faster


@pytest.mark.parametrize("confidence", [0.9, CONFIDENCE])
@pytest.mark.parametrize("n", [15, 31, 64])
def test_simulated_coverage_of_a_skewed_distribution(n: int, confidence: float) -> None:
    generator = np.random.default_rng(n)
    draws = generator.lognormal(mean=0.0, sigma=1.0, size=(20_000, n))
    hits = 0
    for row in draws:
        low, high = median_interval(row.tolist(), confidence)
        hits += low <= 1.0 <= high
    # Three standard deviations of the simulation itself.
    slack = 3 * math.sqrt(confidence * (1 - confidence) / len(draws))
    assert hits / len(draws) >= confidence - slack


def test_the_order_of_samples_does_not_matter() -> None:
    samples = np.random.default_rng(0).normal(size=31).tolist()
    assert median_interval(samples) == median_interval(sorted(samples)) == median_interval(samples[::-1])
    low, high = median_interval(samples)
    assert low < statistics.median(samples) < high


def races(ratio: float, noise: float, count: int, *, seed: int, drift: float = 0.2) -> list[Ratio]:
    """Simulate races of a lane against today's: noise of its own and a drift of the card that both share."""
    generator = np.random.default_rng(seed)
    card = 100 * np.exp(drift * generator.normal(size=(count, ROUNDS)))
    lane = ratio * card * np.exp(noise * generator.normal(size=(count, ROUNDS)))
    today = card * np.exp(noise * generator.normal(size=(count, ROUNDS)))
    return [compare(a.tolist(), b.tolist()) for a, b in zip(lane, today, strict=True)]


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.05, 0.2])
def test_equal_pairs_are_almost_never_called_faster(noise: float) -> None:
    results = races(1.0, noise, 2000, seed=1)
    assert sum(result.faster for result in results) < 0.005 * len(results)


def test_a_gain_of_three_percent_is_found_in_one_percent_of_noise() -> None:
    results = races(0.97, 0.01, 2000, seed=2)
    assert sum(result.faster for result in results) > 0.99 * len(results)
    assert statistics.fmean(result.middle for result in results) == pytest.approx(0.97, abs=0.001)


def test_a_slower_pair_is_never_called_faster() -> None:
    assert not any(result.faster for result in races(1.03, 0.05, 2000, seed=3))


def decide(ratio: float, noise: float, count: int, *, seed: int) -> tuple[int, float]:
    """Simulate decisions that may fall early; returns how many said faster, and the rounds they took on average."""
    generator = np.random.default_rng(seed)
    faster = rounds = 0
    for _ in range(count):
        lane = (ratio * np.exp(noise * generator.normal(size=LOOKS[-1]))).tolist()
        today = np.exp(noise * generator.normal(size=LOOKS[-1])).tolist()
        for look in LOOKS:
            result = compare(lane[:look], today[:look], LOOK_CONFIDENCE)
            if result.settled:
                break
        faster += result.faster
        rounds += look
    return faster, rounds / count


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.05, 0.2])
def test_looking_twice_does_not_call_equal_pairs_faster(noise: float) -> None:
    faster, _ = decide(1.0, noise, 2000, seed=4)
    assert faster < 0.005 * 2000


def test_looking_twice_finds_gains_and_clear_ones_early() -> None:
    small, small_rounds = decide(0.97, 0.01, 2000, seed=5)
    large, large_rounds = decide(0.8, 0.01, 2000, seed=6)
    assert small > 0.99 * 2000
    assert large == 2000
    assert large_rounds == LOOKS[0] < small_rounds <= LOOKS[-1]


def test_a_hopeless_pair_is_settled_early() -> None:
    faster, rounds = decide(1.1, 0.01, 500, seed=7)
    assert faster == 0
    assert rounds < LOOKS[0] + 1


@pytest.mark.parametrize(
    ("low", "middle", "high", "faster", "slower", "settled"),
    [
        (0.90, 0.92, 0.94, True, False, True),
        (0.97, 0.985, 1.002, False, False, False),
        (0.992, 0.995, 0.999, False, False, True),
        (0.98, 1.0, 1.02, False, False, False),
        (1.001, 1.005, 1.02, False, False, True),
        (1.01, 1.05, 1.1, False, True, True),
        (0.99, 1.05, 1.1, False, False, False),
    ],
)
def test_what_an_interval_allows_to_say(
    low: float, middle: float, high: float, faster: bool, slower: bool, settled: bool
) -> None:
    ratio = Ratio(middle, low, high)
    assert (ratio.faster, ratio.slower, ratio.settled) == (faster, slower, settled)


def test_a_slow_round_of_the_whole_card_cancels() -> None:
    today = [100.0 * (1 + round_ % 7) for round_ in range(ROUNDS)]
    result = compare([0.9 * us for us in today], today)
    assert result.middle == pytest.approx(0.9)
    assert result.high - result.low < 1e-9
    assert result.faster


def test_a_gain_too_small_to_matter_is_not_faster() -> None:
    today = [100.0] * ROUNDS
    just = 1 - LEAST_GAIN
    assert not compare([100 * (just + 0.002)] * ROUNDS, today).faster
    assert compare([100 * (just - 0.002)] * ROUNDS, today).faster


def test_an_interval_that_reaches_one_is_not_faster() -> None:
    assert not Ratio(middle=0.9, low=0.8, high=1.0).faster
    assert Ratio(middle=0.9, low=0.8, high=0.999).faster


def test_lanes_of_different_rounds_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="argument"):
        compare([1.0, 2.0], [1.0])


@pytest.mark.parametrize("margin", [0.05, 0.1, 0.3])
def test_an_estimate_must_gain_more_than_the_models_own_error(margin: float) -> None:
    edge = 1 / (1 + margin)
    assert compare_estimates(100 * edge * 0.99, 100, margin).faster
    assert not compare_estimates(100 * edge * 1.01, 100, margin).faster
    assert not compare_estimates(100, 100, margin).faster
    result = compare_estimates(80, 100, margin)
    assert result.low < result.middle == 0.8 < result.high
