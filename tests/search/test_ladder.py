from __future__ import annotations

import itertools
import random

import pytest

from sm120tune.search.ladder import TOLERANCE, Gap, fewest_keys, gaps, nearest

SIZES = (1, 2, 4, 8, 16, 64, 256)


def sglang(keys: list[int], m: int) -> int:
    """Return the key that SGLang's lookup takes: the first of the nearest, in the order of the file."""
    return min(keys, key=lambda key: abs(key - m))


def test_nearest_is_sglangs() -> None:
    for count in range(1, 5):
        for keys in itertools.combinations((1, 2, 5, 8, 11), count):
            for m in range(1, 14):
                assert nearest(keys[::-1], m) == sglang(list(keys), m)


def test_gaps_say_who_serves_what() -> None:
    found = gaps([16, 1, 2, 3, 9])
    assert found == [Gap(3, 9), Gap(9, 16)]
    for gap in found:
        keys = [gap.below, gap.above]
        assert gap.first_above == gap.last_below + 1
        assert [sglang(keys, m) for m in (gap.last_below, gap.first_above)] == keys
    assert gaps([5]) == gaps([]) == gaps([1, 2, 3]) == []


def serves(keys: tuple[int, ...], ratio: dict[tuple[int, int], float]) -> bool:
    return all(m in keys or ratio.get((m, sglang(list(keys), m)), 99.0) <= 1 + TOLERANCE for m in SIZES)


@pytest.mark.parametrize("seed", range(60))
def test_the_fewest_keys_serve_everyone_and_no_fewer_would(seed: int) -> None:
    draw = random.Random(seed)
    # Near keys serve well more often than far ones.
    ratio = {
        (m, key): draw.choice([1.0, 1.01, 1.3]) * (1.0 if draw.random() < 0.9 else 2.0)
        for m, key in itertools.permutations(SIZES, 2)
        if draw.random() < 0.9
    }
    keys = fewest_keys(SIZES, ratio)
    assert tuple(sorted(set(keys))) == keys
    assert set(keys) <= set(SIZES)
    assert serves(keys, ratio)
    for smaller in itertools.combinations(SIZES, len(keys) - 1):
        assert not smaller or not serves(smaller, ratio)


@pytest.mark.parametrize("seed", range(60))
def test_fixed_keys_stay_and_serve_what_they_are_nearest_to(seed: int) -> None:
    draw = random.Random(1000 + seed)
    fixed = tuple(sorted(draw.sample([3, 12, 30, 100, 512], draw.randint(1, 3))))
    every = [*SIZES, *fixed]
    ratio = {(m, key): draw.choice([1.0, 1.01, 1.3]) for m in SIZES for key in every if m != key}

    def all_served(keys: tuple[int, ...]) -> bool:
        ladder = sorted([*keys, *fixed])
        return all(m in keys or ratio[m, sglang(ladder, m)] <= 1 + TOLERANCE for m in SIZES)

    keys = fewest_keys(SIZES, ratio, fixed)
    assert set(keys) <= set(SIZES)
    assert all_served(keys)
    for count in range(len(keys)):
        assert not any(all_served(fewer) for fewer in itertools.combinations(SIZES, count))


def test_one_key_where_one_row_serves_all_and_all_where_none_does() -> None:
    pairs = list(itertools.permutations(SIZES, 2))
    assert len(fewest_keys(SIZES, dict.fromkeys(pairs, 1.0))) == 1
    assert fewest_keys(SIZES, dict.fromkeys(pairs, 1.5)) == SIZES
    assert fewest_keys(SIZES, {}) == SIZES
    assert fewest_keys((7,), {}) == (7,)
