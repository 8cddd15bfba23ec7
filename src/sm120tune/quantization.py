"""How weights and activations of a layer are stored: what each dtype of SGLang's fused-MoE kernels needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sm120tune.errors import UserError

DTYPES = ("bf16", "fp16", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")
"""What SGLang's two kernels run; the quantized ones with bf16 activations in and out."""

UNQUANTIZED = ("bf16", "fp16")

GROUP_SIZES = (32, 64, 128)
"""Group sizes of int4 and grouped int8 weights in checkpoints that SGLang loads."""


BLOCK_K_MULTIPLE = 32
"""A block along K holds whole steps of the shortest tile that is tuned."""


class Granularity(enum.StrEnum):
    """What shares one weight scale."""

    NONE = "none"
    TENSOR = "tensor"
    CHANNEL = "channel"
    """One output column; an activation then has one scale per token."""
    BLOCK = "block"
    """``block_shape`` rows by columns; an activation then has one scale per token and ``block_shape[1]`` columns."""
    GROUP = "group"
    """``block_shape[1]`` inputs of one output column, dequantized on the fly (GPTQ and AWQ checkpoints)."""


@dataclass(frozen=True)
class Quantization:
    """The storage of one layer; ``block_shape`` is SGLang's, ``(0, group)`` for groups."""

    dtype: str = "bf16"
    block_shape: tuple[int, int] | None = None
    per_channel_quant: bool = False
    zero_points: bool = False

    def __post_init__(self) -> None:
        """Raise UserError for a combination that SGLang's kernels do not have."""
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype} is unknown; choose one of {', '.join(DTYPES)}")
        if not self.quantized and (self.block_shape or self.per_channel_quant or self.zero_points):
            raise UserError(f"--dtype {self.dtype} is not quantized; drop --block-shape, --group-size and the like")
        if self.block_shape is not None and (self.block_shape[0] < 0 or self.block_shape[1] < 1):
            raise UserError(f"--block-shape {self._shape_text} is no pair of positive integers")
        if self.block_shape is not None and self.block_shape[0] != 0 and self.block_shape[1] % BLOCK_K_MULTIPLE:
            # SGLang's kernel loads one scale a step, and no step is shorter.
            raise UserError(f"--block-shape {self._shape_text}: its second number must be a multiple of 32")
        if self.block_shape is not None and self.per_channel_quant:
            raise UserError(f"--block-shape {self._shape_text} and --per-channel exclude each other")
        if self.weight_only and self.per_channel_quant:
            raise UserError(f"--dtype {self.dtype} has no --per-channel in SGLang; its plain int8 is by channel anyway")
        if self.weight_only and self.block_shape is not None and self.block_shape[0] != 0:
            raise UserError(f"--dtype {self.dtype} has groups, not --block-shape {self._shape_text}: give --group-size")
        if self.dtype.endswith("w8a8") and self.block_shape is not None and self.block_shape[0] == 0:
            raise UserError(f"--dtype {self.dtype} has no --group-size {self.block_shape[1]}: give --block-shape")
        if self.dtype == "int4_w4a16" and self.block_shape is None:
            raise UserError("--dtype int4_w4a16 needs --group-size, for example 128")
        if self.dtype == "int8_w8a8" and self.block_shape is None and not self.per_channel_quant:
            raise UserError("--dtype int8_w8a8 needs --per-channel or --block-shape: SGLang has no other int8")
        if self.zero_points and self.granularity is not Granularity.GROUP:
            raise UserError(f"--zero-points with --dtype {self.dtype} belong to grouped weights: give --group-size")

    @property
    def _shape_text(self) -> str:
        return ",".join(map(str, self.block_shape or ()))

    @property
    def quantized(self) -> bool:
        """Whether weights have scales."""
        return self.dtype not in UNQUANTIZED

    @property
    def weight_only(self) -> bool:
        """Whether activations stay in bf16."""
        return self.dtype.endswith("a16")

    @property
    def granularity(self) -> Granularity:
        """What shares one weight scale."""
        if not self.quantized:
            return Granularity.NONE
        if self.block_shape is not None:
            return Granularity.BLOCK if self.block_shape[0] else Granularity.GROUP
        channel = self.per_channel_quant or self.dtype == "int8_w8a16"
        return Granularity.CHANNEL if channel else Granularity.TENSOR

    @property
    def weight_bits(self) -> int:
        """Bits of one weight."""
        if self.dtype == "int4_w4a16":
            return 4
        return 8 if self.quantized else 16

    @property
    def operand_bytes(self) -> int:
        """Bytes of one element of A as a GEMM reads it."""
        return 1 if self.dtype.endswith("w8a8") else 2

    @property
    def output_bytes(self) -> int:
        """Bytes of one element of what a GEMM writes: bf16 or fp16."""
        return 2

    def scale_bytes(self, n: int, k: int) -> int:
        """Return the bytes of the scales and zero points of one expert's ``[n, k]`` weight."""
        match self.granularity:
            case Granularity.NONE:
                return 0
            case Granularity.TENSOR:
                return 4
            case Granularity.CHANNEL:
                return 4 * n
            case Granularity.BLOCK:
                block_n, block_k = self.block_shape or (1, 1)
                return 4 * -(-n // block_n) * -(-k // block_k)
            case Granularity.GROUP:
                groups = n * -(-k // (self.block_shape or (0, 1))[1])
                return groups * 2 + (groups * self.weight_bits // 8 if self.zero_points else 0)
