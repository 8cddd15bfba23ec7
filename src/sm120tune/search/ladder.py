"""Which row serves which M, and which keys a ladder needs.

SGLang serves M tokens with the row of the nearest key, a tie with the one that comes first in the file (the lower
one, since ladders are written in ascending order), and never interpolates.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

TOLERANCE = 0.02
"""A key may be left out where its M loses no more than this with a neighbour's row."""


@dataclass(frozen=True)
class Gap:
    """Two neighbouring keys with other M between them."""

    below: int
    above: int

    @property
    def last_below(self) -> int:
        """The largest M that the lower key serves."""
        return (self.below + self.above) // 2

    @property
    def first_above(self) -> int:
        """The smallest M that the upper key serves."""
        return self.last_below + 1


def gaps(keys: Sequence[int]) -> list[Gap]:
    """Return the pairs of neighbouring keys that have an M between them."""
    ordered = sorted(keys)
    return [Gap(a, b) for a, b in itertools.pairwise(ordered) if b - a > 1]


def nearest(keys: Sequence[int], m: int) -> int:
    """Return the key that serves M."""
    return min(sorted(keys), key=lambda key: abs(key - m))


def fewest_keys(
    sizes: Sequence[int],
    ratio: Mapping[tuple[int, int], float],
    fixed: Collection[int] = (),
    tolerance: float = TOLERANCE,
) -> tuple[int, ...]:
    """Return the fewest of the sizes that, as keys, serve every size within the tolerance of its own row.

    ``ratio[m, key]`` is the time at M with the row of ``key`` over that with M's own row; a missing entry counts as
    too slow. ``fixed`` are keys that the ladder has in any case. A shortest path over the keys in order: a step from
    one key to the next skips no fixed one and is allowed when every size between them is served well by the nearer.
    """
    wanted = sorted(sizes)
    keys = sorted({*sizes, *fixed})
    last_fixed = max(fixed, default=keys[0])

    def good(m: int, key: int) -> bool:
        return m == key or ratio.get((m, key), float("inf")) <= 1 + tolerance

    best: dict[int, tuple[int, tuple[int, ...]]] = {}
    for key in keys:
        count = int(key not in fixed)
        options: list[tuple[int, tuple[int, ...]]] = []
        if not any(other < key for other in fixed) and all(good(m, key) for m in wanted if m < key):
            options.append((count, (key,)))
        for before, (so_far, path) in best.items():
            skipped = any(before < other < key for other in fixed)
            if not skipped and all(good(m, nearest((before, key), m)) for m in wanted if before < m < key):
                options.append((so_far + count, (*path, key)))
        if options:
            best[key] = min(options)
    ends = [found for key, found in best.items() if key >= last_fixed and all(good(m, key) for m in wanted if m > key)]
    return tuple(key for key in min(ends)[1] if key in set(sizes))
