"""The description of one card, as shipped, as a person's file gives it, or as torch reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm120tune._jsonfile import Fields

_REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class DeviceSpec:
    """One card: the limits a kernel must keep and the peaks a roofline is drawn from."""

    name: str
    """Verbatim as ``torch.cuda.get_device_name`` reports it; SGLang's file names are made of it."""
    capability: tuple[int, int]
    sm_count: int
    shared_memory_per_block: int
    """Bytes one block can have with the opt-in attribute."""
    shared_memory_per_sm: int
    """Bytes; a resident block takes 1,024 of them besides its own."""
    max_warps_per_sm: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    """Peak memory bandwidth in bytes per second."""
    bf16_flops: float
    """Peak dense bf16 FLOP per second with fp32 accumulation."""
    source: str
    """Where each figure comes from: specified, seen on a card, derived or estimated."""
    registers_per_sm: int = _REGISTERS_PER_SM

    @property
    def arch(self) -> int:
        """The number that Triton's ``GPUTarget("cuda", arch, 32)`` takes, 120 for capability 12.0."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def file_name(self) -> str:
        """The name as SGLang's file names hold it."""
        return self.name.replace(" ", "_")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceSpec:
        """Build a spec from its fields; raises ValueError naming a missing, unknown or wrong one.

        Only ``registers_per_sm`` may be left out.
        """
        fields = Fields({"registers_per_sm": _REGISTERS_PER_SM, **data})
        name = fields.text("name")
        # It becomes part of a file name.
        if not name.strip() or "/" in name or "\0" in name:
            raise ValueError(f"name must be a device name as torch reports it, not {name!r}")
        capability = fields.items("capability")
        if len(capability) != 2 or not all(type(part) is int and part >= 0 for part in capability):
            raise ValueError(f"capability must be two integers such as [12, 0], not {capability!r:.60}")
        counts = {key: fields.integer(key, least=1) for key in COUNTS}
        spec = cls(
            name=name,
            capability=(capability[0], capability[1]),
            bandwidth=_positive(fields, "bandwidth"),
            bf16_flops=_positive(fields, "bf16_flops"),
            source=fields.text("source"),
            **counts,
        )
        fields.finish()
        return spec


def _positive(fields: Fields, key: str) -> float:
    value = fields.number(key)
    if value <= 0:
        raise ValueError(f"{key} must be positive, not {value!r}")
    return value


COUNTS = (
    "sm_count",
    "shared_memory_per_block",
    "shared_memory_per_sm",
    "registers_per_sm",
    "max_warps_per_sm",
    "l2_bytes",
    "memory_bytes",
)
