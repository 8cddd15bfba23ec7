"""First candidates for one M: today's pair, an earlier run's, shipped rows of similar keys, what the model likes."""

from __future__ import annotations

import heapq

from sm120tune.job import Job
from sm120tune.measure.model import estimate_gemm
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.shipped import ShippedRows

_MODEL_SEEDS = 6
_PER_BLOCK_SIZE = 2


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
    """Return the pairs that the analytic model ranks first by formula, one GROUP_SIZE_M per tile.

    Copies that differ only in GROUP_SIZE_M would fill every place.
    """
    leaders: list[tuple[float, TilePair]] = []
    ungrouped = [tile for tile in job.space(m).tiles() if tile.GROUP_SIZE_M == 1]
    for block_size_m in job.values["BLOCK_SIZE_M"]:
        tiles = [tile for tile in ungrouped if tile.BLOCK_SIZE_M == block_size_m]
        best = {gemm: _best(job, m, gemm, tiles) for gemm in Gemm}
        leaders += [
            (up_us + down_us, TilePair(up, down))
            for (up_us, up), (down_us, down) in zip(best[Gemm.GATE_UP], best[Gemm.DOWN], strict=True)
        ]
    return [pair for _, pair in heapq.nsmallest(count, leaders)]


def _best(job: Job, m: int, gemm: Gemm, tiles: list[Tile]) -> list[tuple[float, Tile]]:
    timed = ((estimate_gemm(job.problem, gemm, tile, m, job.device, None, job.routing).us, tile) for tile in tiles)
    return heapq.nsmallest(_PER_BLOCK_SIZE, timed)
