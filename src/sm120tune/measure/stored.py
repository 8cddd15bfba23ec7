"""Weights and activations as SGLang stores them: random ones to time with, and their values to check against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sm120tune.quantization import Granularity, Quantization
from sm120tune.upstream.scales import LEAST_ABSMAX, call_rounds, code_range, quantization_group

_COMPUTE = {"fp16": torch.float16}
_STATIC_RANGE = 16.0
"""What the largest code of a tensor-wise quantized activation stands for, as a checkpoint's static scale would say."""
_CODE_SPREAD = {"fp8_w8a8": 64.0, "int8_w8a8": 32.0, "int8_w8a16": 32.0, "int4_w4a16": 4.6}
"""Standard deviation of the random codes: well inside their range; that of uniform 4-bit numbers for int4."""
_UINT8_ZERO, _INT4_ZERO = 128, 8
"""What SGLang's kernel subtracts from grouped codes without zero points."""


@dataclass(frozen=True)
class Activations:
    """Rows of A: codes ``[rows, K]``, and fp32 scales ``[rows, K / group]`` or one where they are quantized."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None

    def first(self, rows: int) -> Activations:
        """Return the first rows."""
        scales = self.scales
        if scales is not None and scales.dim() == 2:
            scales = scales[:rows]
        return Activations(self.codes[:rows], scales)

    def values(self) -> torch.Tensor:
        """Return what the rows stand for, fp32 ``[rows, K]``."""
        wide = self.codes.float()
        if self.scales is None:
            return wide
        if self.scales.dim() == 1:
            return wide * self.scales
        return wide * self.scales.repeat_interleave(wide.shape[1] // self.scales.shape[1], dim=1)


@dataclass(frozen=True)
class Weights:
    """One GEMM's weight of all experts, ``[E, N, K]`` codes (int4: two to a byte along K), scales and zero points."""

    stored: Quantization
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    def expert(self, index: int) -> torch.Tensor:
        """Return what one expert's weight stands for, fp32 ``[N, K]``, rounded where SGLang's kernel rounds it."""
        codes = self.codes[index]
        if self.scales is None:
            return codes.float()
        scale = self.scales[index].float()
        match self.stored.granularity:
            case Granularity.BLOCK:
                block_n, block_k = self.stored.block_shape or (1, 1)
                wide = scale.repeat_interleave(block_n, dim=0).repeat_interleave(block_k, dim=1)
                return codes.float() * wide[: codes.shape[0], : codes.shape[1]]
            case Granularity.GROUP:
                group = (self.stored.block_shape or (0, 1))[1]
                numbers, zero = self._unpacked(index)
                wide = scale.repeat_interleave(group, dim=1)[:, : numbers.shape[1]]
                return ((numbers - zero) * wide).to(compute_dtype(self.stored)).float()
            case _:
                return codes.float() * scale

    def _unpacked(self, index: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        codes = self.codes[index]
        group = (self.stored.block_shape or (0, 1))[1]
        if self.stored.weight_bits == 8:
            if self.zeros is None:
                return codes.float(), float(_UINT8_ZERO)
            return codes.float(), self.zeros[index].float().repeat_interleave(group, dim=1)
        numbers = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(1).float()
        if self.zeros is None:
            return numbers, float(_INT4_ZERO)
        packed = self.zeros[index]
        zero = torch.stack([packed & 0xF, packed >> 4], dim=1).flatten(0, 1).float()
        return numbers, zero.repeat_interleave(group, dim=1)


def compute_dtype(stored: Quantization) -> torch.dtype:
    """Return the dtype of everything that a GEMM writes."""
    return _COMPUTE.get(stored.dtype, torch.bfloat16)


def operand_dtype(stored: Quantization) -> torch.dtype:
    """Return the dtype of an element of A."""
    quantized = {"fp8_w8a8": torch.float8_e4m3fn, "int8_w8a8": torch.int8}
    return quantized.get(stored.dtype, compute_dtype(stored))


def quantize_rows(x: torch.Tensor, stored: Quantization, *, as_call: bool = False) -> Activations:
    """Quantize rows ``[rows, K]`` as SGLang's Triton kernel does; where A is not quantized they are returned as given.

    ``scale = max(|x|) / largest code`` over each group, ``code = clamp(x / scale)``, rounded by the conversion (int8
    is cut off). Tensor-wise quantization uses one static scale. With ``as_call`` it is done as SGLang's own fused_moe
    does: one static scale is applied in fp32, and int8 is rounded where :func:`call_rounds` says so.
    """
    if stored.operand_bytes != 1:
        return Activations(x)
    low, high = code_range(stored)
    if stored.granularity is Granularity.TENSOR:
        x = x.float() if as_call else x
        scaled = torch.empty_like(x)
        codes = torch.empty(x.shape, dtype=operand_dtype(stored), device=x.device)
        return quantize_static(x, scaled, codes, static_scale(stored, x.device), stored)
    groups = x.float().unflatten(1, (-1, quantization_group(stored, x.shape[1])))
    scales = groups.abs().amax(dim=2).clamp_min(LEAST_ABSMAX) / high
    exact = (groups * (1.0 / scales)[..., None]).clamp(low, high).flatten(1)
    if as_call and call_rounds(stored):
        exact.round_()
    return Activations(exact.to(operand_dtype(stored)), scales)


def static_scale(stored: Quantization, device: torch.device) -> torch.Tensor:
    """Return the one scale of tensor-wise quantized activations, fp32 ``[1]``."""
    return torch.full((1,), _STATIC_RANGE / code_range(stored)[1], device=device)


def quantize_static(
    x: torch.Tensor, scaled: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, stored: Quantization
) -> Activations:
    """Write the codes of ``x`` for one static scale; nothing is allocated, so that a CUDA graph can hold it."""
    low, high = code_range(stored)
    torch.mul(x, high / _STATIC_RANGE, out=scaled)
    codes.copy_(scaled.clamp_(low, high))
    return Activations(codes, scale)


def empty_activations(rows: int, columns: int, stored: Quantization, device: torch.device) -> Activations:
    """Return room for quantized rows, zeros with scales of one."""
    codes = torch.zeros((rows, columns), dtype=operand_dtype(stored), device=device)
    if stored.granularity is Granularity.TENSOR:
        return Activations(codes, static_scale(stored, device))
    groups = columns // quantization_group(stored, columns)
    return Activations(codes, torch.ones((rows, groups), device=device))


def random_weights(stored: Quantization, experts: int, n: int, k: int, generator: torch.Generator) -> Weights:
    """Return random weights whose values have a standard deviation of about ``1 / sqrt(K)``.

    So every activation stays near 1 whatever the shape. Scales differ by up to four times, at random: a kernel that
    takes a neighbour's scale is far off.
    """
    device, spread = generator.device, 1 / math.sqrt(k)
    if not stored.quantized:
        plain = torch.empty((experts, n, k), dtype=compute_dtype(stored), device=device)
        return Weights(stored, plain.normal_(0.0, spread, generator=generator))
    width = k * stored.weight_bits // 8
    grouped = stored.granularity is Granularity.GROUP
    codes = torch.empty((experts, n, width), dtype=torch.uint8 if grouped else _weight_dtype(stored), device=device)
    for part in codes:
        part.copy_(_random_codes(stored, n, width, generator))
    factor = torch.rand(_scale_shape(stored, experts, n, k), device=device, generator=generator) * 2 - 1
    scales = torch.exp2(factor) * (spread / _CODE_SPREAD[stored.dtype])
    zeros = _random_zeros(stored, scales.shape, generator) if stored.zero_points else None
    return Weights(stored, codes, scales.to(compute_dtype(stored)) if grouped else scales, zeros)


def _weight_dtype(stored: Quantization) -> torch.dtype:
    return torch.int8 if stored.dtype == "int8_w8a16" else operand_dtype(stored)


def _random_codes(stored: Quantization, n: int, width: int, generator: torch.Generator) -> torch.Tensor:
    if stored.weight_bits == 4:
        return torch.randint(0, 256, (n, width), device=generator.device, generator=generator)
    codes = torch.randn((n, width), device=generator.device, generator=generator) * _CODE_SPREAD[stored.dtype]
    if stored.granularity is Granularity.GROUP:
        return (codes + _UINT8_ZERO).round_().clamp_(0, 255)
    return codes.clamp_(-448, 448) if stored.dtype == "fp8_w8a8" else codes.round_().clamp_(-127, 127)


def _scale_shape(stored: Quantization, experts: int, n: int, k: int) -> tuple[int, ...]:
    block_n, block_k = stored.block_shape or (0, 0)
    match stored.granularity:
        case Granularity.TENSOR:
            return (experts,)
        case Granularity.CHANNEL:
            return (experts, n, 1)
        case Granularity.BLOCK:
            return (experts, -(-n // block_n), -(-k // block_k))
        case _:
            return (experts, n, -(-k // block_k))


def _random_zeros(stored: Quantization, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    experts, n, groups = shape

    def near(middle: int, reach: int, rows: int) -> torch.Tensor:
        size = (experts, rows, groups)
        return torch.randint(middle - reach, middle + reach, size, generator=generator, device=generator.device)

    if stored.weight_bits == 8:
        return near(_UINT8_ZERO, 8, n).to(torch.uint8)
    return (near(_INT4_ZERO, 2, n // 2) | near(_INT4_ZERO, 2, n // 2) << 4).to(torch.uint8)
