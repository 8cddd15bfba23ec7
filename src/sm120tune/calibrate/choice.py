"""Which tiles a calibration times: few, and such that their times tell the cost model's constants apart.

In this order, each tile once, the same for the same problem, card, M and constants:

1. SGLang's built-in default at every M: what runs where nothing is tuned.
2. The model's first tile of each GEMM at each M: what a search would begin with.
3. For each value of BLOCK_SIZE_M, N and K, num_warps and num_stages, one, two and more blocks on an SM, and tiles that
   keep registers in memory: a tile with it, where those before have fewer than two.
4. The rest, one by one: the tile whose times would narrow the constants most.

In 3 and 4 "most" is the gain in the logarithm of the determinant of the information matrix, the class's prior and all
earlier tiles included (a greedy D-optimal design; Fedorov, Theory of Optimal Experiments, 1972), from the formula's
own derivatives at the class's constants. Launches that the model expects to be slow count less, as in the fit.
Tiles that exceed the card's shared memory or registers by the compiler's record are never chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sm120tune.calibrate.fit import NOISE, OF_GEMMS, PRIOR, sensitivities, weights
from sm120tune.calibrate.launches import Launch, Launches, launches_of
from sm120tune.calibrate.quality import groups
from sm120tune.job import Job
from sm120tune.measure.cost_constants import CardClass
from sm120tune.measure.model import facts_without_compiling
from sm120tune.measure.occupancy import TileFacts, blocks_per_sm
from sm120tune.problem import Gemm
from sm120tune.search_space import SpaceLimits, cut_reason, every_tile
from sm120tune.tiles import Tile

Array = npt.NDArray[np.float64]

DEFAULT_TILES = 30
_COVERED = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
_TWICE = 2
_MANY_BLOCKS = 3


@dataclass(frozen=True)
class Chosen:
    """A tile and what it was chosen for."""

    tile: Tile
    why: str


def choose_tiles(job: Job, start: CardClass, count: int = DEFAULT_TILES) -> tuple[Chosen, ...]:
    """Return the tiles to time; at least SGLang's defaults, at most as many as can run."""
    found = _Choice(job, start, count)
    found.defaults()
    found.leaders()
    found.cover()
    found.narrow()
    return tuple(found.chosen)


class _Choice:
    """The candidates, what each would tell, and what was chosen so far."""

    def __init__(self, job: Job, start: CardClass, count: int) -> None:
        self._job, self._count = job, count
        self.chosen: list[Chosen] = []
        self._tiles = [tile for tile in every_tile({**job.values, "GROUP_SIZE_M": (1,)}) if self._runs(tile)]
        self._facts = {tile: self._fact(tile) for tile in self._tiles}
        sizes = job.batch_sizes
        each = [Launch(gemm, tile, m, self._facts[tile]) for tile in self._tiles for gemm in Gemm for m in sizes]
        self._launches: Launches = launches_of(each, job.problem, job.device, job.routing)
        self._us = self._launches.us(start.constants, start.correction)
        told = sensitivities(self._launches, start) * np.sqrt(weights(self._launches, self._us))[:, None] / NOISE
        self._told = told.reshape(len(self._tiles), -1, len(OF_GEMMS))
        """``[tiles, launches of each, constants]``"""
        self._information = np.eye(len(OF_GEMMS)) / PRIOR**2

    def defaults(self) -> None:
        """Take SGLang's built-in tiles, whatever the count."""
        at: dict[Tile, list[str]] = {}
        for m in self._job.batch_sizes:
            pair = self._job.lookup.builtin_pair(self._job.problem, m)
            for tile in (pair.gate_up, pair.down):
                if not tile.USE_TMA and str(m) not in at.setdefault(tile, []):
                    at[tile].append(str(m))
        for tile, sizes in at.items():
            if self._fits(tile):
                self._take(tile, f"SGLang's default at M={', '.join(sizes)}")

    def leaders(self) -> None:
        """Take the model's first tile of every GEMM and M."""
        for here in groups(self._launches):
            best = int(np.flatnonzero(here)[self._us[here].argmin()])
            one = self._launches.each[best]
            self._take_candidate(one.tile, f"the model's first of {one.gemm} at M={one.m}")

    def cover(self) -> None:
        """See that every value of a field, every occupancy and spilling tiles are there twice."""
        kinds: dict[str, list[Tile]] = {}
        for name in _COVERED:
            for value in self._job.values[name]:
                kinds[f"{name} {value}"] = [tile for tile in self._tiles if getattr(tile, name) == value]
        for blocks in range(1, _MANY_BLOCKS + 1):
            more = " or more" if blocks == _MANY_BLOCKS else ""
            kinds[f"{blocks}{more} blocks on an SM"] = [tile for tile in self._tiles if self._blocks(tile) == blocks]
        kinds["spilled registers"] = [tile for tile in self._tiles if self._facts[tile].spill_bytes > 0]
        for what, tiles in kinds.items():
            while len(self._taken() & set(tiles)) < _TWICE and self._take_best(tiles, what):
                pass

    def narrow(self) -> None:
        """Fill up with what tells most."""
        while self._take_best(self._tiles, ""):
            pass

    def _runs(self, tile: Tile) -> bool:
        limits = SpaceLimits(self._job.device.shared_memory_per_block)
        problem = self._job.problem
        if any(cut_reason(problem, m, tile, limits, self._job.values) for m in self._job.batch_sizes):
            return False
        return tile.BLOCK_SIZE_N <= problem.gemm(Gemm.GATE_UP).n and self._fits(tile)

    def _fits(self, tile: Tile) -> bool:
        facts = self._fact(tile)
        held = blocks_per_sm(tile, self._job.device, facts)[0]
        return held > 0 and facts.shared_bytes <= self._job.device.shared_memory_per_block

    def _fact(self, tile: Tile) -> TileFacts:
        return facts_without_compiling(tile, self._job.problem, self._job.device)

    def _blocks(self, tile: Tile) -> int:
        return min(_MANY_BLOCKS, blocks_per_sm(tile, self._job.device, self._fact(tile))[0])

    def _taken(self) -> set[Tile]:
        return {replace(one.tile, GROUP_SIZE_M=1) for one in self.chosen}

    def _take_best(self, tiles: list[Tile], what: str) -> bool:
        """Take the tile that tells most; False where none is left or the count is reached."""
        taken = self._taken()
        left = [self._tiles.index(tile) for tile in tiles if tile not in taken]
        if not left or len(self.chosen) >= self._count:
            return False
        told = self._told[left]
        covariance = np.linalg.inv(self._information)
        inner = np.eye(told.shape[1]) + np.einsum("tlc,cd,tmd->tlm", told, covariance, told)
        best = left[int(np.linalg.slogdet(inner)[1].argmax())]
        if not what:
            after = np.diag(np.linalg.inv(self._information + self._told[best].T @ self._told[best]))
            what = f"tells most, of {OF_GEMMS[int((after / np.diag(covariance)).argmin())]} above all"
        self._take_candidate(self._tiles[best], what)
        return True

    def _take_candidate(self, tile: Tile, why: str) -> None:
        if len(self.chosen) < self._count:
            self._take(tile, why)

    def _take(self, tile: Tile, why: str) -> None:
        key = replace(tile, GROUP_SIZE_M=1)
        if key in self._taken():
            return
        self.chosen.append(Chosen(tile, why))
        if key in self._facts:
            told = self._told[self._tiles.index(key)]
            self._information = self._information + told.T @ told
