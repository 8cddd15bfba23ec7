"""The cost model's constants: what each means, and those that were fitted for each class of cards."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sm120tune.measure.correction import Correction

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
    load_us: float
    """Latency of a K step's loads, µs, apart from their size."""
    load_us_per_16k: float
    """What 16 KiB of a K step add to it, µs."""
    serial_share: float
    """Of a K step's tensor time, what one block cannot overlap with its own loads."""
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


@dataclass(frozen=True)
class CardClass:
    """A fitted class of cards."""

    name: str
    constants: Constants
    correction: Correction | None
    """Learned on residuals where an exhaustive table exists."""
    margins: tuple[tuple[int, float], ...]
    """(least M, relative error at the 90th percentile on problems that were not fitted), ascending in M."""

    def margin(self, m: int) -> float:
        """Return by how much an estimated gain must exceed nothing at M: the model's error there."""
        found = [error for least, error in self.margins if least <= m]
        return found[-1] if found else max(error for _, error in self.margins)


def model_version() -> str:
    """Return the version of formula and constants."""
    return str(_data()["version"])


def card_class(arch: int) -> CardClass:
    """Return the class of a card by its architecture number (90, 120, 121 ...)."""
    return _card_class(_CLASSES.get(arch // 10, _NEAREST_CLASS))


@functools.cache
def _card_class(name: str) -> CardClass:
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
