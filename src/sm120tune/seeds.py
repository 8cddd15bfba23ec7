"""First candidates for one M: today's pair, an earlier run's, shipped rows of similar keys, what the model likes."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from operator import itemgetter

from sm120tune.job import Job
from sm120tune.measure.model import estimate_gemm, estimate_tiles, likely_group, other_group
from sm120tune.problem import Gemm
from sm120tune.search_space import Space, every_tile
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.shipped import ShippedRows

_MODEL_SEEDS = 16
"""With them 16 trials choose better on recorded tables than 48 without (bench/search_quality.py)."""
_REGROUPED = 4
"""One in so many of them repeats a better pair with the other GROUP_SIZE_M."""


class Seeds:
    """Seeds of one job; neighbours' winners are added by the runner as they appear."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._leaders: dict[int, list[TilePair]] = {}
        self._shipped = ShippedRows(job.tree, job.problem, job.device.file_name)

    def at(self, m: int) -> list[TilePair]:
        """Return the seeds of one M, the likeliest first."""
        job = self._job
        today = job.today(m).pair
        return [
            *([today] if today is not None else []),
            *([job.existing[m]] if m in job.existing else []),
            job.lookup.builtin_pair(job.problem, m),
            *self._model_leaders(m),
            *self._shipped.pairs(m),
        ]

    def expected_gain(self, m: int) -> float:
        """Return the model's best time over that of today's pair at M: the smaller, the more there is to win."""
        job = self._job
        today = job.today(m).pair
        leaders = self._model_leaders(m)
        if today is None or not leaders:
            return 0.0

        def us(pair: TilePair) -> float:
            return sum(
                estimate_gemm(job.problem, gemm, tile, m, job.device, None, job.routing).us
                for gemm, tile in ((Gemm.GATE_UP, pair.gate_up), (Gemm.DOWN, pair.down))
            )

        return us(leaders[0]) / us(today)

    def _model_leaders(self, m: int) -> list[TilePair]:
        """Return the model's leaders, ranked once: under a budget both the order of M and the seeds need them."""
        if m not in self._leaders:
            self._leaders[m] = model_leaders(self._job, m)
        return self._leaders[m]


def model_leaders(job: Job, m: int, count: int = _MODEL_SEEDS) -> list[TilePair]:
    """Return the pairs that the cost model ranks first without compiling, one GROUP_SIZE_M per tile until the end.

    Copies that differ only in GROUP_SIZE_M would fill every place, so only the last quarter repeats the first pairs
    with the other value. Within one BLOCK_SIZE_M the first of gate_up goes with the first of down, the second with the
    second and so on: the GEMMs are timed apart, so each pair tells about two new tiles.
    """
    space = job.space(m)
    tiles = [tile for tile in every_tile({**space.values, "GROUP_SIZE_M": (1,)}) if space.allows(tile)]
    leaders: list[tuple[float, TilePair]] = []
    for size in job.values["BLOCK_SIZE_M"]:
        ranked: dict[Gemm, list[tuple[float, Tile]]] = {}
        for gemm in Gemm:
            group = likely_group(job.problem, gemm, m, size, job.device, job.routing)
            of_size = [_grouped(tile, group, space) for tile in tiles if tile.BLOCK_SIZE_M == size]
            times = estimate_tiles(job.problem, gemm, of_size, m, job.device, job.routing, job.triton_version)
            finite = ((float(us), tile) for us, tile in zip(times, of_size, strict=True) if math.isfinite(us))
            ranked[gemm] = heapq.nsmallest(count, finite, key=itemgetter(0))
        leaders += [
            (up_us + down_us, TilePair(up, down))
            for (up_us, up), (down_us, down) in zip(ranked[Gemm.GATE_UP], ranked[Gemm.DOWN], strict=True)
        ]
    first = [pair for _, pair in heapq.nsmallest(count, leaders, key=itemgetter(0))]
    again = [other for pair in first[: count // _REGROUPED] if (other := _regrouped(pair, space)) != pair]
    return [*first[: count - len(again)], *again]


def _grouped(tile: Tile, group: int, space: Space) -> Tile:
    """Return the tile with the likely GROUP_SIZE_M where that is another candidate."""
    other = replace(tile, GROUP_SIZE_M=group)
    return other if group in space.values["GROUP_SIZE_M"] and space.allows(other) else tile


def _regrouped(pair: TilePair, space: Space) -> TilePair:
    """Return the pair with the other GROUP_SIZE_M in both halves, where those are candidates."""
    up, down = (_grouped(tile, other_group(tile.GROUP_SIZE_M), space) for tile in (pair.gate_up, pair.down))
    return TilePair(up, down)
