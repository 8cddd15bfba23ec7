"""An estimate of one GEMM's time: the cost formula for a problem, a tile and a card, with the card's constants.

The formula is in :mod:`sm120tune.measure.cost_terms`, its constants in ``data/cost_model.json``; docs/model.md tells
what they were fitted on and how wrong the estimates were where they could be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sm120tune.measure.cost_constants import fitted_class
from sm120tune.measure.cost_terms import Load, TileArrays, features, terms
from sm120tune.measure.memory import expert_bytes
from sm120tune.measure.occupancy import Device, TileFacts, blocks_per_sm, guess_facts, recorded_facts
from sm120tune.measure.routing import Routing, tokens_per_expert
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import Granularity
from sm120tune.tiles import Tile

_HELD_SHARE = 0.5
"""Of the L2, what one expert's weights may fill and still be there for its next block of rows.

What fits give ``l2_held_share``; set, so that the rule does not change with a fit.
"""

GROUPS = (1, 16)
"""Values of GROUP_SIZE_M that a tile begins with; others won nothing beyond noise on the recorded tables."""


@dataclass(frozen=True)
class Estimate:
    """An estimated time; infinite where the tile cannot run, and then ``bound`` says what it lacks."""

    us: float
    bound: str
    """``bandwidth``, ``compute``, ``shared_reads``, ``l2`` or ``latency``: the largest term.

    ``shared_memory`` or ``registers`` where not one block fits on an SM.
    """


def estimate_gemm(
    problem: MoEProblem,
    gemm: Gemm,
    tile: Tile,
    m: int,
    device: Device,
    facts: TileFacts | None,
    routing: Routing,
) -> Estimate:
    """Estimate one GEMM's time in µs for M tokens; ``facts=None`` takes :func:`facts_without_compiling`.

    Raises UserError for a problem or an M that cannot be routed.
    """
    facts = facts or facts_without_compiling(tile, problem, device)
    occupancy, limit = blocks_per_sm(tile, device, facts)
    if not occupancy:
        return Estimate(math.inf, limit)
    (us,), (bound,) = _evaluate(problem, gemm, [tile], m, device, [facts], routing)
    return Estimate(float(us), bound)


def estimate_tiles(
    problem: MoEProblem,
    gemm: Gemm,
    tiles: Sequence[Tile],
    m: int,
    device: Device,
    routing: Routing,
    triton_version: str | None = None,
) -> npt.NDArray[np.float64]:
    """Estimate one GEMM's time in µs for many tiles that need not be compiled; infinite where one cannot run.

    ``triton_version`` is the compiler that their registers are guessed for, None for a new one.
    """
    facts = [facts_without_compiling(tile, problem, device, triton_version) for tile in tiles]
    runs = [i for i, tile in enumerate(tiles) if blocks_per_sm(tile, device, facts[i])[0] > 0]
    us = np.full(len(tiles), math.inf)
    if runs:
        us[runs], _ = _evaluate(problem, gemm, [tiles[i] for i in runs], m, device, [facts[i] for i in runs], routing)
    return us


def likely_group(problem: MoEProblem, gemm: Gemm, m: int, block_size_m: int, device: Device, routing: Routing) -> int:
    """Return the GROUP_SIZE_M to try first, one of :data:`GROUPS`.

    The formula tells values apart only where an expert does not stay in the L2.

    Blocks that follow each other share an expert's columns when an expert has several blocks of rows. On the recorded
    H200 tables 16 is then as good as 1 or up to 9 % better for down, and for gate_up from about six blocks an expert
    on; elsewhere 1 is the best or within 1 % of it, larger values are slower. Without groups an expert that fills the
    L2 is read again from memory for every block of rows: there 16 saves gate_up up to 27 % from the second block on.
    Read off these tables, not fitted; one of them has such experts.
    """
    load = gemm_load(problem, gemm, m, routing, np.array([float(block_size_m)]))
    blocks_an_expert = float(np.max(load.row_blocks)) / max(1.0, float(np.max(load.touched)))
    read_again = expert_bytes(problem, gemm) > _HELD_SHARE * device.l2_bytes
    return 16 if blocks_an_expert > (1 if gemm is Gemm.DOWN or read_again else 6) else 1


def other_group(group: int) -> int:
    """Return the other one of :data:`GROUPS`: the one to repeat a good tile with."""
    return GROUPS[0] if group > GROUPS[0] else GROUPS[1]


def facts_without_compiling(
    tile: Tile, problem: MoEProblem, device: Device, triton_version: str | None = None
) -> TileFacts:
    """Return what the compiler said of this tile for another problem, or a guess where it is not recorded."""
    stored = problem.quantization
    return recorded_facts(tile, device.arch, stored) or guess_facts(tile, stored, triton_version)


def gemm_load(problem: MoEProblem, gemm: Gemm, m: int, routing: Routing, block_m: npt.NDArray[np.float64]) -> Load:
    """Return what one GEMM has to do at M with these values of BLOCK_SIZE_M."""
    shape = problem.gemm(gemm)
    tokens = tokens_per_expert(problem, m, routing)
    rows = float(tokens.sum())
    blocks = {size: float(np.ceil(tokens / size).sum()) for size in np.unique(block_m)}
    return Load(
        n=float(shape.n),
        k=float(shape.k),
        rows=rows,
        touched=float(np.count_nonzero(tokens)),
        rows_of_a=min(float(m), rows) if gemm is Gemm.GATE_UP else rows,
        rows_of_c=float(m * problem.topk),
        row_blocks=np.array([blocks[size] for size in block_m]),
        # Scales come with the weights that they belong to.
        weight_bytes=expert_bytes(problem, gemm) / (shape.n * shape.k),
        activation_bytes=float(problem.quantization.operand_bytes),
        fp8=float(problem.quantization.dtype == "fp8_w8a8"),
        block_scaled=float(problem.quantization.granularity is Granularity.BLOCK),
    )


def tile_arrays(tiles: Sequence[Tile], facts: Sequence[TileFacts], device: Device) -> TileArrays:
    """Return tiles that can run and their facts as arrays."""

    def column(values: Sequence[float]) -> npt.NDArray[np.float64]:
        return np.array(values, dtype=np.float64)

    return TileArrays(
        block_m=column([tile.BLOCK_SIZE_M for tile in tiles]),
        block_n=column([tile.BLOCK_SIZE_N for tile in tiles]),
        block_k=column([tile.BLOCK_SIZE_K for tile in tiles]),
        group=column([tile.GROUP_SIZE_M for tile in tiles]),
        warps=column([tile.num_warps for tile in tiles]),
        stages=column([tile.num_stages for tile in tiles]),
        spill_bytes=column([fact.spill_bytes for fact in facts]),
        occupancy=column([blocks_per_sm(tile, device, fact)[0] for tile, fact in zip(tiles, facts, strict=True)]),
    )


def _evaluate(
    problem: MoEProblem,
    gemm: Gemm,
    tiles: Sequence[Tile],
    m: int,
    device: Device,
    facts: Sequence[TileFacts],
    routing: Routing,
) -> tuple[npt.NDArray[np.float64], list[str]]:
    fitted = fitted_class(device)
    arrays = tile_arrays(tiles, facts, device)
    load = gemm_load(problem, gemm, m, routing, arrays.block_m)
    found = terms(load, arrays, device, fitted.constants)
    us = found.us
    if fitted.correction is not None:
        us = us * fitted.correction.factor(features(load, arrays, found))
    return us, found.bounds()
