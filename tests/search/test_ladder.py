"""Which key serves which M, and the fewest keys that serve all of them well."""

from __future__ import annotations

import itertools
import random

import pytest

from sm120tune.search.ladder import TOLERANCE, Gap, fewest_keys, gaps, nearest


def served_by_sglang(keys: list[int], m: int) -> int:
    """SGLang's own rule over a file written in ascending order."""
    rows = dict.fromkeys(sorted(keys))
    return min(rows.keys(), key=lambda x: abs(x - m))


@pytest.mark.parametrize("keys", [[1, 2], [8, 16, 17, 4096], [1, 100]])
def test_gaps_meet_where_sglang_changes_rows(keys: list[int]) -> None:
    found = gaps(keys)
    assert all(b - a > 1 for a, b in ((gap.below, gap.above) for gap in found))
    for gap in found:
        assert served_by_sglang(keys, gap.last_below) == gap.below
        assert served_by_sglang(keys, gap.first_above) == gap.above


def test_neighbours_without_an_m_between_them_are_no_gap() -> None:
    assert gaps([1, 2, 3]) == []
    assert gaps([3, 1]) == [Gap(1, 3)]


def test_nearest_is_sglangs_rule() -> None:
    rng = random.Random(0)
    for _ in range(300):
        keys = rng.sample(range(1, 400), rng.randint(1, 8))
        m = rng.randint(1, 500)
        assert nearest(keys, m) == served_by_sglang(keys, m)


def fewest_by_force(sizes: list[int], ratio: dict[tuple[int, int], float]) -> int:
    for count in range(1, len(sizes) + 1):
        for keys in itertools.combinations(sizes, count):
            served = ((m, served_by_sglang(list(keys), m)) for m in sizes)
            if all(m == key or ratio.get((m, key), 9.0) <= 1 + TOLERANCE for m, key in served):
                return count
    raise AssertionError("every size as its own key always serves")


def test_fewest_keys_against_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(200):
        sizes = sorted(rng.sample([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256], rng.randint(1, 8)))
        ratio = {
            (m, key): rng.choice([1.0, 1.01, 1.05]) for m in sizes for key in sizes if m != key and rng.random() < 0.9
        }
        chosen = fewest_keys(sizes, ratio)
        assert set(chosen) <= set(sizes)
        served = {m: served_by_sglang(list(chosen), m) for m in sizes}
        assert all(m == key or ratio.get((m, key), 9.0) <= 1 + TOLERANCE for m, key in served.items())
        assert len(chosen) == fewest_by_force(sizes, ratio)


def test_one_row_that_serves_all_is_enough() -> None:
    sizes = [1, 16, 256]
    assert len(fewest_keys(sizes, {(m, 16): 1.0 for m in sizes})) == 1


def test_unknown_ratios_keep_every_key() -> None:
    assert fewest_keys([1, 16, 256], {}) == (1, 16, 256)
