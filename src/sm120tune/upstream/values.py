"""What a kernel's parameter can be given, bound by name from the kernel's own signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sm120tune.upstream.errors import UpstreamError


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
class Real:
    """A runtime floating-point number, which Triton does not specialize on."""

    value: float


@dataclass(frozen=True)
class Dynamic:
    """A runtime integer that changes with M: compiled without a hint so that one binary serves every M."""


@dataclass(frozen=True)
class Constant:
    """A compile-time constant."""

    value: Any


Argument = Pointer | Descriptor | Scalar | Real | Dynamic | Constant


def bind(kernel: Any, known: Mapping[str, Argument]) -> dict[str, Argument]:
    """Return the kernel's parameters in order with their values; raises UpstreamError for one that nobody knows."""
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
            case Scalar(value=value) | Real(value=value) | Constant(value=value):
                values.append(value)
    return values
