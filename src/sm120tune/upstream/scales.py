"""How SGLang passes quantized operands to its kernels: element types, scales and their strides, flags."""

from __future__ import annotations

from sm120tune.problem import GemmShape
from sm120tune.quantization import Granularity, Quantization
from sm120tune.upstream.values import Argument, Constant, Pointer, Scalar

_OPERAND = {"fp8_w8a8": "fp8e4nv", "int8_w8a8": "i8"}
LEAST_ABSMAX = 1e-10
"""SGLang's lower bound of the largest absolute value that a scale is made from."""
_RANGE = {"fp8_w8a8": (-448.0, 448.0), "int8_w8a8": (-128.0, 127.0)}


def c_dtype(stored: Quantization) -> str:
    """Return Triton's name of what a GEMM writes, and of activations before they are quantized."""
    return "fp16" if stored.dtype == "fp16" else "bf16"


def a_dtype(stored: Quantization) -> str:
    """Return Triton's name of an element of A."""
    return _OPERAND.get(stored.dtype, c_dtype(stored))


def b_dtype(stored: Quantization) -> str:
    """Return Triton's name of an element of B as it lies in memory; int4 lies there two to a byte."""
    if stored.granularity is Granularity.GROUP:
        return "u8"
    return "i8" if stored.dtype == "int8_w8a16" else a_dtype(stored)


def code_range(stored: Quantization) -> tuple[float, float]:
    """Return the least and the largest code of a quantized activation."""
    return _RANGE[stored.dtype]


def quantization_group(stored: Quantization, columns: int) -> int:
    """Return how many columns of a row of A share one scale."""
    return stored.block_shape[1] if stored.block_shape is not None else columns


def call_rounds(stored: Quantization) -> bool:
    """Whether SGLang's own call rounds int8 activations to the nearest code, instead of cutting them off.

    Where one scale holds for a whole row, its launcher quantizes with ``per_token_quant_int8``, which rounds (0.5.8 to
    0.5.23); the quantizers of groups, in Triton and in CUDA, convert without rounding.
    """
    return stored.dtype == "int8_w8a8" and stored.granularity is Granularity.CHANNEL


def scale_arguments(stored: Quantization, shape: GemmShape) -> dict[str, Argument]:
    """Return scales, zero points, their strides and the quantization flags, for both of SGLang's kernels.

    Scales of A: one number (tensor-wise), ``[rows, 1]`` or ``[rows, K / group]``. Scales of B: ``[E]``, ``[E, N, 1]``
    or ``[E, N / block_n, K / block_k]`` in fp32, for groups ``[E, N, K / group]`` in bf16; zero points as bytes beside.
    """
    granularity = stored.granularity
    block_n, block_k = stored.block_shape or (0, 0)
    quantized_a = stored.operand_bytes == 1
    k_groups = -(-shape.k // block_k) if block_k else 1
    rows_of_scales = -(-shape.n // block_n) if granularity is Granularity.BLOCK else shape.n
    has_rows = granularity not in {Granularity.NONE, Granularity.TENSOR}
    b_scale = Pointer("bf16" if granularity is Granularity.GROUP else "fp32") if stored.quantized else Constant(None)
    a_scale = Pointer("fp32") if quantized_a else Constant(None)
    per_row = quantized_a and has_rows
    # Two zero points of int4 share a byte, along N.
    zero_rows = shape.n * stored.weight_bits // 8
    zeros = (zero_rows * k_groups, 1, k_groups) if stored.zero_points else (0, 0, 0)
    return {
        "a_scale_ptr": a_scale,
        "b_scale_ptr": b_scale,
        "b_zp_ptr": Pointer("u8") if stored.zero_points else Constant(None),
        "stride_asm": Scalar(k_groups if per_row else 0),
        "stride_ask": Scalar(1 if per_row else 0),
        "stride_bse": Scalar(rows_of_scales * k_groups if has_rows else 0),
        "stride_bsk": Scalar(1 if has_rows else 0),
        "stride_bsn": Scalar(k_groups if has_rows else 0),
        "stride_bze": Scalar(zeros[0]),
        "stride_bzk": Scalar(zeros[1]),
        "stride_bzn": Scalar(zeros[2]),
        "group_n": Constant(block_n),
        "group_k": Constant(block_k),
        "group_size": Constant(block_k),
        "has_zp": Constant(stored.zero_points),
        "use_fp8_w8a8": Constant(stored.dtype == "fp8_w8a8"),
        "use_int8_w8a8": Constant(stored.dtype == "int8_w8a8"),
        "use_int8_w8a16": Constant(stored.dtype == "int8_w8a16"),
        "use_int4_w4a16": Constant(stored.dtype == "int4_w4a16"),
        "per_channel_quant": Constant(granularity is Granularity.CHANNEL and quantized_a),
    }
