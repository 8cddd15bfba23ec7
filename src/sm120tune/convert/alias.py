"""Which cards are alike enough that one may run the other's rows unmeasured."""

from __future__ import annotations

from sm120tune.devices import DeviceSpec, find_device, known_device
from sm120tune.errors import UserError

_LIKE = 0.10
"""Largest difference in the number of SMs: full and slightly cut versions of a die."""

_TOLD = 0.02


def check_alias(device_name: str, alias: str) -> tuple[DeviceSpec, str]:
    """Return the card that gets the rows, and in what it differs from the one they were made on, if in anything.

    Raises UserError for a card that is not known, the same card, and cards of different dies.
    """
    target = find_device(alias)
    origin = known_device(device_name)
    if origin is None:
        raise UserError(f"{device_name} is no known card, so nothing says that {target.name} is like it")
    if origin == target:
        raise UserError(f"--alias-device {alias} is the card of the file already")
    limits = ("capability", "shared_memory_per_block", "registers_per_sm", "max_warps_per_sm")
    for name in limits:
        if getattr(origin, name) != getattr(target, name):
            raise UserError(
                f"{target.name} is no {origin.name}: {name} is {getattr(target, name)} there and "
                f"{getattr(origin, name)} here; tune on the card itself"
            )
    if abs(target.sm_count - origin.sm_count) > _LIKE * origin.sm_count:
        raise UserError(
            f"{target.name} has {target.sm_count} SMs, {origin.name} has {origin.sm_count}: not alike enough for the "
            "same rows; tune on the card itself"
        )
    figures = (("SMs", "sm_count", 1.0), ("MB of L2", "l2_bytes", 2.0**20), ("GB/s", "bandwidth", 1e9))
    differing = [
        f"{getattr(target, field) / unit:,.0f} instead of {getattr(origin, field) / unit:,.0f} {name}"
        for name, field, unit in figures
        if abs(getattr(target, field) - getattr(origin, field)) > _TOLD * getattr(origin, field)
    ]
    return target, ", ".join(differing)
