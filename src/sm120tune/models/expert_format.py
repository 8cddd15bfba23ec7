"""How the routed experts of a checkpoint are stored, in the terms of SGLang's config files."""

from __future__ import annotations

from dataclasses import dataclass

from sm120tune.errors import UserError

MARLIN = "the Marlin MoE kernel"
FP4 = "the FP4 MoE kernels (FlashInfer's CUTLASS on SM120, its TRT-LLM on SM100, Marlin on SM90)"


@dataclass(frozen=True)
class ExpertFormat:
    """What of a quantization reaches the file name, or who serves the experts instead."""

    dtype: str
    block_shape: tuple[int, int] | None = None
    per_channel_quant: bool = False
    zero_points: bool = False
    served_elsewhere: str | None = None
    notes: tuple[str, ...] = ()


def block_shape_of(source: str, value: object) -> tuple[int, int] | None:
    """Return a config's pair of block sizes; raises UserError for anything but a pair of positive integers or None."""
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return (value[0], value[1])
    raise UserError(f"{source}: the quantization block {value!r} is no pair of positive integers, as [128, 128] is")


def group_shape_of(source: str, value: object, default: int | None = None) -> tuple[int, int] | None:
    """Return SGLang's block shape ``(0, group)`` of a config's group size; -1 and None stand for no groups.

    Raises UserError for anything but an integer.
    """
    size = default if value is None else value
    if size is None or size == -1:
        return None
    if type(size) is int and size > 0:
        return (0, size)
    raise UserError(f"{source}: the group size {value!r} is no positive integer")
