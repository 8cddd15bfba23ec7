"""The rest of the fused call: what runs between and around the two GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sm120tune.measure.cost_constants import Constants
from sm120tune.measure.cost_terms import Numbers
from sm120tune.measure.occupancy import Device

_CACHED_COST = 0.2
"""Of DRAM time, what traffic costs that the L2 keeps; bench/model_quality.py shows little of it."""
_CACHE_EDGE = 2.0
"""Exponent with which traffic leaves the L2 as it outgrows it: activations are read soon after they were written."""
_HOT_EDGE = 8.0
"""The same for weights, which come round once a call: a cycle that outgrows the cache finds next to nothing in it."""


@dataclass(frozen=True)
class CallLoad:
    """What a fused call has to do beside its GEMMs; numbers or arrays."""

    tokens: Numbers
    rows: Numbers
    """Routed rows of this GPU."""
    rows_elsewhere: Numbers
    """Choices of other ranks' experts, whose rows are zeros."""
    hidden: Numbers
    intermediate: Numbers
    topk: Numbers
    quantized: Numbers
    """1 where activations are quantized to 8 bits before each GEMM, else 0."""
    empty_blocks_an_sm: Numbers = 0.0
    """Blocks of both GEMMs that only write zeros, over SMs and occupancy."""


def rest_us(load: CallLoad, card: Device, l2_bytes: int, c: Constants) -> npt.NDArray[np.float64]:
    """Return the time of everything but the GEMMs, µs: activation, sum, sorting, quantization, zero blocks.

    With topk 1 there is no sum: the down GEMM writes the output itself (SGLang's ``fused_experts_impl``).
    """
    activation = load.rows * 3 * load.intermediate * 2
    rows_summed = load.rows + load.rows_elsewhere
    total = np.where(np.asarray(load.topk) == 1, 0.0, (rows_summed + load.tokens) * load.hidden * 2)
    quantization = load.quantized * 3 * (load.tokens * load.hidden + load.rows * load.intermediate)
    traffic = activation + total + quantization
    missed = missed_share(traffic, c.call_cache_share * l2_bytes, _CACHE_EDGE)
    fixed = c.call_us + load.quantized * c.quantize_us + load.empty_blocks_an_sm * c.empty_block_us
    return np.asarray(fixed + traffic / card.bandwidth * (_CACHED_COST + missed / c.bandwidth_share) * 1e6)


def cold_share(footprint: Numbers, l2_bytes: int, c: Constants) -> npt.NDArray[np.float64]:
    """Return the share of a call's weights that repeated calls do not find in the L2.

    ``footprint`` is all that a call touches, bytes: the weights, and the activations that drive them out.
    """
    return missed_share(footprint, c.hot_share * l2_bytes, _HOT_EDGE)


def missed_share(traffic: Numbers, cache: float, edge: float) -> npt.NDArray[np.float64]:
    """Return the share of bytes that a cache of this size does not hold: a half where both are equal."""
    return np.asarray(1 / (1 + (cache / np.maximum(1.0, traffic)) ** edge))
