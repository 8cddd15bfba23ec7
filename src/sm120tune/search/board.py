"""What is known at one M: the time of each GEMM with each tile, and the pairs that follow from it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from sm120tune.failures import Failure
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile, TilePair


class Timing(Protocol):
    """A measured or an estimated time."""

    @property
    def us(self) -> float:
        """Microseconds of one launch."""

    def to_json(self) -> dict[str, Any]:
        """Return what the journal keeps."""


Half = tuple[Gemm, Tile]
"""One GEMM with one tile: what is compiled and timed; a pair is two of them."""

_CANDIDATES_PER_GEMM = 4


class Board:
    """Results at one M. A pair's score is the sum of its GEMMs' times, which ranks pairs before the race."""

    def __init__(self) -> None:
        self._results: dict[Half, Timing | Failure] = {}

    def put(self, half: Half, result: Timing | Failure) -> None:
        """Record a result; a later one replaces an earlier one."""
        self._results[half] = result

    def get(self, half: Half) -> Timing | Failure | None:
        """Return what is known of a GEMM with a tile."""
        return self._results.get(half)

    def known(self) -> set[Half]:
        """Return everything that has a result."""
        return set(self._results)

    def missing(self, pair: TilePair) -> tuple[Half, ...]:
        """Return which halves of a pair are not known yet."""
        return tuple(half for half in halves(pair) if half not in self._results)

    def score(self, pair: TilePair) -> float | Failure | None:
        """Return the pair's summed µs, its first failure, or None while a half is unknown."""
        total = 0.0
        for half in halves(pair):
            result = self._results.get(half)
            if result is None:
                return None
            if isinstance(result, Failure):
                return result
            total += result.us
        return total

    def best_us(self, gemm: Gemm) -> float | None:
        """Return the best time of one GEMM with any tile."""
        return min((us for _, us in self._times(gemm)), default=None)

    def best_tiles(self, gemm: Gemm, block_size_m: int, count: int) -> list[Tile]:
        """Return the fastest tiles of one GEMM with one BLOCK_SIZE_M, best first."""
        found = sorted((us, tile) for tile, us in self._times(gemm) if tile.BLOCK_SIZE_M == block_size_m)
        return [tile for _, tile in found[:count]]

    def best_pairs(self, count: int) -> list[TilePair]:
        """Return the best pairs by summed time, best first."""
        scored: list[tuple[float, TilePair]] = []
        for block_size_m in {tile.BLOCK_SIZE_M for _, tile in self._results}:
            ups = self.best_tiles(Gemm.GATE_UP, block_size_m, _CANDIDATES_PER_GEMM)
            downs = self.best_tiles(Gemm.DOWN, block_size_m, _CANDIDATES_PER_GEMM)
            for up, down in itertools.product(ups, downs):
                pair = TilePair(up, down)
                score = self.score(pair)
                if isinstance(score, float):
                    scored.append((score, pair))
        return [pair for _, pair in sorted(scored)[:count]]

    def failures(self) -> Counter[str]:
        """Return how many results failed, by kind."""
        return Counter(result.kind.value for result in self._results.values() if isinstance(result, Failure))

    def __len__(self) -> int:
        return len(self._results)

    def _times(self, gemm: Gemm) -> Iterator[tuple[Tile, float]]:
        for (which, tile), result in self._results.items():
            if which is gemm and not isinstance(result, Failure):
                yield tile, result.us


def halves(pair: TilePair) -> tuple[Half, Half]:
    """Return the two GEMMs of a pair."""
    return (Gemm.GATE_UP, pair.gate_up), (Gemm.DOWN, pair.down)


def result_to_json(result: Timing | Failure) -> dict[str, Any]:
    """Return what the journal keeps of a half's result."""
    return {"failure": result.to_json()} if isinstance(result, Failure) else {"timing": result.to_json()}


def result_from_json(data: Mapping[str, Any], read_timing: Callable[[Mapping[str, Any]], Timing]) -> Timing | Failure:
    """Rebuild a result from :func:`result_to_json`."""
    return Failure.from_json(data["failure"]) if "failure" in data else read_timing(data["timing"])
