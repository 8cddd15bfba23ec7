from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from optuna.distributions import CategoricalDistribution
from wheels import VERSIONS, Trees

from sm120tune import search_space
from sm120tune.compiler import CompileSpec
from sm120tune.compiler.build import compile_facts
from sm120tune.failures import Failure
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import Quantization
from sm120tune.search_space import (
    HEURISTICS,
    VALUES,
    Space,
    SpaceLimits,
    count_tiles,
    cut_reason,
    distributions,
    every_tile,
    pair_to_params,
    params_to_pair,
    same_program_group,
    space_hash,
    staged_shared_bytes,
    wrong_numbers,
)
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import find_sglang
from sm120tune.upstream.arguments import Variant
from sm120tune.upstream.source import load_kernels

SM120 = SpaceLimits(101376)
SMALL = MoEProblem(experts=16, intermediate=256, hidden=512, topk=2, router_experts=16)
GLM = MoEProblem(experts=257, intermediate=256, hidden=6144, topk=9, router_experts=256, shared_experts=1)
PARALLEL = MoEProblem(experts=32, intermediate=768, hidden=2048, topk=8, router_experts=128)
PROBLEMS = {"small": SMALL, "shared": GLM, "parallel": PARALLEL}
SIZES = (1, 3, 16, 64, 511, 4096)


def test_the_base_space_has_every_combination_once() -> None:
    tiles = every_tile()
    assert len(tiles) == len(set(tiles)) == 5 * 5 * 4 * 5 * 2 * 4
    for name, values in VALUES.items():
        assert {getattr(tile, name) for tile in tiles} == set(values)
    assert not any(tile.USE_TMA for tile in tiles)


def test_upstreams_1920_tiles_are_all_in_it() -> None:
    # The loops of SGLang's and vLLM's own tuning scripts.
    upstream = {
        Tile(block_m, block_n, block_k, group, warps, stages)
        for block_m in (16, 32, 64, 128, 256)
        for block_n in (32, 64, 128, 256)
        for block_k in (64, 128, 256)
        for group in (1, 16, 32, 64)
        for warps in (4, 8)
        for stages in (2, 3, 4, 5)
    }
    assert len(upstream) == 1920
    assert upstream <= set(every_tile())


def test_sglangs_built_in_defaults_are_in_it() -> None:
    assert {Tile(16, 32, 64, 1), Tile(64, 64, 32, 8)} <= set(every_tile())


# What the cuts remove


