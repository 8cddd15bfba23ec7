"""Which tiles are candidates, which of them cannot run, and which heuristics thin them out.

A *cut* removes only what cannot run on the card or is the same program as another candidate. A *heuristic* may
remove a winner; it has a name and is off under ``--search exhaustive``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from optuna.distributions import CategoricalDistribution

from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import Granularity, Quantization
from sm120tune.tiles import Tile, TilePair

SPACE_VERSION = 1
"""Part of a run's identity: a changed space starts a new journal."""

VALUES: Mapping[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "GROUP_SIZE_M": (1, 8, 16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
"""Upstream's 1,920 tiles, plus BLOCK_SIZE_N 16, BLOCK_SIZE_K 32 and the GROUP_SIZE_M 8 of its bf16 default."""

_STAGED_MULTIPLE = 16

_TUNED_PER_GEMM = tuple(name for name in VALUES if name != "BLOCK_SIZE_M")


@dataclass(frozen=True)
class SpaceLimits:
    """What the cuts need to know of the card."""

    shared_memory_per_block: int


def staged_shared_bytes(tile: Tile, stored: Quantization) -> int:
    """Return ``(num_stages-1) * (BLOCK_SIZE_M+BLOCK_SIZE_N) * BLOCK_SIZE_K * bytes``: a lower bound of shared memory.

    Each operand with its own bytes; unpacked int4 is not staged as it lies in memory, so only A counts there.

    Exact for bf16 on SM120; SM90 keeps one buffer more where it uses wgmma. A tile above the card's limit by this
    formula cannot run on either.
    """
    of_b = 0 if stored.granularity is Granularity.GROUP else tile.BLOCK_SIZE_N * stored.weight_bits // 8
    per_stage = (tile.BLOCK_SIZE_M * stored.operand_bytes + of_b) * tile.BLOCK_SIZE_K
    return (tile.num_stages - 1) * per_stage


Values = Mapping[str, tuple[int, ...]]
"""The values of each tile field that a search may try."""


def every_tile(values: Values = VALUES) -> tuple[Tile, ...]:
    """Return the whole base space before any cut."""
    return _every_tile(tuple(values.items()))


@functools.lru_cache(maxsize=4)
def _every_tile(items: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[Tile, ...]:
    names = [name for name, _ in items]
    rows = (dict(zip(names, choice, strict=True)) for choice in itertools.product(*(values for _, values in items)))
    return tuple(Tile.from_row(row) for row in rows)


def same_program_group(problem: MoEProblem, m: int, tile: Tile, groups: Iterable[int] = VALUES["GROUP_SIZE_M"]) -> int:
    """Return the smallest of the given GROUP_SIZE_M that runs the same block order as this tile's.

    From ``ceil(EM / BLOCK_SIZE_M)`` on, one group holds every row block and a larger value changes nothing.
    """
    blocks = -(-problem.padded_rows(m, tile.BLOCK_SIZE_M) // tile.BLOCK_SIZE_M)
    if tile.GROUP_SIZE_M < blocks:
        return tile.GROUP_SIZE_M
    return min((g for g in groups if g >= blocks), default=tile.GROUP_SIZE_M)


def cut_reason(problem: MoEProblem, m: int, tile: Tile, limits: SpaceLimits, values: Values = VALUES) -> str | None:
    """Return why a tile need not be tried at M, or None: the two cuts, which lose nothing."""
    # Rows that are no multiple of 16 elements are not staged at all, so the formula says nothing there.
    staged = all(problem.gemm(gemm).k % _STAGED_MULTIPLE == 0 for gemm in Gemm)
    needed = staged_shared_bytes(tile, problem.quantization)
    if staged and needed > limits.shared_memory_per_block:
        return f"shared memory: {needed:,} of {limits.shared_memory_per_block:,} B"
    if (wrong := wrong_numbers(problem, tile)) is not None:
        return wrong
    same = same_program_group(problem, m, tile, values["GROUP_SIZE_M"])
    if same < tile.GROUP_SIZE_M:
        return f"the same program as GROUP_SIZE_M {same}"
    return None


def wrong_numbers(problem: MoEProblem, tile: Tile) -> str | None:
    """Return why SGLang's kernel would compute wrong numbers with this tile in one of the GEMMs, or None.

    Block-wise quantization loads one scale per K step, and one for all columns of a tile that is narrower than a
    block. The kernel for grouped weights has a scale for every row of a step, but :func:`ragged_step` counts.
    """
    stored, shape = problem.quantization, problem.block_shape
    if stored.granularity is Granularity.BLOCK and shape is not None:
        if shape[1] % tile.BLOCK_SIZE_K:
            return f"BLOCK_SIZE_K {tile.BLOCK_SIZE_K} does not divide the quantization block's {shape[1]}"
        if tile.BLOCK_SIZE_N < shape[0] and shape[0] % tile.BLOCK_SIZE_N:
            return f"BLOCK_SIZE_N {tile.BLOCK_SIZE_N} does not divide the quantization block's {shape[0]}"
    return next((ragged for gemm in Gemm if (ragged := ragged_step(problem, gemm, tile)) is not None), None)


def is_grouped(problem: MoEProblem) -> bool:
    """Whether SGLang's second kernel runs the layer; for int4 whether its group is known or not."""
    return problem.dtype == "int4_w4a16" or (problem.dtype == "int8_w8a16" and problem.block_shape is not None)


def ragged_step(problem: MoEProblem, gemm: Gemm, tile: Tile) -> str | None:
    """Return why the kernel for grouped weights would read past the rows of a GEMM's B, or None.

    It loads B without a mask: a ragged last step reads the next rows, which count nothing, and past the last expert's.
    """
    k = problem.gemm(gemm).k
    if not is_grouped(problem) or k % tile.BLOCK_SIZE_K == 0:
        return None
    return f"BLOCK_SIZE_K {tile.BLOCK_SIZE_K} does not divide {gemm}'s K {k}"


Heuristic = Callable[[MoEProblem, int, Tile], bool]
"""Says whether a tile is worth trying at M; may be wrong."""


def _rows_fit(problem: MoEProblem, m: int, tile: Tile) -> bool:
    # With a quarter of a block's rows in use on average, three quarters of its tensor work is padding.
    per_expert = m * problem.topk / problem.router_experts
    return tile.BLOCK_SIZE_M <= max(16, 8 * per_expert)


def _accumulator_fits(_problem: MoEProblem, _m: int, tile: Tile) -> bool:
    # 256 float32 accumulators a thread are more than there are registers for: such tiles spill.
    return tile.BLOCK_SIZE_M * tile.BLOCK_SIZE_N <= 256 * 32 * tile.num_warps // 2


def _columns_exist(problem: MoEProblem, _m: int, tile: Tile) -> bool:
    return problem.gemm(Gemm.GATE_UP).n >= tile.BLOCK_SIZE_N


HEURISTICS: Mapping[str, Heuristic] = {
    "rows-fit": _rows_fit,
    "accumulator-fits": _accumulator_fits,
    "columns-exist": _columns_exist,
}


@dataclass(frozen=True)
class Space:
    """The candidates of one problem at one M on one card."""

    problem: MoEProblem
    m: int
    limits: SpaceLimits
    exhaustive: bool = False
    values: Values = field(default_factory=lambda: VALUES)

    def allows(self, tile: Tile) -> bool:
        """Whether a tile survives the cuts, and the heuristics unless the search is exhaustive."""
        if cut_reason(self.problem, self.m, tile, self.limits, self.values) is not None:
            return False
        return self.exhaustive or all(keep(self.problem, self.m, tile) for keep in HEURISTICS.values())

    def tiles(self) -> tuple[Tile, ...]:
        """Return every candidate of the base space."""
        return tuple(tile for tile in every_tile(self.values) if self.allows(tile))

    def canonical(self, tile: Tile) -> Tile:
        """Return the candidate that is the same program as this tile."""
        same = same_program_group(self.problem, self.m, tile, self.values["GROUP_SIZE_M"])
        return tile if same >= tile.GROUP_SIZE_M else replace(tile, GROUP_SIZE_M=same)

    def neighbours(self, tile: Tile) -> tuple[Tile, ...]:
        """Return the candidates one value away in one field, BLOCK_SIZE_M kept: what a coordinate walk visits."""
        found: list[Tile] = []
        for name in _TUNED_PER_GEMM:
            values = self.values[name]
            current = getattr(tile, name)
            below = [v for v in values if v < current][-1:]
            above = [v for v in values if v > current][:1]
            found += [Tile.from_row({**tile.to_row(), name: value}) for value in below + above]
        return tuple(other for other in found if self.allows(other))


def count_tiles(spaces: Iterable[Space]) -> tuple[int, int]:
    """Return how many candidates there are over all M before and after the cuts and heuristics."""
    before = after = 0
    for space in spaces:
        tiles = every_tile(space.values)
        before += len(tiles)
        after += sum(space.allows(tile) for tile in tiles)
    return before, after


def distributions(values: Values = VALUES) -> dict[str, CategoricalDistribution]:
    """Return Optuna's distributions of a pair: one per tile parameter, BLOCK_SIZE_M shared by both GEMMs."""
    result = {"BLOCK_SIZE_M": CategoricalDistribution(values["BLOCK_SIZE_M"])}
    for gemm in Gemm:
        for name in _TUNED_PER_GEMM:
            result[f"{gemm.value}.{name}"] = CategoricalDistribution(values[name])
    return result


def space_hash(values: Values = VALUES) -> str:
    """Return a short hash of the space; a study is named after it, since Optuna refuses a changed one."""
    content = json.dumps({"version": SPACE_VERSION, **{k: list(v) for k, v in values.items()}}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def pair_to_params(pair: TilePair, values: Values = VALUES) -> dict[str, int] | None:
    """Return a pair as Optuna parameters, or None when a value lies outside the space (or TMA is on)."""
    params = {"BLOCK_SIZE_M": pair.block_size_m}
    for gemm, tile in ((Gemm.GATE_UP, pair.gate_up), (Gemm.DOWN, pair.down)):
        if tile.USE_TMA:
            return None
        for name in _TUNED_PER_GEMM:
            params[f"{gemm.value}.{name}"] = getattr(tile, name)
    inside = all(value in values[name.rpartition(".")[2]] for name, value in params.items())
    return params if inside else None


def params_to_pair(params: Mapping[str, int]) -> TilePair:
    """Return the pair that Optuna's parameters describe."""
    tiles = [
        Tile.from_row(
            {
                "BLOCK_SIZE_M": params["BLOCK_SIZE_M"],
                **{name: params[f"{gemm.value}.{name}"] for name in _TUNED_PER_GEMM},
            }
        )
        for gemm in Gemm
    ]
    return TilePair(tiles[0], tiles[1])
