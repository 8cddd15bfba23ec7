"""Bind the kernels' parameters by name, as SGLang's own launcher would fill them.

The parameter list grows with about every second SGLang release, so nothing here counts positions: each parameter
of the loaded kernel is looked up by its name, and one that is neither known nor defaulted is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton.language as tl

from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import Granularity, Quantization
from sm120tune.tiles import Tile
from sm120tune.upstream.scales import (
    LEAST_ABSMAX,
    a_dtype,
    b_dtype,
    c_dtype,
    code_range,
    quantization_group,
    scale_arguments,
)
from sm120tune.upstream.source import Kernels
from sm120tune.upstream.values import Argument, Constant, Descriptor, Dynamic, Pointer, Real, Scalar, bind

GDC_EARLY_MAX_ROWS = 512
"""SGLang 0.5.23 lets the next kernel start early when A has at most this many rows."""

ACTIVATION_BLOCK = 512
"""BLOCK_SIZE of SGLang's ``act_and_mul_triton``."""

_PDL_MIN_ARCH = 90


@dataclass(frozen=True, order=True)
class Variant:
    """Everything that makes one binary of ``fused_moe_kernel`` differ from another, for one problem."""

    gemm: Gemm
    tile: Tile
    sorted_intermediate: bool = False
    """The intermediate is stored by expert (gate_up writes it so when the down row has USE_TMA)."""
    gdc_early: bool = False


@dataclass(frozen=True)
class LaunchFlags:
    """Kernel features of one SGLang release on one architecture."""

    pdl: bool
    """Programmatic dependent launch (USE_GDC and launch_pdl)."""


def launch_flags(kernel: Any, arch: int) -> LaunchFlags:
    """Return which optional features SGLang would use for ``kernel`` on ``arch`` (120 for SM120)."""
    return LaunchFlags(pdl="USE_GDC" in kernel.arg_names and arch >= _PDL_MIN_ARCH)


def rows_of_a(problem: MoEProblem, gemm: Gemm, m: int, block_size_m: int, sorted_intermediate: bool) -> int:
    """Return ``A.shape[0]`` of one launch: M tokens for gate_up, the intermediate's rows for down."""
    if gemm is Gemm.GATE_UP:
        return m
    return intermediate_rows(problem, m, block_size_m, sorted_intermediate)


def intermediate_rows(problem: MoEProblem, m: int, block_size_m: int, sorted_intermediate: bool) -> int:
    """Return the rows SGLang allocates for the intermediate: M*topk, plus padding when it is sorted."""
    rows = m * problem.topk
    if sorted_intermediate:
        rows += min(rows, problem.experts + 1) * (block_size_m - 1)
    return rows


def variant_for(
    problem: MoEProblem, gemm: Gemm, tile: Tile, *, m: int, sorted_intermediate: bool, pdl: bool
) -> Variant:
    """Return the binary that SGLang would run for this GEMM at this M."""
    rows = rows_of_a(problem, gemm, m, tile.BLOCK_SIZE_M, sorted_intermediate)
    return Variant(gemm, tile, sorted_intermediate, pdl and rows <= GDC_EARLY_MAX_ROWS)


