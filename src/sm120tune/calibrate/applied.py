"""Which calibration a card is estimated with: the one a person names, or the one that was applied here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from sm120tune.calibrate.file import Calibration, read_file
from sm120tune.calibrate.refit import usable_calibration
from sm120tune.devices import DeviceSpec, same_card
from sm120tune.errors import UserError
from sm120tune.measure.cost_constants import CalibratedSpec, Constants, named_class
from sm120tune.state import cache_folder

NONE = "none"
"""Named instead of a file: the class's constants, whatever was applied."""
_OTHER_RATE = 3.0
"""Two descriptions of one card do not differ by this factor: one is wrong."""


def applied_path(device_name: str) -> Path:
    """Return where the applied calibration of a card lies, if there is one."""
    return cache_folder() / "calibrations" / f"{device_name.replace(' ', '_')}.json"


def calibrated(
    device: DeviceSpec, named: str | None, tell: Callable[[str], None], *, applied: bool = True
) -> DeviceSpec:
    """Return the card with its calibration: the file ``named``, else an applied one unless ``applied`` is off.

    Where the file is of another formula, ``tell`` gets a line: its times were fitted again. Raises UserError for a file
    that is damaged, or of another card.
    """
    if named == NONE:
        return device
    if named is not None:
        return _from_file(device, Path(named), f"--calibration {named}", tell)
    path = applied_path(device.name)
    # What is there and is no file is told of as a damaged one is; is_symlink: a link to nowhere does not exist.
    if not applied or not (path.exists() or path.is_symlink()):
        return device
    try:
        return _from_file(device, path, str(path), tell)
    except UserError as error:
        raise UserError(f"{error}; remove it, or calibrate again with --apply") from None


def with_calibration(device: DeviceSpec, found: Calibration, named: str) -> CalibratedSpec:
    """Return the card with the constants of a calibration; raises UserError where that is of another card.

    Shares of a specified rate are carried over to this description's rate: the card reaches what it reached.
    """
    there = found.origin.device
    _check_card(device, there, named)
    if not found.model.margins:
        raise UserError(f"{named} holds too few times to say anything of the card; calibrate again")
    fitted = found.model.card_class(named_class(found.model.start), found.origin.problem.dtype)
    fitted = replace(fitted, constants=_carried(fitted.constants, there, device))
    return CalibratedSpec(
        **{entry.name: getattr(device, entry.name) for entry in fields(DeviceSpec)},
        fitted=fitted,
        calibration=found.digest,
    )


def _from_file(device: DeviceSpec, path: Path, named: str, tell: Callable[[str], None]) -> CalibratedSpec:
    file = read_file(path, named)
    # Before its times are fitted again for nothing.
    _check_card(device, file.origin.device, named)
    return with_calibration(device, usable_calibration(file, tell), named)


def _check_card(device: DeviceSpec, there: DeviceSpec, named: str) -> None:
    if not same_card(there.name, device.name):
        raise UserError(
            f"{named} is of {there.name}, not of {device.name}; --calibration none takes its class's constants"
        )
    if there.capability != device.capability:
        ours, theirs = (".".join(map(str, card.capability)) for card in (device, there))
        raise UserError(f"{named} is of a {there.name} with capability {theirs}, this one has {ours}")
    for rate in ("bandwidth", "bf16_flops"):
        ours, theirs = getattr(device, rate), getattr(there, rate)
        if not 1 / _OTHER_RATE <= theirs / ours <= _OTHER_RATE:
            raise UserError(f"{named} says that a {there.name} has a {rate} of {theirs:g}, known is {ours:g}")


def _carried(c: Constants, there: DeviceSpec, here: DeviceSpec) -> Constants:
    memory, tensor = there.bandwidth / here.bandwidth, there.bf16_flops / here.bf16_flops
    if memory == tensor == 1:
        return c
    return replace(
        c,
        bandwidth_share=c.bandwidth_share * memory,
        tensor_share=c.tensor_share * tensor,
        tensor_share_wgmma=c.tensor_share_wgmma * tensor,
        tensor_share_fp8=c.tensor_share_fp8 * tensor,
    )
