"""Bind the kernels' parameters by name, as SGLang's own launcher would fill them.

The parameter list grows with about every second SGLang release, so nothing here counts positions: each parameter
of the loaded kernel is looked up by its name, and one that is neither known nor defaulted is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile
from sm120tune.upstream.errors import UpstreamError

GDC_EARLY_MAX_ROWS = 512
"""SGLang 0.5.23 lets the next kernel start early when A has at most this many rows."""

ACTIVATION_BLOCK = 512
"""BLOCK_SIZE of SGLang's ``act_and_mul_triton``."""

_PDL_MIN_ARCH = 90
_TRITON_DTYPE = {"bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Pointer:
    """A device pointer, 16-byte aligned; ``name`` is what the launcher looks up its tensor by."""

    dtype: str


@dataclass(frozen=True)
class Descriptor:
    """A TMA tensor descriptor over a tensor with the given block."""

    dtype: str
    block: tuple[int, ...]


@dataclass(frozen=True)
class Scalar:
    """A runtime integer whose value is known when compiling, so that its divisibility is too."""

    value: int


@dataclass(frozen=True)
class Dynamic:
    """A runtime integer that changes with M: compiled without a hint so that one binary serves every M."""


@dataclass(frozen=True)
class Constant:
    """A compile-time constant."""

    value: Any


Argument = Pointer | Descriptor | Scalar | Dynamic | Constant


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


def gemm_arguments(kernel: Any, problem: MoEProblem, variant: Variant, arch: int) -> dict[str, Argument]:
    """Map every parameter of ``fused_moe_kernel`` to its value for one variant.

    Raises UpstreamError naming a parameter that this version of sm120tune does not know.
    """
    shape = problem.gemm(variant.gemm)
    tile = variant.tile
    dtype = _TRITON_DTYPE[problem.dtype]
    down = variant.gemm is Gemm.DOWN
    a_tma = down and tile.USE_TMA
    pdl = launch_flags(kernel, arch).pdl
    known: dict[str, Argument] = {
        "a_ptr": Pointer(dtype),
        "a_desc": Descriptor(dtype, (tile.BLOCK_SIZE_M, tile.BLOCK_SIZE_K)) if a_tma else Constant(None),
        "b_ptr": Pointer(dtype),
        "b_desc": Descriptor(dtype, (1, tile.BLOCK_SIZE_N, tile.BLOCK_SIZE_K)) if tile.USE_TMA else Constant(None),
        "bias_ptr": Constant(None),
        "c_ptr": Pointer(dtype),
        "a_scale_ptr": Constant(None),
        "b_scale_ptr": Constant(None),
        "topk_weights_ptr": Pointer("fp32"),
        "sorted_token_ids_ptr": Pointer("i32"),
        "expert_ids_ptr": Pointer("i32"),
        "num_tokens_post_padded_ptr": Pointer("i32"),
        "add_mask_ptr": Constant(None),
        "N": Scalar(shape.n),
        "K": Scalar(shape.k),
        "EM": Dynamic(),
        "num_valid_tokens": Dynamic(),
        "stride_am": Scalar(shape.k),
        "stride_ak": Scalar(1),
        "stride_be": Scalar(shape.n * shape.k),
        "stride_bk": Scalar(1),
        "stride_bn": Scalar(shape.k),
        "stride_bias_e": Scalar(0),
        "stride_bias_n": Scalar(0),
        "stride_cm": Scalar(shape.n),
        "stride_cn": Scalar(1),
        "stride_asm": Scalar(0),
        "stride_ask": Scalar(0),
        "stride_bse": Scalar(0),
        "stride_bsk": Scalar(0),
        "stride_bsn": Scalar(0),
        "group_n": Constant(0),
        "group_k": Constant(0),
        "BLOCK_SIZE_M": Constant(tile.BLOCK_SIZE_M),
        "BLOCK_SIZE_N": Constant(tile.BLOCK_SIZE_N),
        "BLOCK_SIZE_K": Constant(tile.BLOCK_SIZE_K),
        "GROUP_SIZE_M": Constant(tile.GROUP_SIZE_M),
        "MUL_ROUTED_WEIGHT": Constant(shape.mul_routed_weight),
        "top_k": Constant(shape.top_k),
        "compute_type": Constant(tl.bfloat16 if problem.dtype == "bf16" else tl.float16),
        "use_fp8_w8a8": Constant(False),
        "use_int8_w8a8": Constant(False),
        "use_int8_w8a16": Constant(False),
        "per_channel_quant": Constant(False),
        "even_Ks": Constant(shape.k % tile.BLOCK_SIZE_K == 0),
        "c_sorted": Constant(variant.sorted_intermediate and not down),
        "filter_expert": Constant(problem.expert_parallel),
        "swap_ab": Constant(False),
        "FUSE_ADD_TO_OUTPUT": Constant(False),
        "MASK_OUTPUT": Constant(False),
        "FUSE_SUM_ALL_REDUCE": Constant(False),
        "LORA_PRESERVE_BASE": Constant(False),
        "ROUTER_TOPK": Constant(problem.topk if down else 1),
        "USE_GDC": Constant(pdl),
        "GDC_EARLY": Constant(pdl and variant.gdc_early),
    }
    return _bind(kernel, known)


def activation_arguments(
    kernel: Any, problem: MoEProblem, block_size_m: int, sorted_intermediate: bool
) -> dict[str, Argument]:
    """Map every parameter of ``act_and_mul_kernel`` to its value; raises UpstreamError like :func:`gemm_arguments`."""
    dtype = _TRITON_DTYPE[problem.dtype]
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
    return _bind(kernel, known)


def _bind(kernel: Any, known: Mapping[str, Argument]) -> dict[str, Argument]:
    parameters = inspect.signature(kernel.fn).parameters
    bound: dict[str, Argument] = {}
    for name, parameter in parameters.items():
        if name in known:
            bound[name] = known[name]
        elif parameter.default is not inspect.Parameter.empty:
            bound[name] = Constant(parameter.default)
        else:
            raise UpstreamError(
                f"SGLang's {kernel.fn.__name__} has a parameter {name!r} that this version of sm120tune does not know; "
                "update sm120tune or give an older SGLang with --sglang"
            )
    return bound


def launch_values(
    arguments: Mapping[str, Argument], dynamic: Mapping[str, Any], descriptor: Callable[[Any, tuple[int, ...]], Any]
) -> list[Any]:
    """Return the positional values of a launch.

    ``dynamic`` holds the tensors by pointer name and the integers that change with M; ``descriptor`` makes a TMA
    descriptor from the tensor behind ``x_ptr`` for a parameter ``x_desc``.
    """
    values: list[Any] = []
    for name, argument in arguments.items():
        match argument:
            case Pointer() | Dynamic():
                values.append(dynamic[name])
            case Descriptor(block=block):
                values.append(descriptor(dynamic[name.replace("_desc", "_ptr")], block))
            case Scalar(value=value) | Constant(value=value):
                values.append(value)
    return values