def gemm_arguments(kernels: Kernels, problem: MoEProblem, variant: Variant, arch: int) -> dict[str, Argument]:
    """Map every parameter of the GEMM's kernel to its value for one variant.

    Raises UpstreamError naming a parameter that this version of sm120tune does not know.
    """
    stored, shape, tile = problem.quantization, problem.gemm(variant.gemm), variant.tile
    kernel = kernels.gemm_kernel(stored)
    grouped = stored.granularity is Granularity.GROUP
    down = variant.gemm is Gemm.DOWN
    a_tma = down and tile.USE_TMA
    pdl = launch_flags(kernel, arch).pdl
    # Packed weights are K bytes' worth of two; SGLang takes even_Ks from the packed width.
    stored_k = shape.k * stored.weight_bits // 8 if stored.weight_bits < 8 else shape.k
    a, b = a_dtype(stored), b_dtype(stored)
    known: dict[str, Argument] = {
        "a_ptr": Pointer(a),
        "a_desc": Descriptor(a, (tile.BLOCK_SIZE_M, tile.BLOCK_SIZE_K)) if a_tma else Constant(None),
        "b_ptr": Pointer(b),
        "b_desc": Descriptor(b, (1, tile.BLOCK_SIZE_N, tile.BLOCK_SIZE_K)) if tile.USE_TMA else Constant(None),
        "bias_ptr": Constant(None),
        "c_ptr": Pointer(c_dtype(stored)),
        "topk_weights_ptr": Pointer("fp32"),
        "sorted_token_ids_ptr": Pointer("i32"),
        "expert_ids_ptr": Pointer("i32"),
        "num_tokens_post_padded_ptr": Pointer("i32"),
        "add_mask_ptr": Constant(None),
        "N": Constant(shape.n) if grouped else Scalar(shape.n),
        "K": Constant(shape.k) if grouped else Scalar(shape.k),
        "EM": Dynamic(),
        "num_valid_tokens": Dynamic(),
        "stride_am": Scalar(shape.k),
        "stride_ak": Scalar(1),
        "stride_be": Scalar(shape.n * stored_k),
        "stride_bk": Scalar(1),
        "stride_bn": Scalar(stored_k),
        "stride_bias_e": Scalar(0),
        "stride_bias_n": Scalar(0),
        "stride_cm": Scalar(shape.n),
        "stride_cn": Scalar(1),
        **scale_arguments(stored, shape),
        "BLOCK_SIZE_M": Constant(tile.BLOCK_SIZE_M),
        "BLOCK_SIZE_N": Constant(tile.BLOCK_SIZE_N),
        "BLOCK_SIZE_K": Constant(tile.BLOCK_SIZE_K),
        "GROUP_SIZE_M": Constant(tile.GROUP_SIZE_M),
        "MUL_ROUTED_WEIGHT": Constant(shape.mul_routed_weight),
        "top_k": Constant(shape.top_k),
        "compute_type": Constant(tl.float16 if stored.dtype == "fp16" else tl.bfloat16),
        "even_Ks": Constant(stored_k % tile.BLOCK_SIZE_K == 0),
        "c_sorted": Constant(variant.sorted_intermediate and not down),
        "filter_expert": Constant(problem.expert_parallel),
        "swap_ab": Constant(
            stored.dtype == "fp8_w8a8" and kernels.swaps_ab(arch, tile.BLOCK_SIZE_M, tile.BLOCK_SIZE_N)
        ),
        "FUSE_ADD_TO_OUTPUT": Constant(False),
        "MASK_OUTPUT": Constant(False),
        "FUSE_SUM_ALL_REDUCE": Constant(False),
        "LORA_PRESERVE_BASE": Constant(False),
        "ROUTER_TOPK": Constant(problem.topk if down else 1),
        "USE_GDC": Constant(pdl),
        "GDC_EARLY": Constant(pdl and variant.gdc_early),
    }
    return bind(kernel, known)


def activation_arguments(
    kernel: Any, problem: MoEProblem, block_size_m: int, sorted_intermediate: bool
) -> dict[str, Argument]:
    """Map every parameter of ``act_and_mul_kernel`` to its value; raises UpstreamError like :func:`gemm_arguments`."""
    dtype = c_dtype(problem.quantization)
    known: dict[str, Argument] = {
        "gateup_output": Pointer(dtype),
        "down_input": Pointer(dtype),
        "hidden_size": Scalar(2 * problem.intermediate),
        "expert_ids_ptr": Pointer("i32"),
        "expert_step": Constant(block_size_m if sorted_intermediate else 1),
        "BLOCK_SIZE": Constant(ACTIVATION_BLOCK),
        "ACTIVATION_TYPE": Constant("silu"),
        "SWIGLU_LIMIT": Constant(0.0),
        "HAS_SWIGLU_LIMIT": Constant(False),
        "HAS_EXPERT_FILTER": Constant(problem.expert_parallel or sorted_intermediate),
    }
    return bind(kernel, known)


def quantize_arguments(kernel: Any, stored: Quantization, columns: int) -> dict[str, Argument]:
    """Map every parameter of SGLang's Triton quantization kernel to its value, for rows of ``columns``.

    One program quantizes one group of a row: the whole row for channel-wise weights.
    """
    group = quantization_group(stored, columns)
    low, high = code_range(stored)
    known: dict[str, Argument] = {
        "y_ptr": Pointer(c_dtype(stored)),
        "y_q_ptr": Pointer(a_dtype(stored)),
        "y_s_ptr": Pointer("fp32"),
        "y_stride": Scalar(group),
        "N": Scalar(group),
        "eps": Real(LEAST_ABSMAX),
        "bit8_min": Real(low),
        "bit8_max": Real(high),
        "BLOCK": Constant(1 << (group - 1).bit_length()),
    }
    return bind(kernel, known)
