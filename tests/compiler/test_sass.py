"""Machine code of SGLang's real kernel, compiled for SM120 and SM90."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compile_specs import spec_of
from triton import knobs

from sm120tune.compiler.build import build
from sm120tune.compiler.disassemble import NoDisassemblyError, machine_code, read_machine_code
from sm120tune.compiler.facts import cubin_path, read_facts
from sm120tune.compiler.sass import MachineCode, bytes_per_thread, read_sass
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import Variant

LAYER: dict[str, Any] = {"experts": 256, "intermediate": 256, "hidden": 2048, "topk": 8, "router_experts": 256}
BF16 = MoEProblem(**LAYER)
FP8 = MoEProblem(**LAYER, dtype="fp8_w8a8")
FP8_BLOCK = MoEProblem(**LAYER, dtype="fp8_w8a8", block_shape=(128, 128))
INT8 = MoEProblem(**LAYER, dtype="int8_w8a8", per_channel_quant=True)
INT4 = MoEProblem(**LAYER, dtype="int4_w4a16", block_shape=(0, 128))


@functools.cache
def compiled(package: Path, problem: MoEProblem, tile: Tile, arch: int, gemm: Gemm = Gemm.GATE_UP) -> Any:
    return build(spec_of(package, Variant(gemm, tile), arch, problem))


def code_of(package: Path, problem: MoEProblem, tile: Tile, arch: int = 120, gemm: Gemm = Gemm.GATE_UP) -> MachineCode:
    return read_machine_code(compiled(package, problem, tile, arch, gemm))


PLAIN = [BF16, FP8, FP8_BLOCK, INT8]
"""Their K is an argument of the kernel, so that nothing is unrolled."""


@pytest.mark.parametrize("arch", [120, 90])
@pytest.mark.parametrize("problem", PLAIN, ids=str)
@pytest.mark.parametrize("tile", [Tile(16, 32, 64, 1, 4, 3), Tile(64, 128, 64, 1, 8, 3)], ids=str)
def test_main_loop_holds_the_products_of_one_step(
    sglang_0_5_23: Path, problem: MoEProblem, tile: Tile, arch: int
) -> None:
    code = code_of(sglang_0_5_23, problem, tile, arch)
    assert 0 < code.loop_instructions < code.instructions
    assert code.products is not None
    assert code.products * tile.num_warps == tile.BLOCK_SIZE_M * tile.BLOCK_SIZE_N * tile.BLOCK_SIZE_K
    assert code.copies
    assert code.barriers


@pytest.mark.parametrize(("warps", "times"), [(4, 2), (8, 4)])
def test_a_tile_too_small_for_its_warps_computes_products_again(sglang_0_5_23: Path, warps: int, times: int) -> None:
    code = code_of(sglang_0_5_23, BF16, Tile(16, 16, 32, 1, warps, 3))
    assert code.products is not None
    assert code.products * warps == times * 16 * 16 * 32


@pytest.mark.parametrize("arch", [120, 90])
def test_the_loop_is_the_one_that_another_disassembler_shows(sglang_0_5_23: Path, arch: int) -> None:
    """``cuobjdump -sass`` has addresses for labels: the loop is what lies between a branch back and its target."""
    kernel = compiled(sglang_0_5_23, BF16, Tile(64, 64, 32, 1, 4, 3), arch)
    dump = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-sass", str(cubin_path(kernel))], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;/]*);", dump)
    program = {int(address, 16): text for address, text in found if not text.startswith("NOP")}
    loops = [
        [text for at, text in program.items() if int(target[1], 16) <= at <= address]
        for address, text in program.items()
        if "BRA" in text and (target := re.search(r"(0x[0-9a-f]+)", text)) and int(target[1], 16) < address
    ]
    (loop,) = [loop for loop in loops if any("MMA" in text for text in loop)]
    code = read_machine_code(kernel)
    assert code.loop_instructions == len(loop)
    assert sum(code.mma.values()) == sum("MMA" in text for text in loop)
    assert sum(code.copies.values()) == sum("LDGSTS" in text for text in loop) == 4
    assert code.instructions == len(program)


def test_short_bf16_rows_still_come_in_copies_of_16_bytes(sglang_0_5_23: Path) -> None:
    code = code_of(sglang_0_5_23, BF16, Tile(64, 64, 32, 1, 4, 3))
    # 2 operands of 64 rows, 64 bytes each, by 128 threads.
    assert dict(code.copies) == {"LDGSTS.E.BYPASS.128": 2 * 64 * 64 // (128 * 16)}
    assert dict(code.mma) == {"HMMA.16816.F32.BF16": 16}
    assert set(code.matrix_loads) == {"LDSM.16.M88.4"}
    assert not code.shared_loads
    assert not code.global_loads
    assert not code.local_loads


def test_copies_are_as_wide_as_the_bytes_of_a_thread(sglang_0_5_23: Path) -> None:
    widths = {}
    for warps, problem in ((4, FP8), (8, FP8), (8, BF16)):
        code = code_of(sglang_0_5_23, problem, Tile(16, 16, 32, 1, warps, 3))
        widths[problem.dtype, warps] = {bytes_per_thread(name) for name in code.copies}
        assert bool(code.copies) == (not code.shared_stores)
    # With 8 warps a thread has two bytes of fp8, and cp.async moves no less than four.
    assert widths == {("fp8_w8a8", 4): {4}, ("fp8_w8a8", 8): set(), ("bf16", 8): {4}}


def test_a_large_tile_on_few_warps_spills_in_every_step(sglang_0_5_23: Path) -> None:
    tile = Tile(128, 256, 64, 1, 4, 2)
    kernel = compiled(sglang_0_5_23, BF16, tile, 120)
    code = read_machine_code(kernel)
    assert read_facts(kernel).spill_bytes > 1000
    assert code.spills_in_loop
    assert 100 < code.loop_local_loads < code.local_loads
    assert 100 < code.loop_local_stores < code.local_stores


def test_a_stack_need_not_mean_spills_in_the_loop(sglang_0_5_23: Path) -> None:
    kernel = compiled(sglang_0_5_23, FP8_BLOCK, Tile(64, 128, 128, 1, 4, 3), 120)
    code = read_machine_code(kernel)
    assert bool(read_facts(kernel).spill_bytes) == bool(code.local_loads + code.local_stores)
    assert not code.spills_in_loop


def test_fp8_has_its_own_products_on_both_architectures(sglang_0_5_23: Path) -> None:
    tile = Tile(64, 64, 128, 1, 4, 3)
    assert list(code_of(sglang_0_5_23, FP8, tile).mma) == ["QMMA.16832.F32.E4M3.E4M3"]
    assert list(code_of(sglang_0_5_23, FP8, tile, 90).mma) == ["QGMMA.64x64x32.F32.E4M3.E4M3"]
    assert list(code_of(sglang_0_5_23, INT8, tile).mma) == ["IMMA.16832.S8.S8.SAT"]
    assert list(code_of(sglang_0_5_23, BF16, tile, 90).mma) == ["HGMMA.64x64x16.F32.BF16"]


def test_small_fp8_tiles_of_sm90_are_multiplied_as_fp16(sglang_0_5_23: Path) -> None:
    tile = Tile(16, 32, 64, 1, 4, 3)
    unpacked = code_of(sglang_0_5_23, FP8, tile, 90)
    assert list(unpacked.mma) == ["HMMA.16816.F32"]
    assert list(unpacked.conversions) == ["F2FP.F16.E4M3.UNPACK_B"]
    native = code_of(sglang_0_5_23, FP8, tile)
    assert list(native.mma) == ["QMMA.16832.F32.E4M3.E4M3"]
    assert not native.conversions


def test_int4_weights_are_loaded_byte_by_byte(sglang_0_5_23: Path) -> None:
    code = code_of(sglang_0_5_23, INT4, Tile(64, 64, 64, 1, 4, 3))
    assert list(code.mma) == ["HMMA.16816.F32.BF16"]
    # Of the operands A alone is copied: 64 rows of 128 bytes.
    assert dict(code.copies) == {"LDGSTS.E.BYPASS.128": 64 * 128 // (128 * 16)}
    assert code.global_loads["LDG.E.U8"] >= 64 * 64 // 128
    assert code.conversions


@pytest.mark.parametrize("arch", [120, 90])
def test_tma_rows_copy_by_descriptor_and_their_waits_are_of_the_loop(sglang_0_5_23: Path, arch: int) -> None:
    tile = Tile(64, 128, 64, 1, 4, 3, USE_TMA=True)
    code = code_of(sglang_0_5_23, BF16, tile, arch, Gemm.DOWN)
    assert dict(code.copies) == {"UTMALDG.2D": 1, "UTMALDG.3D": 1}
    assert code.products is not None
    assert code.products * 4 == 64 * 128 * 64
    # The wait that failed once goes on out of line, behind the end of the program; nothing else of that is.
    assert code.loop_instructions < code.instructions / 2


def test_k_of_one_step_leaves_no_loop(sglang_0_5_23: Path) -> None:
    layer = MoEProblem(**{**LAYER, "intermediate": 64}, dtype="int4_w4a16", block_shape=(0, 64))
    code = code_of(sglang_0_5_23, layer, Tile(16, 32, 64, 1, 4, 2), gemm=Gemm.DOWN)
    assert code.loop_instructions == code.loop_local_loads == 0
    assert not code.spills_in_loop
    assert code.mma


def test_what_never_runs_is_not_counted() -> None:
    text = """
        /*0000*/                   MOV R1, 0x1 ;
