"""A recorded table as a timer: the whole tuner runs on it, without a GPU and the same for the same seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.lane import GemmTime, Offline, TimerName, answered
from sm120tune.measure.results import GemmRequest, Measured, RaceLane, RaceRequest, What
from sm120tune.measure.table import Table, TableRow
from sm120tune.problem import Gemm
from sm120tune.search_space import VALUES
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.arguments import Variant

_T = TypeVar("_T")
_LEAST_NOISE = 0.001
"""Relative; no clock is better."""
_QUARTILE_TO_SIGMA = 0.6745
"""Half the interquartile range of a normal distribution in standard deviations."""
_MEDIAN_FACTOR = 1.2533
"""Standard error of a median over that of a mean, for many samples: sqrt(pi/2)."""

Values = Mapping[str, tuple[int, ...]]


class ReplayLane(Offline):
    """Answers from a table, with noise of the recorded spread."""

    def __init__(self, table: Table, seed: int) -> None:
        self._table = table
        self._rows: dict[tuple[Gemm, Tile, int], TableRow] = {row.key: row for row in table.rows}
        self._seed = seed
        self._asked: dict[tuple[Gemm, Tile, int], int] = {}

    @property
    def name(self) -> str:
        """The recorded card."""
        return f"recorded {self._table.device_name}"

    @property
    def timer(self) -> TimerName:
        """Times come from a table."""
        return "replay"

    def time_gemm(self, request: GemmRequest, facts: TileFacts) -> Future[GemmTime | Failure]:
        """Return the recorded time with the noise that a median of as many repeats would have."""
        row = self._rows.get((request.gemm, request.tile, request.m))
        if row is None or row.us is None:
            return answered(_not_recorded(row))
        sigma = _sigma(row) * _MEDIAN_FACTOR / math.sqrt(max(1, row.repetitions))
        us = row.us * math.exp(self._rng(row, "time").normal(0.0, max(sigma, _LEAST_NOISE)))
        stop = request.stop_above_us
        stopped = row.at_least or (stop is not None and us > stop)
        what = What(request.gemm.value)
        return answered(Measured(us, row.spread_us or 0.0, 1 if stopped else row.repetitions, what, stopped))

    def race(self, request: RaceRequest) -> Future[list[RaceLane] | Failure]:
        """Return chains as sums of their GEMMs, each round with noise of its own."""
        lanes: list[RaceLane] = []
        for pair in request.pairs:
            samples = np.zeros(request.rounds)
            for gemm, tile in ((Gemm.GATE_UP, pair.gate_up), (Gemm.DOWN, pair.down)):
                row = self._rows.get((gemm, tile, request.m))
                if row is None or row.us is None:
                    return answered(_not_recorded(row))
                noise = self._rng(row, "race").normal(0.0, max(_sigma(row), _LEAST_NOISE), request.rounds)
                samples += row.us * np.exp(noise)
            lanes.append(RaceLane(pair, tuple(float(sample) for sample in samples)))
        return answered(lanes)

    def _rng(self, row: TableRow, kind: str) -> np.random.Generator:
        """Return a generator that depends on the seed, the row and how often it was asked for, not on the order."""
        count = self._asked[row.key] = self._asked.get(row.key, 0) + 1
        text = f"{row.gemm} {row.tile} {row.m} {kind} {count}"
        return np.random.default_rng([self._seed, zlib.crc32(text.encode())])


class ReplayPool:
    """Stands where the compile pool does: the table knows what compiling gave."""

    def __init__(self, table: Table) -> None:
        self._outcomes: dict[tuple[Gemm, Tile], TileFacts | Failure] = {}
        for row in table.rows:
            self._outcomes.setdefault((row.gemm, row.tile), row.outcome())
        self.compiled = 0

    @property
    def pending(self) -> int:
        """Nothing ever waits."""
        return 0

    def knows(self, spec: CompileSpec) -> bool:
        """Whether the table has the tile."""
        variant = spec.variant
        return not isinstance(variant, Variant) or (variant.gemm, variant.tile) in self._outcomes

    def submit(self, spec: CompileSpec) -> Future[TileFacts | Failure]:
        """Return the recorded outcome; what lies between the GEMMs always compiles."""
        variant = spec.variant
        if not isinstance(variant, Variant):
            return answered(TileFacts(0, 32, 0, 4))
        missing = Failure(FailureKind.NOT_RECORDED, "not in the table")
        return answered(self._outcomes.get((variant.gemm, variant.tile), missing))

    def stop(self) -> None:
        """Nothing to end."""


def table_values(table: Table) -> Values:
    """Return the values of each tile field that the table covers fully, as a search space.

    A value that stands only in an extra tile (a built-in default) is left out.
    """
    tiles = {row.tile for row in table.rows}
    counts = {name: {value: sum(getattr(tile, name) == value for tile in tiles) for value in values}
              for name, values in VALUES.items()}  # fmt: skip
    return {name: tuple(v for v, n in count.items() if n > len(tiles) // 100) for name, count in counts.items()}


def best_pair(table: Table, m: int) -> tuple[float, TilePair]:
    """Return the least sum of a gate_up and a down time with one BLOCK_SIZE_M at M, and its pair."""
    best: dict[tuple[int, Gemm], tuple[float, Tile]] = {}
    for row in table.rows:
        if row.m == m and row.us is not None and not row.at_least:
            key = (row.tile.BLOCK_SIZE_M, row.gemm)
            best[key] = min(best.get(key, (math.inf, row.tile)), (row.us, row.tile))
    sums = [
        (up[0] + best[block, Gemm.DOWN][0], TilePair(up[1], best[block, Gemm.DOWN][1]))
        for (block, gemm), up in best.items()
        if gemm is Gemm.GATE_UP and (block, Gemm.DOWN) in best
    ]
    return min(sums)


def _sigma(row: TableRow) -> float:
    return (row.spread_us or 0.0) / (row.us or 1.0) / _QUARTILE_TO_SIGMA


def _not_recorded(row: TableRow | None) -> Failure:
    if row is None:
        return Failure(FailureKind.NOT_RECORDED, "not in the table")
    answer = row.outcome()
    return answer if isinstance(answer, Failure) else Failure(FailureKind.NOT_RECORDED, "no time in the table")
