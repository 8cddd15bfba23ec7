from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton
from compile_specs import PROBLEM, spec_of
from wheels import VERSIONS, Trees

from sm120tune.compiler import ActivationVariant, CompileSpec, Limits, TileFacts
from sm120tune.compiler.build import arguments_of, ast_source, build, compile_facts
from sm120tune.compiler.spec import over_limit
from sm120tune.devices import find_device
from sm120tune.failures import Failure, FailureKind
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile
from sm120tune.upstream import find_sglang
from sm120tune.upstream.arguments import Variant, launch_flags, variant_for
from sm120tune.upstream.source import load_kernels

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
SM120 = Limits(shared_memory_per_block=101376, registers_per_sm=65536)
SMALL = Tile(16, 32, 64, 8, 4, 3)
SMALL_TMA = Tile(16, 32, 64, 8, 4, 3, USE_TMA=True)


@pytest.fixture(autouse=True)
def all_stages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PTX is looked at here; a pool's processes keep the binary alone."""
    monkeypatch.delenv("TRITON_STORE_BINARY_ONLY", raising=False)
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO", raising=False)


PARALLEL = MoEProblem(experts=32, intermediate=256, hidden=2048, topk=8, router_experts=256, dtype="fp16")
ODD = MoEProblem(experts=8, intermediate=100, hidden=200, topk=2, router_experts=8)

