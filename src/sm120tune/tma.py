"""Pairs that load through TMA descriptors: which variants of a pair SGLang could run, and run right."""

from __future__ import annotations

from dataclasses import replace

from sm120tune.job import Job
from sm120tune.problem import Gemm
from sm120tune.quantization import Granularity
from sm120tune.tiles import Tile, TilePair

TMA_FINALISTS = 2
"""Of the finalists, those that also race with TMA."""

_LEAST_ARCH = 90
_ROW_MULTIPLE = 16
"""Bytes that the stride of a descriptor's row has to be a multiple of."""
_SORTED_SCALES = frozenset({Granularity.NONE, Granularity.BLOCK})
"""Where the kernel reads the scales of A in the order of the sorted rows, or A has none."""
_WHOLE_CODES = frozenset({Granularity.NONE, Granularity.TENSOR, Granularity.CHANNEL, Granularity.BLOCK})
"""Where B is loaded by the kernel that knows descriptors."""


def tma_variants(job: Job, m: int, pair: TilePair) -> list[TilePair]:
    """Return the pair with USE_TMA on the down row, on the up row and on both, as far as this SGLang and card can.

    The down row's flag also makes gate_up write its output sorted by expert, so only a chain can tell what it is worth.
    Under expert parallelism it is left out: some releases write the zeros of other ranks' rows to unsorted places.
    Where the sorted rows are quantized it is taken over from today's down row with the same BLOCK_SIZE_M alone.
    """
    if job.timer != "cuda" or job.device.arch < _LEAST_ARCH:
        return []
    granularity = job.problem.quantization.granularity
    down_can = (
        granularity in _SORTED_SCALES
        and not job.problem.expert_parallel
        and _even(job, Gemm.DOWN, pair.down)
        and (job.problem.quantization.operand_bytes != 1 or _sorted_today(job, m, pair))
    )
    up_can = job.lookup.up_tma_supported and granularity in _WHOLE_CODES and _even(job, Gemm.GATE_UP, pair.gate_up)
    downs = [False, True] if down_can else [False]
    ups = [False, True] if up_can else [False]
    return [
        TilePair(replace(pair.gate_up, USE_TMA=up), replace(pair.down, USE_TMA=down))
        for up in ups
        for down in downs
        if up or down
    ]


def _sorted_today(job: Job, m: int, pair: TilePair) -> bool:
    """Whether SGLang quantizes as many padded rows today as with this pair.

    Its CUDA quantizer takes long over some numbers of rows, which the Triton one of the chain does not see: of two
    pairs with TMA that gained 3 and 11 % in the chain (fp8 blocks, E=128 N=768, H200) both lost in the whole call.
    """
    today = job.today(m).pair
    return today is not None and today.down.USE_TMA and today.block_size_m == pair.block_size_m


def _even(job: Job, gemm: Gemm, tile: Tile) -> bool:
    """Whether K ends with a whole block: a ragged one reads the next expert's rows."""
    k = job.problem.gemm(gemm).k
    return k % tile.BLOCK_SIZE_K == 0 and k * job.problem.quantization.operand_bytes % _ROW_MULTIPLE == 0
