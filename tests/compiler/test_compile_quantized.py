"""Both of SGLang's GEMM kernels and its quantizer, compiled for every way in which weights are stored."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from wheels import Trees

from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.compiler.build import build, compile_facts
from sm120tune.compiler.spec import QuantizeVariant
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import Granularity
from sm120tune.search_space import staged_shared_bytes
from sm120tune.tiles import Tile
from sm120tune.upstream import find_sglang
from sm120tune.upstream.arguments import Variant
from sm120tune.upstream.source import load_kernels, load_quantize

RELEASES = ("0.5.8.post1", "0.5.15", "0.5.23")

LAYERS = {
    name: MoEProblem(16, 256, 512, 2, 16, dtype, **how)  # type: ignore[arg-type]
    for name, (dtype, how) in {
        "fp8": ("fp8_w8a8", {}),
        "fp8 channels": ("fp8_w8a8", {"per_channel_quant": True}),
        "fp8 blocks": ("fp8_w8a8", {"block_shape": (128, 128)}),
        "int8 channels": ("int8_w8a8", {"per_channel_quant": True}),
        "int8 blocks": ("int8_w8a8", {"block_shape": (128, 128)}),
        "int8 weights": ("int8_w8a16", {}),
        "int8 groups": ("int8_w8a16", {"block_shape": (0, 128)}),
        "int8 groups, zero points": ("int8_w8a16", {"block_shape": (0, 64), "zero_points": True}),
        "int4 groups": ("int4_w4a16", {"block_shape": (0, 128)}),
        "int4 groups, zero points": ("int4_w4a16", {"block_shape": (0, 64), "zero_points": True}),
    }.items()
}
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
TILES = (Tile(16, 64, 128, 1, 4, 3), Tile(64, 128, 64, 8, 8, 2))


@pytest.fixture(autouse=True)
def all_stages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PTX is looked at here; a pool's processes keep the binary alone."""
    monkeypatch.delenv("TRITON_STORE_BINARY_ONLY", raising=False)
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)


def spec(package: Path, problem: MoEProblem, variant: Any, arch: int = 120) -> CompileSpec:
    kernels = load_kernels(find_sglang(package))
    return CompileSpec(package, kernels.hash_for(problem.quantization), triton.__version__, arch, problem, variant)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("release", RELEASES)
def test_every_storage_compiles_for_sm120_and_the_formula_is_a_lower_bound(
    sglang_trees: Trees, release: str, layer: str
) -> None:
    problem = LAYERS[layer]
    stored = problem.quantization
    for gemm, tile in zip(Gemm, TILES, strict=True):
        one = spec(sglang_trees[release] / "sglang", problem, Variant(gemm, tile))
        facts = compile_facts(one)
        assert isinstance(facts, TileFacts), facts
        assert facts.num_warps == tile.num_warps
        # Triton keeps every unpacked weight of a step in registers before 3.7.
        if (not problem.dtype.endswith("w4a16") and not stored.zero_points) or _TRITON >= (3, 7):
            assert facts.spill_bytes == 0
        needed = staged_shared_bytes(tile, stored)
        assert needed <= facts.shared_bytes <= 101376
        if stored.granularity is not Granularity.GROUP:
            # Nothing but the scales of a block comes on top.
            assert facts.shared_bytes <= needed + (1024 if stored.granularity is Granularity.BLOCK else 0)
        grouped = stored.granularity is Granularity.GROUP
        assert build(one).metadata.name == ("fused_moe_kernel_gptq_awq" if grouped else "fused_moe_kernel")


@pytest.mark.parametrize(
    "tile",
    [Tile(16, 32, 256, 1, 4, 4), Tile(32, 128, 64, 16, 4, 5), Tile(128, 64, 128, 1, 8, 3), Tile(128, 128, 32, 1, 8, 2)],
    ids=str,
)
def test_the_formula_is_exact_for_fp8_channels(sglang_0_5_23: Path, tile: Tile) -> None:
    problem = LAYERS["fp8 channels"]
    facts = compile_facts(spec(sglang_0_5_23 / "sglang", problem, Variant(Gemm.GATE_UP, tile)))
    assert isinstance(facts, TileFacts), facts
    assert facts.shared_bytes == staged_shared_bytes(tile, problem.quantization)


@pytest.mark.parametrize("layer", ["fp8 channels", "fp8 blocks", "int8 weights", "int4 groups"])
def test_the_tensor_cores_get_what_is_stored(sglang_0_5_23: Path, layer: str) -> None:
    ptx = build(spec(sglang_0_5_23 / "sglang", LAYERS[layer], Variant(Gemm.GATE_UP, TILES[0]))).asm["ptx"]
    operands = "e4m3" if layer.startswith("fp8") else "bf16"
    assert any("mma.sync" in line and operands in line for line in ptx.splitlines())


def test_blocks_run_with_tma_for_down(sglang_0_5_23: Path) -> None:
    problem, tile = LAYERS["fp8 blocks"], Tile(64, 64, 128, 1, 4, 3, USE_TMA=True)
    facts = compile_facts(spec(sglang_0_5_23 / "sglang", problem, Variant(Gemm.DOWN, tile, sorted_intermediate=True)))
    assert isinstance(facts, TileFacts), facts
    assert facts.shared_bytes >= staged_shared_bytes(tile, problem.quantization)


@pytest.mark.parametrize("release", RELEASES)
def test_the_quantizer_compiles(sglang_trees: Trees, release: str) -> None:
    package = sglang_trees[release] / "sglang"
    for layer, warps in (("fp8 channels", 1), ("fp8 blocks", 1), ("int8 channels", 1), ("int8 blocks", 1)):
        problem = LAYERS[layer]
        compiled = build(spec(package, problem, QuantizeVariant(problem.intermediate)))
        assert compiled.metadata.name == "_per_token_group_quant_8bit"
        assert compiled.metadata.num_warps == warps
        # The code's own type: fp8 is converted, int8 cut off.
        converted = "e4m3x2" if problem.dtype == "fp8_w8a8" else "cvt.rzi"
        assert converted in compiled.asm["ptx"]
    # A long row is shared by more warps, up to eight.
    long = build(spec(package, LAYERS["fp8 channels"], QuantizeVariant(5000)))
    assert long.metadata.num_warps == 8
    assert load_quantize(find_sglang(package)).fn.__name__ == "_per_token_group_quant_8bit"


def test_a_and_b_are_swapped_on_sm90_alone(sglang_0_5_23: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, problem = sglang_0_5_23 / "sglang", LAYERS["fp8 channels"]

    def ptx(arch: int, block_n: int) -> str:
        return str(build(spec(package, problem, Variant(Gemm.GATE_UP, Tile(16, block_n, 128, 1)), arch)).asm["ptx"])

    tiles = list(itertools.product((90, 120), (32, 64)))
    swapped = {key: ptx(*key) for key in tiles}
    kernels = load_kernels(find_sglang(package))
    never = replace(kernels, swaps_ab=lambda _arch, _m, _n: False)
    monkeypatch.setattr("sm120tune.compiler.build.load_kernels", lambda _tree: never)
    plain = {key: ptx(*key) for key in tiles}
    assert {key for key in tiles if swapped[key] != plain[key]} == {(90, 64)}
    # A's 16 rows are too few for wgmma's 64 until B's 64 columns take their place.
    assert "wgmma.mma_async" in swapped[90, 64]
    assert "wgmma.mma_async" not in plain[90, 64]