PLAIN_BYTES = (3 - 1) * (16 + 32) * 64 * 2
VARIANTS: dict[str, tuple[MoEProblem, Variant | ActivationVariant, int, int]] = {
    # The last two are the least and the most bytes of shared memory; a descriptor adds 16 to 24.
    "gate_up": (PROBLEM, Variant(Gemm.GATE_UP, SMALL), PLAIN_BYTES, PLAIN_BYTES),
    "down": (PROBLEM, Variant(Gemm.DOWN, SMALL), PLAIN_BYTES, PLAIN_BYTES),
    "sorted gate_up": (PROBLEM, Variant(Gemm.GATE_UP, SMALL, sorted_intermediate=True), PLAIN_BYTES, PLAIN_BYTES),
    "down with TMA": (PROBLEM, Variant(Gemm.DOWN, SMALL_TMA, True), PLAIN_BYTES + 16, PLAIN_BYTES + 24),
    "gate_up with TMA": (PROBLEM, Variant(Gemm.GATE_UP, SMALL_TMA), PLAIN_BYTES + 16, PLAIN_BYTES + 24),
    "expert parallel, fp16": (PARALLEL, Variant(Gemm.DOWN, SMALL), PLAIN_BYTES, PLAIN_BYTES),
    "activation": (PROBLEM, ActivationVariant(0), 0, 0),
    "sorted activation": (PROBLEM, ActivationVariant(16, True), 0, 0),
    "expert parallel activation": (PARALLEL, ActivationVariant(0), 0, 0),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize("release", VERSIONS)
def test_every_release_compiles_for_cards_that_are_not_here(
    sglang_trees: Trees, release: str, arch: int, name: str
) -> None:
    problem, variant, least, most = VARIANTS[name]
    facts = compile_facts(spec_of(sglang_trees[release] / "sglang", variant, arch, problem))
    assert isinstance(facts, TileFacts), facts
    assert least <= facts.shared_bytes <= most
    assert 16 <= facts.registers <= 255
    assert facts.num_warps == 4
    # Triton 3.6 keeps 8 bytes of a descriptor on the stack, which is no spill yet.
    tma = isinstance(variant, Variant) and variant.tile.USE_TMA
    assert 0 <= facts.spill_bytes <= (16 if tma else 0)


@pytest.mark.parametrize(
    ("arch", "target", "instruction"), [(90, ".target sm_90a", "wgmma.mma_async"), (120, ".target sm_120a", "mma.sync")]
)
def test_the_binary_is_for_the_card(sglang_0_5_23: Path, arch: int, target: str, instruction: str) -> None:
    compiled = build(spec_of(sglang_0_5_23 / "sglang", Variant(Gemm.GATE_UP, Tile(64, 64, 64, 8, 4, 3)), arch))
    assert compiled.metadata.name == "fused_moe_kernel"
    assert target in compiled.asm["ptx"]
    assert instruction in compiled.asm["ptx"]
    assert ("wgmma" in compiled.asm["ptx"]) == (arch == 90)
    # SM90 keeps num_stages buffers for wgmma, which is why a formula is no verdict.
    buffers = 3 if arch == 90 else 2
    assert compiled.metadata.shared == buffers * (64 + 64) * 64 * 2


STAGED = [
    Tile(16, 16, 32, 1, 1, 2),
    Tile(16, 64, 128, 16, 4, 3),
    Tile(16, 128, 256, 1, 4, 2),
    Tile(32, 64, 64, 1, 4, 5),
    Tile(32, 32, 256, 1, 2, 3),
    Tile(64, 32, 128, 1, 8, 2),
    Tile(64, 128, 64, 8, 8, 4),
    Tile(128, 64, 32, 1, 4, 4),
    Tile(128, 128, 64, 1, 8, 3),
]


@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("tile", STAGED, ids=str)
def test_staged_shared_memory(sglang_0_5_23: Path, tile: Tile, gemm: Gemm) -> None:
    facts = compile_facts(spec_of(sglang_0_5_23 / "sglang", Variant(gemm, tile)))
    assert isinstance(facts, TileFacts), facts
    rows = tile.BLOCK_SIZE_M + tile.BLOCK_SIZE_N
    assert facts.shared_bytes == (tile.num_stages - 1) * rows * tile.BLOCK_SIZE_K * 2
    assert facts.num_warps == tile.num_warps


def test_sizes_that_no_block_divides(sglang_0_5_23: Path) -> None:
    def shared(k: int) -> int:
        problem = MoEProblem(experts=8, intermediate=96, hidden=k, topk=2, router_experts=8)
        facts = compile_facts(spec_of(sglang_0_5_23 / "sglang", Variant(Gemm.GATE_UP, SMALL), problem=problem))
        assert isinstance(facts, TileFacts), facts
        return facts.shared_bytes

    # Masked in the last step of the loop, but still copied 16 bytes at a time.
    assert shared(208) == PLAIN_BYTES
    # Too narrow for asynchronous copies, so that nothing is staged; the formula is an upper bound here.
    assert 0 < shared(200) < PLAIN_BYTES


def test_a_tile_that_does_not_fit(sglang_0_5_23: Path) -> None:
    # SGLang's default for fp8, 128x256x128 in one byte an element, has half as deep a counterpart in bf16.
    facts = compile_facts(spec_of(sglang_0_5_23 / "sglang", Variant(Gemm.GATE_UP, Tile(128, 256, 64, 32, 8, 4))))
    assert isinstance(facts, TileFacts), facts
    assert facts.shared_bytes == 147456
    failure = over_limit(facts.shared_bytes, facts.registers, facts.num_warps, SM120)
    assert failure == Failure(FailureKind.SHARED_MEMORY, "needs 147,456 of 101,376 B")
    assert over_limit(facts.shared_bytes, facts.registers, facts.num_warps, Limits(232448, 65536)) is None


@pytest.mark.parametrize(
    ("shared", "registers", "warps", "words"),
    [
        (101376, 255, 8, None),
        (101377, 32, 4, "needs 101,377 of 101,376 B"),
        (101376 + 24, 32, 4, "needs 101,400 of 101,376 B"),
        (0, 128, 16, None),
        (0, 129, 16, "needs 66,048 of 65,536 registers"),
        (0, 255, 16, "needs 130,560 of 65,536 registers"),
        # Shared memory is told first where both are too much.
        (200000, 255, 16, "needs 200,000 of 101,376 B"),
    ],
)
def test_over_limit(shared: int, registers: int, warps: int, words: str | None) -> None:
    failure = over_limit(shared, registers, warps, SM120)
    assert (failure.message if failure else None) == words
    if failure:
        assert failure.kind is (FailureKind.SHARED_MEMORY if " B" in failure.message else FailureKind.REGISTERS)


def test_the_limits_are_those_of_the_known_card() -> None:
    spec = find_device("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    assert spec.shared_memory_per_block == SM120.shared_memory_per_block


def test_spills_are_seen(sglang_0_5_23: Path) -> None:
    # 256 * 128 fp32 sums over 128 threads are 256 registers for each, of 255.
    facts = compile_facts(spec_of(sglang_0_5_23 / "sglang", Variant(Gemm.GATE_UP, Tile(256, 128, 32, 1, 4, 2))))
    assert isinstance(facts, TileFacts), facts
    assert facts.spill_bytes > 0
    # A quarter of it, and a quarter of the sums is what the registers hold at least.
    facts = compile_facts(spec_of(sglang_0_5_23 / "sglang", Variant(Gemm.GATE_UP, Tile(128, 64, 32, 1, 4, 2))))
    assert isinstance(facts, TileFacts), facts
    assert facts.spill_bytes == 0
    assert 64 < facts.registers <= 255


def source_of(spec: CompileSpec) -> tuple[list[str], Any]:
    kernels = load_kernels(find_sglang(spec.package))
    kernel, arguments = arguments_of(spec, kernels)
    return list(arguments), ast_source(kernel, arguments)


def hinted(names: list[str], source: Any) -> set[str]:
    assert all(hint == [["tt.divisibility", 16]] for hint in source.attrs.values())
    return {names[index] for (index,) in source.attrs}


GEMM_POINTERS = {"a_ptr", "b_ptr", "c_ptr", "topk_weights_ptr", "sorted_token_ids_ptr", "expert_ids_ptr"}
GEMM_POINTERS |= {"num_tokens_post_padded_ptr"}
NO_OFFSET = {"stride_asm", "stride_ask", "stride_bse", "stride_bsk", "stride_bsn", "stride_bias_e", "stride_bias_n"}


@pytest.mark.parametrize("release", VERSIONS)
def test_one_binary_serves_every_m(sglang_trees: Trees, release: str) -> None:
    for variant in (Variant(Gemm.GATE_UP, SMALL), Variant(Gemm.DOWN, SMALL_TMA, True)):
        names, source = source_of(spec_of(sglang_trees[release] / "sglang", variant))
        # Zero is divisible by 16 for Triton's JIT as well.
        strides = {"stride_am", "stride_be", "stride_bn", "stride_cm"}
        assert hinted(names, source) == GEMM_POINTERS | NO_OFFSET | strides | {"N", "K"}
        assert (source.signature["EM"], source.signature["num_valid_tokens"]) == ("i32", "i32")
        assert {"EM", "num_valid_tokens"} <= set(names)
    # As Triton's JIT has it: 1 is a constant, and a size that 16 does not divide has no hint.
    names, source = source_of(spec_of(sglang_trees[release] / "sglang", Variant(Gemm.GATE_UP, SMALL), problem=ODD))
    assert hinted(names, source) == GEMM_POINTERS | NO_OFFSET | {"stride_be"}
    assert source.signature["stride_ak"] == "constexpr"
    assert source.signature["K"] == "i32"


@pytest.mark.parametrize("release", VERSIONS)
def test_activation_source(sglang_trees: Trees, release: str) -> None:
    names, source = source_of(spec_of(sglang_trees[release] / "sglang", ActivationVariant(0)))
    assert hinted(names, source) == {"gateup_output", "down_input", "hidden_size", "expert_ids_ptr"}
    names, source = source_of(spec_of(sglang_trees[release] / "sglang", ActivationVariant(0), problem=ODD))
    assert hinted(names, source) == {"gateup_output", "down_input", "expert_ids_ptr"}


def test_a_weight_stride_beyond_32_bits(sglang_0_5_23: Path) -> None:
    wide = MoEProblem(experts=2, intermediate=40000, hidden=40000, topk=1, router_experts=2)
    spec = spec_of(sglang_0_5_23 / "sglang", Variant(Gemm.GATE_UP, SMALL), problem=wide)
    _, source = source_of(spec)
    assert source.signature["stride_be"] == "i64"
    assert source.signature["stride_bn"] == "i32"
    assert isinstance(compile_facts(spec), TileFacts)


@pytest.mark.parametrize("release", VERSIONS)
def test_gdc_makes_two_variants_only_where_the_release_has_it(sglang_trees: Trees, release: str) -> None:
    package = sglang_trees[release] / "sglang"
    kernel = load_kernels(find_sglang(package)).fused_moe
    has_gdc = release == "0.5.23"
    for arch, pdl in ((89, False), (90, has_gdc), (120, has_gdc)):
        assert launch_flags(kernel, arch).pdl is pdl
    variants = {
        variant_for(PROBLEM, gemm, SMALL, m=m, sorted_intermediate=False, pdl=has_gdc)
        for gemm in Gemm
        for m in (1, 2, 16, 64, 65, 512, 513, 16384)
    }
    assert len(variants) == (4 if has_gdc else 2)
    assert len({spec_of(package, variant).key for variant in variants}) == len(variants)
    for variant in variants:
        compiled = build(spec_of(package, variant))
        calls = re.findall(r"griddepcontrol\.\w+", compiled.asm["ptx"])
        starts_next, waits = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
        if not has_gdc:
            assert calls == []
        elif variant.gdc_early:
            assert calls[:2] == [waits, starts_next]
        else:
            assert (calls[0], calls[-1]) == (waits, starts_next)
            # Not before the sums are stored.
            assert compiled.asm["ptx"].rindex(starts_next) > compiled.asm["ptx"].rindex("st.global")
        assert bool(getattr(compiled.metadata, "launch_pdl", False)) is has_gdc


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        (Tile(16, 96, 64, 1, 4, 3), "power of 2"),
        (Tile(16, 32, 48, 1, 4, 3), "power of 2"),
        (Tile(16, 32, 8, 1, 4, 3), "K >= "),
        (Tile(16, 32, 64, 1, 3, 3), "power of 2"),
    ],
    ids=str,
)
def test_a_tile_that_triton_refuses(
    sglang_0_5_23: Path, capfd: pytest.CaptureFixture[str], tile: Tile, words: str
) -> None:
    failure = compile_facts(spec_of(sglang_0_5_23 / "sglang", Variant(Gemm.GATE_UP, tile)))
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.COMPILE_CRASH
    # One line that says what is wrong, not only where.
    assert words in failure.message
    assert "\n" not in failure.message
    assert capfd.readouterr() == ("", "")


