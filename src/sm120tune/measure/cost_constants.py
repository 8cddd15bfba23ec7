"""The cost model's constants: what each means, those fitted for each class of cards, and a calibrated card's own."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm120tune.devices import DeviceSpec
from sm120tune.measure.correction import Correction

if TYPE_CHECKING:
    from sm120tune.measure.occupancy import Device

_CLASSES = {9: "sm90"}
_NEAREST_CLASS = "sm120"
"""Of every other capability: tiles run on mma.sync there too."""


@dataclass(frozen=True)
class Constants:
    """What the formula of :mod:`sm120tune.measure.cost_terms` needs beside a card's specification.

    Fitted by bench/fit_model.py; docs/model.md says on what, and which of them the data cannot tell apart.
    """

    launch_us: float
    """Launch of the kernel and its first and last latencies, that nothing overlaps, µs."""
    bandwidth_share: float
    """Of the specified DRAM bandwidth, what long rows reach."""
    short_row_loss: float
    """Extra time of weight traffic where a tile's rows are 64 bytes and the matrix' own 4 KiB, as a share."""
    short_row_growth: float
    """Exponent of the matrix row's length in that loss: the further apart the 64 bytes lie, the larger it is."""
    tensor_share: float
    """Of the specified 16-bit tensor rate, what mma.sync reaches."""
    tensor_share_wgmma: float
    """The same for wgmma (capability 9.0, BLOCK_SIZE_M of 64 and more)."""
    tensor_share_fp8: float
    """Of twice the 16-bit rate, what fp8 operands reach."""
    shared_gb_s: float
    """Reads of operands from shared memory, GB/s an SM."""
    l2_gb_s: float
    """Loads through the L2, GB/s an SM, all SMs loading."""
    short_row_l2: float
    """Extra time of those loads where a tile's rows are 64 bytes, as a share."""
    l2_held_share: float
    """Of the L2, what one expert's weights may fill and still be there for its next blocks of rows."""
    load_us: float
    """Latency of a K step's loads, µs, apart from their size."""
    load_us_per_16k: float
    """What 16 KiB of a K step add to it, µs."""
    serial_share: float
    """Of a K step's tensor time, what one block cannot overlap with its own loads."""
    scale_us: float
    """Latency that loading block scales adds to a K step, in every stage, µs; only where products are block-scaled."""
    rescale_g_s: float
    """Products that an SM multiplies by their block scales and adds, 1e9 a second."""
    block_us: float
    """Start of a block (row ids, first addresses) and its end, µs."""
    store_us: float
    """Epilogue of a block for each fp32 accumulator of a thread, µs."""
    spill_bytes_that_double: float
    """Stack bytes a thread, beyond what is spilled once a block, that double the time."""
    overlap: float
    """Exponent of the smooth maximum over memory, SM throughput and latency; two equal terms give 2 ** (1/overlap)."""
    step_overlap: float
    """The same over tensor cores, shared memory and L2 within a K step."""
    call_us: float
    """Fixed time of the fused call beside its GEMMs: routing, sorting, activation, sum, µs."""
    quantize_us: float
    """Fixed time of quantizing the activations twice, µs; only where they are fp8."""
    call_cache_share: float
    """Of the L2, what the activations may fill before the kernels between the GEMMs run at DRAM speed."""
    hot_share: float
    """Of the L2, what a repeated call may touch before it finds half of the weights gone."""
    empty_block_us: float
    """Time of a block that only writes zeros for another rank's choices, µs."""


LIMITS: Mapping[str, tuple[float, float]] = {
    "launch_us": (0.5, 6.0),
    "bandwidth_share": (0.5, 1.0),
    "short_row_loss": (0.01, 3.0),
    "short_row_growth": (0.001, 1.0),
    "tensor_share": (0.2, 1.0),
    "tensor_share_wgmma": (0.3, 1.0),
    "tensor_share_fp8": (0.3, 1.0),
    "serial_share": (0.01, 3.0),
    "l2_held_share": (0.05, 2.0),
    "overlap": (1.2, 10.0),
    "step_overlap": (1.2, 10.0),
    "hot_share": (0.2, 1.5),
}
"""Where physics or the formula's form sets a limit to a fit."""