.L_x_0:
        /*0010*/              @!PT LDS RZ, [RZ] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/              @!P1 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_1:
        /*0060*/                   LDS R3, [R2] ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
        /*0090*/                   NOP;
"""
    code = read_sass(text)
    assert (code.instructions, code.loop_instructions) == (9, 6)
    assert dict(code.shared_loads) == {"LDS": 1}


def test_threads_that_went_apart_meet_where_it_was_agreed() -> None:
    text = """
.L_x_0:
        /*0000*/                   BSSY.RECONVERGENT B0, `(.L_x_1) ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
        /*0020*/                   BSYNC.RECONVERGENT B0 ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/                   BRA.U !UP0, `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   LDG.E R3, desc[UR4][R2.64] ;
        /*0070*/                   BSYNC.RECONVERGENT B0                 ?trans1;
        /*0080*/                   LDL R3, [R1] ;
        /*0090*/                   EXIT ;
"""
    code = read_sass(text)
    # Not fallen through to what follows the last one, which leads nowhere.
    assert dict(code.global_loads) == {"LDG.E": 1}
    assert (code.loop_local_loads, code.local_loads) == (0, 1)
    assert code.loop_instructions == 7


def test_the_tool_may_be_missing_or_not_understand(
    sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = compiled(sglang_0_5_23, BF16, Tile(16, 32, 64, 1, 4, 3), 120)
    with pytest.raises(ValueError, match="no instruction"):
        read_sass("\t.target\tsm_120a\n")
    damaged = tmp_path / "a.cubin"
    damaged.write_bytes(cubin_path(kernel).read_bytes()[:1000])
    monkeypatch.setattr(kernel, "metadata_group", {"a.cubin": str(damaged)})
    with pytest.raises(NoDisassemblyError, match=r"a\.cubin"):
        read_machine_code(kernel)
    monkeypatch.setattr(vars(type(knobs.nvidia))["nvdisasm"], "default_path", str(tmp_path / "none"))
    with pytest.raises(NoDisassemblyError, match="has no nvdisasm"):
        read_machine_code(kernel)


def test_the_environment_is_as_before(sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    monkeypatch.delenv("TRITON_STORE_BINARY_ONLY", raising=False)
    spec = spec_of(sglang_0_5_23, Variant(Gemm.DOWN, Tile(16, 32, 64, 1, 4, 3)))
    assert machine_code(spec, tmp_path).mma
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
    assert "TRITON_STORE_BINARY_ONLY" not in os.environ
    assert list(tmp_path.rglob("*.cubin"))
