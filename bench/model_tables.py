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
from sm120tune.measure.model import GROUPS, gemm_load, likely_group, other_group, tile_arrays
from sm120tune.measure.occupancy import StoredFacts, binary_key
from sm120tune.measure.routing import Routing, parse_routing
from sm120tune.measure.table import read_table
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile

Array = npt.NDArray[np.float64]

COUNTS = (1, 5, 20)
"""How many of a model's first tiles are tried."""
REGROUPED = 4
"""Of the last of those, how many repeat the first tiles with the other GROUP_SIZE_M."""


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

    A tile is tried with the likely GROUP_SIZE_M; the last :data:`REGROUPED` of 20 are the first ones with the other.
    The best of all may have any.
    """
    likely: dict[int, int] = {}
    tiles: dict[str, dict[int, tuple[float, float]]] = {}
    first: dict[str, int] = {}
    for tile, expected, us in zip(one.tiles, predicted, one.us, strict=True):
        size = tile.BLOCK_SIZE_M
        if size not in likely:
            likely[size] = likely_group(table.problem, one.gemm, one.m, size, table.device, table.routing)
        groups = tiles.setdefault(binary_key(tile), {})
        groups[tile.GROUP_SIZE_M] = (float(expected), float(us))
        # Where there are too few blocks for a group it was not timed; SGLang's default was with its own alone.
        first[binary_key(tile)] = next((group for group in (likely[size], GROUPS[0]) if group in groups), min(groups))
    ranked = sorted(tiles, key=lambda key: (tiles[key][first[key]][0], key))
    times = [tiles[key][first[key]][1] for key in ranked]
    again = [tiles[key][other][1] for key in ranked[:REGROUPED] if (other := other_group(first[key])) in tiles[key]]
    tried = [times[:count] for count in COUNTS]
    tried[-1] = times[: COUNTS[-1] - len(again)] + again
    return [min(each) / float(one.us.min()) for each in tried]


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