@dataclass(frozen=True)
class MeasuredMargins:
    """Errors of estimates that a calibration measured on a card, for layers of one dtype."""

    dtype: str
    errors: tuple[tuple[int, float], ...]
    """(M, relative error at the 90th percentile on tiles that were not fitted), ascending in M."""

    def at(self, m: int) -> float:
        """Return the larger error of the measured M on either side, or of the nearest one beyond the ends."""
        below = [error for at, error in self.errors if at <= m][-1:]
        above = [error for at, error in self.errors if at >= m][:1]
        return max(below + above)

    def covers(self, m: int, dtype: str | None) -> bool:
        """Whether M lies between measured ones of this dtype."""
        return dtype == self.dtype and self.errors[0][0] <= m <= self.errors[-1][0]


@dataclass(frozen=True)
class CardClass:
    """A fitted class of cards, or one calibrated card."""

    name: str
    constants: Constants
    correction: Correction | None
    """Learned on residuals where an exhaustive table exists."""
    margins: tuple[tuple[int, float], ...]
    """(least M, relative error at the 90th percentile on problems that were not fitted), ascending in M."""
    measured: MeasuredMargins | None = None
    """What a calibration found on the card itself."""

    def margin(self, m: int, dtype: str | None = None) -> float:
        """Return by how much an estimated gain must exceed nothing at M: the model's error there.

        A calibrated card's own error counts for the dtype and the range of M that were measured; elsewhere it may
        only widen that of the class.
        """
        found = [error for least, error in self.margins if least <= m]
        of_class = found[-1] if found else max(error for _, error in self.margins)
        if self.measured is None:
            return of_class
        error = self.measured.at(m)
        return error if self.measured.covers(m, dtype) else max(error, of_class)


@dataclass(frozen=True)
class CalibratedSpec(DeviceSpec):
    """A card with constants of its own; wherever a card is estimated they stand for its class's."""

    fitted: CardClass = field(kw_only=True, compare=False)
    calibration: str = field(kw_only=True)
    """What tells this calibration from another; part of the model's version."""


def fitted_class(device: Device) -> CardClass:
    """Return what estimates of a card are made with: its own calibration, or its class."""
    return device.fitted if isinstance(device, CalibratedSpec) else card_class(device.arch)


def version_for(device: Device) -> str:
    """Return the version of formula and constants for a card; that of a calibrated one says so."""
    calibrated = f"+calibrated.{device.calibration}" if isinstance(device, CalibratedSpec) else ""
    return model_version() + calibrated


def model_version() -> str:
    """Return the version of formula and constants."""
    return str(_data()["version"])


def formula_version() -> str:
    """Return the version of the formula alone: constants of one formula mean nothing to another."""
    return model_version().partition(".")[0]


def card_class(arch: int) -> CardClass:
    """Return the class of a card by its architecture number (90, 120, 121 ...)."""
    return named_class(_CLASSES.get(arch // 10, _NEAREST_CLASS))


def class_names() -> tuple[str, ...]:
    """Return the classes that were fitted."""
    return tuple(_data()["classes"])


@functools.cache
def named_class(name: str) -> CardClass:
    """Return a class by its name; raises KeyError for one that is none of :func:`class_names`."""
    entry = _data()["classes"][name]
    correction = entry.get("correction")
    return CardClass(
        name,
        Constants(**entry["constants"]),
        None if correction is None else Correction.from_json(correction),
        tuple((int(m), float(error)) for m, error in entry["margins"]),
    )


@functools.cache
def _data() -> Mapping[str, Any]:
    text = importlib.resources.files("sm120tune").joinpath("data/cost_model.json").read_text(encoding="utf-8")
    data: Mapping[str, Any] = json.loads(text)
    return data
