"""Which rows a server can reach: SGLang's nearest key, for every M at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def nearest(keys: Iterable[int], m: int) -> int:
    """Return the key that SGLang picks for M: the smallest distance, ties to the first in file order."""
    return min(keys, key=lambda key: abs(key - m))


@dataclass(frozen=True)
class Reach:
    """A range of M and the keys of the rows that serve it."""

    first: int
    last: int
    up_key: int
    down_key: int

    @property
    def label(self) -> str:
        """The range as text."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def starts(keys: Sequence[int], last: int) -> list[int]:
    """Return every M up to ``last`` at which the nearest key may change, 1 included."""
    ordered = sorted(keys)
    points = {1}
    for low, high in itertools.pairwise(ordered):
        middle = (low + high) // 2
        # A tie goes to either side, by file order.
        points |= {middle, middle + 1}
    return sorted(point for point in points if 1 <= point <= last)


def reachable(up_keys: Sequence[int], down_keys: Sequence[int], last: int) -> list[Reach]:
    """Return the ranges of M from 1 to ``last`` with the keys of both rows, in file order each; none without keys."""
    if not up_keys or not down_keys:
        return []
    points = sorted({*starts(up_keys, last), *starts(down_keys, last)})
    found: list[Reach] = []
    for first, following in zip(points, [*points[1:], last + 1], strict=True):
        keys = (nearest(up_keys, first), nearest(down_keys, first))
        if found and (found[-1].up_key, found[-1].down_key) == keys:
            found[-1] = Reach(found[-1].first, following - 1, *keys)
        else:
            found.append(Reach(first, following - 1, *keys))
    return found
