"""Why a tile takes as long as the cost model expects, beside the tile that it expects to be the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sm120tune.compiler.sass import MachineCode
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
from sm120tune.measure.occupancy import TileFacts, blocks_per_sm, recorded_facts
from sm120tune.measure.roofline import gemm_work
from sm120tune.measure.routing import Routing
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.search_space import VALUES, Space, SpaceLimits, every_tile
from sm120tune.tiles import Tile

FactsOf = Callable[[Tile], TileFacts]
"""What the compiler says of one GEMM's tile; raises UserError where it cannot run."""

_COMPILED_AT_MOST = 8
"""Shapes that are compiled to find the fastest: guessed registers can make a tile look better than it is."""

_WORTH_COMPILING = 0.99
"""Share of the best time so far that another tile has to promise."""

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
    facts_from: str
    """``compiler``, ``record`` (its answer for another problem) or ``guess``."""
    code: MachineCode | None = None

    @property
    def repeated(self) -> float:
        """How often each product is computed: above 1 where a tile has less 16x8 results than warps."""
        return max(1.0, 128 * self.tile.num_warps / (self.tile.BLOCK_SIZE_M * self.tile.BLOCK_SIZE_N))

    @property
    def steps(self) -> float | None:
        """Steps of K that one pass of the main loop takes, from the products counted in it; None without a loop."""
        tile = self.tile
        if self.code is None or not self.code.loop_instructions or not self.code.products:
            return None
        step = tile.BLOCK_SIZE_M * tile.BLOCK_SIZE_N * tile.BLOCK_SIZE_K * self.repeated
        return self.code.products * tile.num_warps / step

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; the tile as a row of SGLang's files."""
        code = None if self.code is None else {**self.code.to_json(), "steps": self.steps, "repeated": self.repeated}
        return {**asdict(self), "tile": self.tile.to_row(), "code": code, "measured": False}


def explain(
    problem: MoEProblem,
    gemm: Gemm,
    tile: Tile,
    m: int,
    device: DeviceSpec,
    routing: Routing,
    compiled: TileFacts | None = None,
    code: MachineCode | None = None,
) -> Explained:
    """Return what the model says of one GEMM; raises UserError where the tile does not fit on the card.

    ``compiled`` are the compiler's facts, None for the record's or a guess.
    """
    facts = compiled or facts_without_compiling(tile, problem, device)
    held, limit = blocks_per_sm(tile, device, facts)
    if not held or facts.shared_bytes > device.shared_memory_per_block:
        raise UserError(
            f"{gemm} {tile} cannot run on {device.name}: it needs {facts.shared_bytes:,} B of shared memory "
            f"(of {device.shared_memory_per_block:,}) and {facts.registers} registers a thread"
        )
    arrays = tile_arrays([tile], [facts], device)
    load = gemm_load(problem, gemm, m, routing, arrays.block_m)
    found = terms(load, arrays, device, fitted_class(device).constants)
    recorded = recorded_facts(tile, device.arch, problem.quantization) is not None
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
        facts_from="compiler" if compiled is not None else "record" if recorded else "guess",
        code=code,
    )


def best_tile(
    problem: MoEProblem,
    gemm: Gemm,
    m: int,
    device: DeviceSpec,
    routing: Routing,
    block_size_m: int,
    facts_of: FactsOf | None = None,
) -> Tile:
    """Return the tile with this BLOCK_SIZE_M, which both GEMMs share, that the model expects to be the fastest.

    With ``facts_of`` the first few by their record or guess are estimated again with the compiler's facts, until none
    that follows looks faster than the best of them; a shape with the num_stages alone that is expected to suit it best,
    since registers and spills hardly depend on that.
    """
    space = Space(problem, m, SpaceLimits(device.shared_memory_per_block))
    values = {**VALUES, "BLOCK_SIZE_M": (block_size_m,), "GROUP_SIZE_M": (1,)}
    tiles = [tile for tile in every_tile(values) if space.allows(tile)] or list(every_tile(values))
    guess = estimate_tiles(problem, gemm, tiles, m, device, routing)
    ordered = sorted(zip(guess, tiles, strict=True))
    if facts_of is None:
        return ordered[0][1]

    fastest = (math.inf, ordered[0][1])
    seen: set[Tile] = set()
    for us, tile in ordered:
        if us >= _WORTH_COMPILING * fastest[0] or len(seen) == _COMPILED_AT_MOST:
            break
        shape = replace(tile, num_stages=1)
        if shape in seen:
            continue
        seen.add(shape)
        try:
            again = estimate_gemm(problem, gemm, tile, m, device, facts_of(tile), routing).us
        except UserError:
            continue
        fastest = min(fastest, (again, tile))
    return fastest[1]
