"""An estimate of one GEMM's time from the card's limits: a first, simple model behind one function.

Three things go on at once, and the slowest sets the pace: memory traffic, the tensor cores, and the latency that
each block's K loop cannot hide. The constants were fitted on public times of SGLang's default bf16 tiles on an RTX
PRO 6000 (ai-dynamo/aiconfigurator, Apache-2.0); elsewhere the model ranks tiles rather than predicts times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sm120tune.measure.roofline import gemm_work
from sm120tune.measure.routing import Routing, tokens_per_expert
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile

MODEL_VERSION = "roofline-1"

LAUNCH_US = 3.5
BANDWIDTH_SHARE = 0.87
"""Of the specified DRAM bandwidth, what a copy reaches."""
NARROW_ROW_PENALTY = 1.5
"""Slowdown of memory traffic when a tile's row is 64 bytes (bf16 with BLOCK_SIZE_K 32), seen on two cards."""
PEAK_SHARE = 0.95
"""Of the specified tensor-core rate, what an endless tile would reach."""
HALF_RATE_EDGE = 25.0
"""Edge (BM * BN / (BM + BN)) of the tile that reaches half of that: smaller ones spend the rest on loads."""
LOAD_LATENCY_US = 1.15
"""From a load's issue to its arrival in shared memory while the card is busy."""
BLOCK_US = 1.55
"""Start of a block (row ids, first loads) and its end (the store of its output)."""
SHARPNESS = 4.5
"""Exponent of the smooth maximum; two equal terms give 1.17 times one of them."""

_SHARED_RESERVED = 1024
"""Bytes of shared memory that CUDA itself takes for each resident block."""
_REGISTERS_PER_THREAD = 255
_THREADS_PER_WARP = 32
_SPILL_BYTES_THAT_DOUBLE = 1000.0
"""Stack bytes a thread that double a tile's time (5.4 KB cost 4.5 to 7 times)."""


class Device(Protocol):
    """What the model needs to know of a card."""

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors."""

    @property
    def shared_memory_per_sm(self) -> int:
        """Bytes, those that CUDA reserves included."""

    @property
    def registers_per_sm(self) -> int:
        """32-bit registers."""

    @property
    def max_warps_per_sm(self) -> int:
        """Resident warps."""

    @property
    def bandwidth(self) -> float:
        """Bytes/s of device memory."""

    @property
    def bf16_flops(self) -> float:
        """Dense tensor-core flop/s with fp32 accumulation."""


class TileFacts(Protocol):
    """What the compiler says about a tile's kernel."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block."""

    @property
    def registers(self) -> int:
        """Registers a thread."""

    @property
    def spill_bytes(self) -> int:
        """Stack bytes a thread."""


@dataclass(frozen=True)
class GuessedFacts:
    """Facts of a tile that was not compiled."""

    shared_bytes: int
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Estimate:
    """An estimated time; infinite where the tile cannot run, and then ``bound`` says what it lacks."""

    us: float
    bound: str
    """``bandwidth``, ``compute`` or ``latency``; ``shared_memory`` or ``registers`` where nothing fits."""


