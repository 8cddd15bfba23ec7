"""Recorded tables as the cost model sees them, and how well a model chooses among a table's tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sm120tune.calibrate.quality import spearman
from sm120tune.devices import DeviceSpec, find_device
from sm120tune.measure.cost_constants import Constants
from sm120tune.measure.cost_terms import Load, TileArrays, terms
from sm120tune.measure.model import gemm_load, likely_group, tile_arrays
from sm120tune.measure.occupancy import StoredFacts, binary_key
from sm120tune.measure.routing import Routing, parse_routing
from sm120tune.measure.table import read_table
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile

Array = npt.NDArray[np.float64]

COUNTS = (1, 5, 20)
"""How many of a model's first tiles are tried."""


@dataclass(frozen=True)
class Launches:
    """Every tile of one GEMM at one M that was timed, SGLang's built-in default included."""

    gemm: Gemm
    m: int
    tiles: list[Tile]
    us: Array
    load: Load
    arrays: TileArrays
    at_least: npt.NDArray[np.bool_]
    """Timed once and far too slow: ``us`` is a lower bound."""


@dataclass(frozen=True)
class Recorded:
    """One table."""

    name: str
    problem: MoEProblem
    device: DeviceSpec
    routing: Routing
    launches: list[Launches]

    def times(self, c: Constants) -> list[Array]:
        """Return the formula's times, one array for each entry of ``launches``."""
        return [terms(one.load, one.arrays, self.device, c).us for one in self.launches]


def recorded(path: Path) -> Recorded:
    """Read a table."""
    table = read_table(path)
    device, routing = find_device(table.device_name), parse_routing(table.routing)
    launches = []
    for gemm in Gemm:
        for m in table.sizes:
            rows = [row for row in table.rows if row.gemm is gemm and row.m == m and row.us is not None]
            tiles = [row.tile for row in rows]
            facts = [StoredFacts(row.shared_bytes or 0, row.registers or 0, row.spill_bytes or 0) for row in rows]
            arrays = tile_arrays(tiles, facts, device)
            load = gemm_load(table.problem, gemm, m, routing, arrays.block_m)
            us = np.array([row.us or math.inf for row in rows])
            at_least = np.array([row.at_least for row in rows])
            launches.append(Launches(gemm, m, tiles, us, load, arrays, at_least))
    return Recorded(path.stem, table.problem, device, routing, launches)


def regrets(table: Recorded, one: Launches, predicted: Array) -> list[float]:
    """Return the time of the best among the first 1, 5 and 20 tiles over that of the best of all.

    One GROUP_SIZE_M a tile, the likely one; the best of all may have any.
    """
    likely = {
        size: likely_group(table.problem, one.gemm, one.m, size, table.device, table.routing)
        for size in {tile.BLOCK_SIZE_M for tile in one.tiles}
    }
    ranked: dict[str, tuple[float, bool, float]] = {}
    for tile, expected, us in zip(one.tiles, predicted, one.us, strict=True):
        entry = (float(expected), tile.GROUP_SIZE_M != likely[tile.BLOCK_SIZE_M], float(us))
        key = binary_key(tile)
        ranked[key] = min(ranked.get(key, entry), entry)
    times = [us for _, _, us in sorted(ranked.values())]
    return [min(times[:count]) / float(one.us.min()) for count in COUNTS]


def rank_correlation(one: Launches, predicted: Array) -> float:
    """Return Spearman's correlation over all tiles, those far from the best included."""
    return spearman(predicted, one.us)


def geomean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def bands(launches: list[Launches]) -> Iterator[tuple[str, list[int]]]:
    """Yield the two ranges of M that are reported apart, with the indices of their launches."""
    yield "M >= 8", [index for index, one in enumerate(launches) if one.m >= 8]
    yield "M < 8", [index for index, one in enumerate(launches) if one.m < 8]