def test_a_crash_inside_triton(sglang_0_5_23: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Triton 3.5 and 3.6 fail in a pass on bf16 with BLOCK_SIZE_M 256, N == K and 4 warps, and dump the module."""
    spec = spec_of(sglang_0_5_23 / "sglang", Variant(Gemm.GATE_UP, Tile(256, 64, 64, 1, 4, 2)))
    outcome = compile_facts(spec)
    assert capfd.readouterr() == ("", "")
    if (3, 5) <= TRITON < (3, 7):
        assert isinstance(outcome, Failure)
        assert outcome.kind is FailureKind.COMPILE_CRASH
        assert "PassManager::run failed" in outcome.message
        # What fd 2 said of it.
        assert "error: " in outcome.message.lower().split("passmanager::run failed")[1]
        with pytest.raises(RuntimeError):
            build(spec)
        assert len(capfd.readouterr().err) > 1000
    else:
        assert isinstance(outcome, TileFacts)
        assert outcome.shared_bytes == (256 + 64) * 64 * 2


def test_what_a_pass_prints_is_not_shown(
    sglang_0_5_23: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "dumped"))
    monkeypatch.setenv("MLIR_ENABLE_DUMP", "1")
    spec = spec_of(sglang_0_5_23 / "sglang", ActivationVariant(0))
    assert isinstance(compile_facts(spec), TileFacts)
    assert capfd.readouterr() == ("", "")
    # It does print, where nobody holds it back.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "shown"))
    build(spec)
    assert "IR Dump" in capfd.readouterr().err