def pid_mapping(kernel_file: Path) -> Callable[[int, int, Tile], list[tuple[int, int]]]:
    """Return SGLang's own arithmetic from a program's id to its block, taken from its kernel's source."""
    module = ast.parse(kernel_file.read_text())
    kernel = next(n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "fused_moe_kernel")
    names = [ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else "" for node in kernel.body]
    lines = kernel.body[names.index("num_pid_m") : names.index("pid_n") + 1]
    code = compile(ast.Module(body=lines, type_ignores=[]), str(kernel_file), "exec")
    parameters = kernel.args.args[len(kernel.args.args) - len(kernel.args.defaults) :]
    defaults = {name.arg: ast.literal_eval(value) for name, value in zip(parameters, kernel.args.defaults, strict=True)}
    language = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))

    def order(rows: int, columns: int, tile: Tile) -> list[tuple[int, int]]:
        blocks = -(-rows // tile.BLOCK_SIZE_M) * -(-columns // tile.BLOCK_SIZE_N)
        result = []
        for pid in range(blocks):
            scope: dict[str, Any] = {**defaults, "tl": language, "EM": rows, "N": columns, "pid": pid, **tile.to_row()}
            exec(code, scope)
            result.append((scope["pid_m"], scope["pid_n"]))
        return result

    return order


def by_hand(rows: int, columns: int, tile: Tile) -> list[tuple[int, int]]:
    """Return the blocks in launch order: groups of GROUP_SIZE_M row blocks, each group column by column."""
    row_blocks = range(-(-rows // tile.BLOCK_SIZE_M))
    column_blocks = range(-(-columns // tile.BLOCK_SIZE_N))
    groups = itertools.groupby(row_blocks, key=lambda block: block // tile.GROUP_SIZE_M)
    return [(row, column) for _, group in groups for column, row in itertools.product(column_blocks, list(group))]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_release_groups_blocks_as_the_group_cut_expects(version: str, sglang_trees: Trees) -> None:
    kernel_order = pid_mapping(find_sglang(sglang_trees[version]).kernel_file)
    for rows, columns, group in itertools.product((16, 100, 1000), (512, 100), VALUES["GROUP_SIZE_M"]):
        tile = Tile(16, 64, 64, group)
        assert kernel_order(rows, columns, tile) == by_hand(rows, columns, tile)


@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_group_sizes_are_cut_where_and_only_where_the_program_is_the_same(problem: MoEProblem, gemm: Gemm) -> None:
    columns = problem.gemm(gemm).n
    cut = kept = 0
    for m, block_m in itertools.product((1, 2, 5, 16, 100), VALUES["BLOCK_SIZE_M"]):
        rows = problem.padded_rows(m, block_m)
        orders: dict[int, list[tuple[int, int]]] = {}
        for group in VALUES["GROUP_SIZE_M"]:
            tile = Tile(block_m, 64, 64, group)
            order = by_hand(rows, columns, tile)
            same = same_program_group(problem, m, tile)
            if same < group:
                assert cut_reason(problem, m, tile, SM120) == f"the same program as GROUP_SIZE_M {same}"
                assert orders[same] == order
                assert cut_reason(problem, m, replace(tile, GROUP_SIZE_M=same), SM120) is None
                cut += 1
            else:
                assert order not in orders.values()
                kept += 1
            orders[group] = order
    assert cut > 10
    assert kept > 30


def test_no_other_reason_cuts() -> None:
    for problem, m in itertools.product(PROBLEMS.values(), SIZES):
        for tile in every_tile():
            too_big = staged_shared_bytes(tile, problem.quantization) > SM120.shared_memory_per_block
            repeated = same_program_group(problem, m, tile) != tile.GROUP_SIZE_M
            assert (cut_reason(problem, m, tile, SM120) is not None) == (too_big or repeated)


@pytest.mark.parametrize(
    ("dtype", "block_shape", "cut"),
    [
        ("fp8_w8a8", None, set()),
        ("fp8_w8a8", (128, 128), {256}),
        ("fp8_w8a8", (128, 64), {128, 256}),
        ("int8_w8a8", (32, 32), {64, 128, 256}),
        ("fp8_w8a8", (128, 96), {64, 128, 256}),
        # K is 512 and 256 for the one, 384 and 192 for the other: groups may be shorter than a step.
        ("int4_w4a16", (0, 32), set()),
        ("int8_w8a16", (0, 32), set()),
        ("int8_w8a16", None, set()),
    ],
)
def test_a_step_over_two_blocks_of_k_is_cut(dtype: str, block_shape: tuple[int, int] | None, cut: set[int]) -> None:
    problem = replace(SMALL, dtype=dtype, block_shape=block_shape)
    for block_k in VALUES["BLOCK_SIZE_K"]:
        tile = Tile(16, 128, block_k, 1)
        reason = wrong_numbers(problem, tile)
        assert cut_reason(problem, 512, tile, SM120) == reason
        assert (reason is not None) == (block_k in cut)
        if reason is not None and block_shape is not None:
            assert f"BLOCK_SIZE_K {block_k} " in reason
            assert str(block_shape[1]) in reason


@pytest.mark.parametrize("dtype", ["int4_w4a16", "int8_w8a16"])
def test_a_ragged_last_step_of_groups_is_cut(dtype: str) -> None:
    # Down's K is 192, which neither 128 nor 256 divides; gate_up's 512 they do.
    problem = replace(SMALL, dtype=dtype, block_shape=(0, 64), intermediate=192)
    reasons = {block_k: wrong_numbers(problem, Tile(16, 64, block_k, 1)) for block_k in VALUES["BLOCK_SIZE_K"]}
    assert {block_k for block_k, reason in reasons.items() if reason is not None} == {128, 256}
    assert reasons[128] == "BLOCK_SIZE_K 128 does not divide down's K 192"
    # The plain kernel masks its last step.
    plain = replace(problem, dtype="int8_w8a16", block_shape=None)
    assert wrong_numbers(plain, Tile(16, 64, 128, 1)) is None


def test_a_narrow_tile_over_two_blocks_of_n_is_cut() -> None:
    problem = replace(SMALL, dtype="fp8_w8a8", block_shape=(96, 128), intermediate=384)
    reasons = {block_n: wrong_numbers(problem, Tile(16, block_n, 64, 1)) for block_n in VALUES["BLOCK_SIZE_N"]}
    # One scale for a tile as narrow as a block; wider ones load a scale for each column.
    assert {block_n for block_n, reason in reasons.items() if reason is not None} == {64}
    assert reasons[64] == "BLOCK_SIZE_N 64 does not divide the quantization block's 96"


def test_staged_bytes_count_each_operand_by_its_own_size() -> None:
    tile = Tile(16, 64, 128, 1, 4, 3)
    by_dtype = {
        "bf16": 2 * (16 * 2 + 64 * 2) * 128,
        "fp8_w8a8": 2 * (16 + 64) * 128,
        "int8_w8a16": 2 * (16 * 2 + 64) * 128,
    }
    for dtype, expected in by_dtype.items():
        assert staged_shared_bytes(tile, Quantization(dtype)) == expected
    # Grouped weights are unpacked on the way: A alone is sure to be staged.
    assert staged_shared_bytes(tile, Quantization("int4_w4a16", (0, 128))) == 2 * 16 * 2 * 128


QUANTIZED = [
    replace(SMALL, dtype=dtype, block_shape=block_shape)
    for dtype, block_shape in (("fp8_w8a8", (128, 128)), ("int8_w8a16", (0, 64)), ("int4_w4a16", (0, 128)))
]


@pytest.mark.parametrize("problem", QUANTIZED, ids=str)
@pytest.mark.parametrize("m", [1, 64, 4096])
def test_every_candidate_of_a_quantized_layer_computes_right_numbers(problem: MoEProblem, m: int) -> None:
    space = Space(problem, m, SM120)
    assert len(space.tiles()) > 100
    for tile in space.tiles():
        assert wrong_numbers(problem, tile) is None
        assert all(wrong_numbers(problem, other) is None for other in space.neighbours(tile)[:2])


def test_the_reason_names_the_bytes() -> None:
    reason = cut_reason(SMALL, 512, Tile(128, 128, 128, 1, 8, 3), SM120)
    assert reason == "shared memory: 131,072 of 101,376 B"


@pytest.mark.parametrize(
    "tile",
    # The two nearest below the limit (98,304 B) and the two nearest above (104,448 B and 110,592 B).
    [Tile(64, 32, 128, 1, 4, 5), Tile(16, 32, 256, 1, 4, 5), Tile(256, 16, 64, 1, 8, 4), Tile(256, 32, 64, 1, 8, 4)],
    ids=str,
)
@pytest.mark.parametrize("gemm", list(Gemm))
def test_the_compiler_agrees_with_the_shared_memory_cut(tile: Tile, gemm: Gemm, sglang_0_5_23: Path) -> None:
    tree = find_sglang(sglang_0_5_23)
    spec = CompileSpec(
        tree.package, load_kernels(tree).source_hash, triton.__version__, 120, SMALL, Variant(gemm, tile)
    )
    facts = compile_facts(spec)
    needed = staged_shared_bytes(tile, SMALL.quantization)
    assert not isinstance(facts, Failure)
    assert (facts.shared_bytes > SM120.shared_memory_per_block) == (needed > SM120.shared_memory_per_block)
    assert facts.shared_bytes >= needed


# Heuristics


def test_heuristics_are_named_and_only_the_exhaustive_search_goes_without() -> None:
    assert HEURISTICS
    assert all(name and name == name.lower() for name in HEURISTICS)
    for problem, m in itertools.product(PROBLEMS.values(), SIZES):
        uncut = tuple(tile for tile in every_tile() if cut_reason(problem, m, tile, SM120) is None)
        whole = Space(problem, m, SM120, exhaustive=True).tiles()
        thinned = Space(problem, m, SM120).tiles()
        assert whole == uncut
        assert set(thinned) <= set(whole)
        for tile in set(whole) - set(thinned):
            assert any(not keep(problem, m, tile) for keep in HEURISTICS.values())


@pytest.mark.parametrize("name", HEURISTICS)
def test_every_heuristic_removes_something_somewhere(name: str) -> None:
    removed = [
        tile
        for problem, m in itertools.product((SMALL, replace(SMALL, intermediate=32)), SIZES)
        for tile in Space(problem, m, SM120, exhaustive=True).tiles()
        if not HEURISTICS[name](problem, m, tile)
    ]
    assert removed


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_sglangs_default_at_m_is_never_thinned_out(problem: MoEProblem, m: int) -> None:
    space = Space(problem, m, SM120)
    default = Tile(16, 32, 64, 1) if m <= problem.experts else Tile(64, 64, 32, 8)
    assert space.tiles()
    if m <= problem.experts:
        assert space.allows(space.canonical(default))


def test_a_larger_card_loses_nothing() -> None:
    small, large = (set(Space(GLM, 512, SpaceLimits(limit)).tiles()) for limit in (101376, 232448))
    assert small < large


def test_counts_before_and_after() -> None:
    spaces = [Space(SMALL, m, SM120) for m in SIZES]
    assert count_tiles(spaces) == (4000 * len(SIZES), sum(len(space.tiles()) for space in spaces))
    assert count_tiles([]) == (0, 0)


# Canonical form and neighbours


@pytest.mark.parametrize("m", [1, 16, 512])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_canonical_is_the_uncut_twin(problem: MoEProblem, m: int) -> None:
    space = Space(problem, m, SM120, exhaustive=True)
    for tile in every_tile():
        twin = space.canonical(tile)
        assert space.canonical(twin) == twin
        assert replace(twin, GROUP_SIZE_M=tile.GROUP_SIZE_M) == tile
        if staged_shared_bytes(tile, problem.quantization) <= SM120.shared_memory_per_block:
            assert space.allows(twin)
        if space.allows(tile):
            assert twin == tile


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("m", [1, 64, 4096])
def test_neighbours_differ_in_one_field_by_one_step(m: int, exhaustive: bool) -> None:
    space = Space(PARALLEL, m, SM120, exhaustive=exhaustive)
    neighbours = {tile: space.neighbours(tile) for tile in space.tiles()}
    for tile, others in neighbours.items():
        assert len(set(others)) == len(others)
        for other in others:
            changed = [name for name in VALUES if getattr(tile, name) != getattr(other, name)]
            assert len(changed) == 1
            assert changed != ["BLOCK_SIZE_M"]
            values = VALUES[changed[0]]
            assert abs(values.index(getattr(tile, changed[0])) - values.index(getattr(other, changed[0]))) == 1
            # Only what survives the cuts, and there and back again.
            assert tile in neighbours[other]
    # Nothing but a lone tile is out of a walk's reach.
    assert len(set(itertools.chain(*neighbours.values()))) > 0.95 * len(neighbours)


def test_neighbours_of_a_tile_between_the_values() -> None:
    odd = Tile(32, 48, 64, 1, 4, 3)
    columns = {other.BLOCK_SIZE_N for other in Space(PARALLEL, 512, SM120).neighbours(odd)}
    assert {32, 64} <= columns


# Optuna's view


def test_distributions_are_one_per_tile_parameter() -> None:
    found = distributions()
    assert set(found) == {"BLOCK_SIZE_M"} | {
        f"{gemm.value}.{name}" for gemm in Gemm for name in VALUES if name != "BLOCK_SIZE_M"
    }
    for name, distribution in found.items():
        assert isinstance(distribution, CategoricalDistribution)
        assert distribution.choices == VALUES[name.rpartition(".")[2]]


def test_parameters_and_pairs_round_trip() -> None:
    tiles = every_tile()
    for up, down in zip(tiles[::7], reversed(tiles[::7]), strict=True):
        pair = TilePair(up, down.with_block_m(up.BLOCK_SIZE_M))
        params = pair_to_params(pair)
        assert params is not None
        assert set(params) == set(distributions())
        assert params_to_pair(params) == pair


@pytest.mark.parametrize(
    "pair",
    [
        TilePair.same(Tile(16, 48, 64, 1)),
        TilePair.same(Tile(16, 64, 64, 2)),
        TilePair.same(Tile(48, 64, 64, 1)),
        TilePair(Tile(16, 64, 64, 1), Tile(16, 64, 64, 1, 2)),
        TilePair(Tile(16, 64, 64, 1), Tile(16, 64, 64, 1, 4, 1)),
        TilePair(Tile(16, 64, 64, 1), Tile(16, 64, 64, 1, USE_TMA=True)),
        TilePair(Tile(16, 64, 64, 1, USE_TMA=True), Tile(16, 64, 64, 1)),
    ],
    ids=str,
)
def test_pairs_outside_the_space_have_no_parameters(pair: TilePair) -> None:
    assert pair_to_params(pair) is None


def test_a_changed_space_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = space_hash()
    assert before == space_hash() == space_hash(dict(reversed(list(VALUES.items()))))
    assert space_hash({**VALUES, "num_stages": (2, 3, 4)}) != before
    monkeypatch.setattr(search_space, "SPACE_VERSION", search_space.SPACE_VERSION + 1)
    assert space_hash() != before


def test_a_smaller_base_space_is_a_part_of_the_whole() -> None:
    values = {**VALUES, "GROUP_SIZE_M": (1, 16), "num_stages": (3,)}
    assert len(every_tile(values)) == 5 * 5 * 4 * 2 * 2
    assert set(every_tile(values)) < set(every_tile())
    for m in SIZES:
        space = Space(SMALL, m, SM120, exhaustive=True, values=values)
        for tile in every_tile(values):
            assert space.canonical(tile) in every_tile(values)
        for tile in space.tiles():
            assert set(space.neighbours(tile)) <= set(space.tiles())
    inside, outside = TilePair.same(Tile(16, 64, 64, 16)), TilePair.same(Tile(16, 64, 64, 8))
    assert pair_to_params(inside, values) == pair_to_params(inside)
    assert pair_to_params(outside, values) is None
    assert distributions(values)["down.GROUP_SIZE_M"].choices == (1, 16)
