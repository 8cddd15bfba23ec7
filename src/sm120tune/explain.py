"""Why a tile takes as long as the cost model expects, beside the tile that it expects to be the fastest."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sm120tune.devices import DeviceSpec
from sm120tune.errors import UserError
from sm120tune.measure.cost_constants import fitted_class
from sm120tune.measure.cost_terms import terms
from sm120tune.measure.model import (
    estimate_gemm,
    estimate_tiles,
    facts_without_compiling,
    gemm_load,
    tile_arrays,
)
from sm120tune.measure.occupancy import blocks_per_sm, recorded_facts
from sm120tune.measure.roofline import gemm_work
from sm120tune.measure.routing import Routing
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.search_space import VALUES, Space, SpaceLimits, every_tile
from sm120tune.tiles import Tile

_TERMS = ("bandwidth", "compute", "shared_reads", "l2", "latency")


@dataclass(frozen=True)
class Explained:
    """One GEMM with one tile at one M; every time is an estimate."""

    tile: Tile
    us: float
    bound: str
    terms_us: dict[str, float]
    """What each term alone would take."""
    blocks: int
    """Blocks that have rows."""
    blocks_per_sm: int
    limited_by: str
    """What keeps an SM from holding more of them."""
    waves: float
    """Blocks over those that the card holds at a time."""
    padding: float
    """Share of the multiplied rows that are none."""
    memory_bytes: float
    """Least bytes through device memory."""
    registers: int
    spill_bytes: int
    shared_bytes: int
    facts_guessed: bool
    """Whether registers and stack are a guess, since no compiler's answer is recorded."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; the tile as a row of SGLang's files."""
        return {**asdict(self), "tile": self.tile.to_row(), "measured": False}


def explain(problem: MoEProblem, gemm: Gemm, tile: Tile, m: int, device: DeviceSpec, routing: Routing) -> Explained:
    """Return what the model says of one GEMM; raises UserError where the tile does not fit on the card."""
    facts = facts_without_compiling(tile, problem, device)
    held, limit = blocks_per_sm(tile, device, facts)
    if not held or facts.shared_bytes > device.shared_memory_per_block:
        raise UserError(
            f"{gemm} {tile} cannot run on {device.name}: it needs {facts.shared_bytes:,} B of shared memory "
            f"(of {device.shared_memory_per_block:,}) and {facts.registers} registers a thread"
        )
    arrays = tile_arrays([tile], [facts], device)
    load = gemm_load(problem, gemm, m, routing, arrays.block_m)
    found = terms(load, arrays, device, fitted_class(device).constants)
    estimate = estimate_gemm(problem, gemm, tile, m, device, facts, routing)
    row_blocks = float(np.max(load.row_blocks))
    blocks = row_blocks * math.ceil(float(np.max(load.n)) / tile.BLOCK_SIZE_N)
    work = gemm_work(problem, gemm, m, routing)
    return Explained(
        tile=tile,
        us=estimate.us,
        bound=estimate.bound,
        terms_us={name: float(getattr(found, name)[0]) for name in _TERMS},
        blocks=int(blocks),
        blocks_per_sm=held,
        limited_by=limit,
        waves=blocks / (held * device.sm_count),
        padding=1 - float(np.max(load.rows)) / (row_blocks * tile.BLOCK_SIZE_M) if row_blocks else 0.0,
        memory_bytes=work.bytes,
        registers=facts.registers,
        spill_bytes=facts.spill_bytes,
        shared_bytes=facts.shared_bytes,
        facts_guessed=recorded_facts(tile, device.arch, problem.quantization) is None,
    )


def best_tile(problem: MoEProblem, gemm: Gemm, m: int, device: DeviceSpec, routing: Routing, block_size_m: int) -> Tile:
    """Return the tile with this BLOCK_SIZE_M, which both GEMMs share, that the model expects to be the fastest."""
    space = Space(problem, m, SpaceLimits(device.shared_memory_per_block))
    values = {**VALUES, "BLOCK_SIZE_M": (block_size_m,), "GROUP_SIZE_M": (1,)}
    tiles = [tile for tile in every_tile(values) if space.allows(tile)] or list(every_tile(values))
    us = estimate_tiles(problem, gemm, tiles, m, device, routing)
    return tiles[int(us.argmin())]
