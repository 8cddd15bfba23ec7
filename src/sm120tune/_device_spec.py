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

        Only ``registers_per_sm`` may be left out. Figures that no card comes near are wrong: most of all those in
        another unit.
        """
        fields = Fields({"registers_per_sm": _REGISTERS_PER_SM, **data})
        name = fields.text("name")
        # It becomes part of file names, which have 255 bytes.
        printable = name.isascii() and name.isprintable() and "/" not in name
        if not name.strip() or len(name) > _LONGEST_NAME or not printable:
            raise ValueError(
                f"name must be a device name as torch reports it, of at most {_LONGEST_NAME} printable ASCII "
                f"characters without a slash, not {name!r:.60}"
            )
        capability = fields.items("capability")
        if len(capability) != 2 or not all(type(part) is int and 0 <= part < 100 for part in capability):
            raise ValueError(f"capability must be two integers such as [12, 0], not {capability!r:.60}")
        counts = {key: fields.integer(key, least=least, most=most) for key, (least, most) in COUNTS.items()}
        per_block, per_sm = counts["shared_memory_per_block"], counts["shared_memory_per_sm"]
        if per_block > per_sm:
            raise ValueError(f"shared_memory_per_block {per_block} is more than shared_memory_per_sm {per_sm}")
        spec = cls(
            name=name,
            capability=(capability[0], capability[1]),
            bandwidth=_rate(fields, "bandwidth"),
            bf16_flops=_rate(fields, "bf16_flops"),
            source=fields.text("source"),
            **counts,
        )
        fields.finish()
        return spec

    def check_capability(self) -> None:
        """Raise ValueError where a person's file has a capability that the compiler has no code for.

        Not of a card that is here: torch says what it is.
        """
        if self.capability not in CAPABILITIES:
            known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
            raise ValueError(f"capability must be one of {known}, not {'.'.join(map(str, self.capability))}")


def _rate(fields: Fields, key: str) -> float:
    value = fields.number(key)
    least, most, unit = _RATES[key]
    if not least <= value <= most:
        raise ValueError(f"{key} must be from {least:g} to {most:g}, not {value:g}: {unit}")
    return value


COUNTS = {
    "sm_count": (1, 1024),
    "shared_memory_per_block": (2**13, 2**20),
    "shared_memory_per_sm": (2**13, 2**20),
    "registers_per_sm": (2**12, 2**20),
    # At least one block of the most warps that are tuned.
    "max_warps_per_sm": (8, 128),
    "l2_bytes": (2**16, 2**33),
    "memory_bytes": (2**28, 2**44),
}
"""The least and the most of each whole figure; memory is in bytes."""

_RATES = {
    "bandwidth": (1e10, 1e14, "it is in bytes a second, for example 1.792e12 and not 1792"),
    "bf16_flops": (1e12, 1e17, "it is in FLOP a second, for example 467.8e12 and not 467.8"),
}


def is_bandwidth(value: float) -> bool:
    """Whether a card could have this memory bandwidth, bytes per second."""
    least, most, _ = _RATES["bandwidth"]
    return least <= value <= most


CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
"""Compute capabilities of the cards that run SGLang's bf16 kernels, from Ampere on, which Triton compiles for."""

_LONGEST_NAME = 100