def estimate_gemm(
    problem: MoEProblem,
    gemm: Gemm,
    tile: Tile,
    m: int,
    device: Device,
    facts: TileFacts | None,
    routing: Routing,
) -> Estimate:
    """Estimate one GEMM's time in µs for M tokens; ``facts=None`` guesses what the compiler would say.

    Raises UserError for a problem or an M that cannot be routed.
    """
    facts = facts or guess_facts(tile, problem.quantization.operand_bytes)
    occupancy, limit = blocks_per_sm(tile, device, facts)
    if not occupancy:
        return Estimate(math.inf, limit)
    shape = problem.gemm(gemm)
    tokens = tokens_per_expert(problem, m, routing)
    row_blocks = int(np.ceil(tokens / tile.BLOCK_SIZE_M).sum())
    blocks = row_blocks * math.ceil(shape.n / tile.BLOCK_SIZE_N)
    k_steps = math.ceil(shape.k / tile.BLOCK_SIZE_K)

    # One K step of one block that has an SM's tensor cores for itself.
    sm_rate = device.bf16_flops / device.sm_count * PEAK_SHARE / 1e6
    area = tile.BLOCK_SIZE_M * tile.BLOCK_SIZE_N
    edge = area / (tile.BLOCK_SIZE_M + tile.BLOCK_SIZE_N)
    step_us = 2 * area * tile.BLOCK_SIZE_K / sm_rate * (1 + HALF_RATE_EDGE / edge)

    blocks_on_busiest_sm = math.ceil(blocks / device.sm_count)
    waves = math.ceil(blocks / (device.sm_count * occupancy))
    # With one stage nothing is loaded ahead; two stages hold one buffer ahead, and so on.
    hidden_by = max(1, tile.num_stages - 1)
    # A warp feeds one of the SM's four tensor cores.
    serial_us = step_us * 4 / min(4, tile.num_warps)
    block_us = BLOCK_US + k_steps * (LOAD_LATENCY_US / hidden_by + serial_us)
    spilling = 1 + facts.spill_bytes / _SPILL_BYTES_THAT_DOUBLE

    narrow = tile.BLOCK_SIZE_K * problem.quantization.operand_bytes < 128
    memory_us = gemm_work(problem, gemm, m, routing).bytes / (device.bandwidth * BANDWIDTH_SHARE) * 1e6
    terms = {
        "bandwidth": memory_us * (NARROW_ROW_PENALTY if narrow else 1.0),
        "compute": blocks_on_busiest_sm * k_steps * step_us * spilling,
        "latency": waves * block_us * spilling,
    }
    return Estimate(LAUNCH_US + _smooth_max(list(terms.values())), max(terms, key=terms.__getitem__))


def guess_facts(tile: Tile, element_bytes: int) -> GuessedFacts:
    """Guess a tile's facts without a compiler.

    Shared memory is what SM120 stages: ``(num_stages - 1) * (BM + BN) * BK * element_bytes``. Registers are the
    fp32 accumulator's share of a thread and a fixed allowance; what exceeds 255 spills.
    """
    shared = max(1, tile.num_stages - 1) * (tile.BLOCK_SIZE_M + tile.BLOCK_SIZE_N) * tile.BLOCK_SIZE_K * element_bytes
    needed = 56 + tile.BLOCK_SIZE_M * tile.BLOCK_SIZE_N // (_THREADS_PER_WARP * tile.num_warps)
    # Values are spilled again in every unrolled step: 128x256x64 with 4 warps is 57 over and takes 5.4 KB.
    spill = max(0, needed - _REGISTERS_PER_THREAD) * 96
    return GuessedFacts(shared, min(needed, _REGISTERS_PER_THREAD), spill)


def blocks_per_sm(tile: Tile, device: Device, facts: TileFacts) -> tuple[int, str]:
    """Return how many blocks of a tile one SM holds, and what limits it: shared_memory, registers or warps."""
    # The hardware hands out registers in units of 256 a warp.
    registers = -(-facts.registers * _THREADS_PER_WARP // 256) * 256 * tile.num_warps
    limits = {
        "shared_memory": device.shared_memory_per_sm // (facts.shared_bytes + _SHARED_RESERVED),
        "registers": device.registers_per_sm // max(1, registers),
        "warps": device.max_warps_per_sm // tile.num_warps,
    }
    name = min(limits, key=limits.__getitem__)
    return limits[name], name


def _smooth_max(terms: list[float]) -> float:
    """Return a maximum without kinks: the p-norm with p = SHARPNESS."""
    top = max(terms)
    return top * math.fsum((t / top) ** SHARPNESS for t in terms) ** (1 / SHARPNESS) if top else 0.0
