"""The formula: one GEMM's time from its load, its tile and the card, for many tiles or loads at once.

A launch takes ``launch + spilling * smooth maximum of three``:

* ``bandwidth``: operands once through DRAM, weights slower where a tile's rows are short;
* throughput of the busiest SM: its blocks, one after the other, each K step as long as the slowest of tensor cores
  (``compute``), operand reads from shared memory (``shared_reads``) and loads through the L2 (``l2``), weights that
  it lost between two blocks of one expert's rows among them;
* ``latency``: waves of resident blocks, each as long as its start, its K steps and its epilogue take alone. A step
  waits for the part of its loads that ``num_stages - 1`` buffers do not hide, and for a part of its own products.

Spilled registers stretch all of it: tiles with much stack are as many times slower where memory binds as where the
tensor cores do.

Every field may be a number or an array; arrays broadcast against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sm120tune.measure.cost_constants import Constants
from sm120tune.measure.occupancy import Device

Array = npt.NDArray[np.float64]
Numbers = Array | float
Flags = npt.NDArray[np.bool_]

_WGMMA_ROWS = 64
_WGMMA_ARCH = 90
_WARPGROUP = 4
_MMA_ROWS = 16
_TENSOR_CORES = 4
_THREADS_PER_WARP = 32
_SHORT_ROW = 64.0
"""Bytes of the row that ``short_row_loss`` is given for."""
_SHORT_ROW_POWER = 3.0
"""The loss falls with this power of the row's bytes: rows of 256 bytes lose next to nothing on either card."""
_MATRIX_ROW = 4096.0
_STACK_OUTSIDE_LOOP = 32
"""Bytes a thread that cost nothing on the recorded tables: what is spilled once a block, not in every step."""
_SPILL_POWER = 0.7
"""The first spilled values cost most: on an H200 1 KB of stack took about 4 times as long, 5 KB about 10 times."""
_C_BYTES = 2
_NOTHING = 1e-6
"""µs, instead of 0 where logarithms and quotients are taken: a rank may have no rows at all."""


@dataclass(frozen=True)
class Load:
    """What one GEMM has to do at one M under one routing."""

    n: Numbers
    k: Numbers
    rows: Numbers
    """Routed rows of this GPU."""
    touched: Numbers
    """Experts with at least one row."""
    rows_of_a: Numbers
    """Different rows of A that are read."""
    rows_of_c: Numbers
    """Rows that are written, zeros for other ranks' choices included."""
    row_blocks: Numbers
    """Blocks of BLOCK_SIZE_M rows over all experts, padding included."""
    weight_bytes: Numbers
    """Of one element of B."""
    activation_bytes: Numbers
    """Of one element of A; C has 16-bit elements whatever the operands are."""
    fp8: Numbers = 0.0
    """1 where both operands are fp8, else 0."""
    block_scaled: Numbers = 0.0
    """1 where each K step's products are multiplied by the scales of their blocks before they are added, else 0."""
    cold: Numbers = 1.0
    """Share of the weights that DRAM has to deliver; less than 1 where repeated calls find some in the L2."""


@dataclass(frozen=True)
class TileArrays:
    """Tiles and what the compiler says of them, one element each."""

    block_m: Array
    block_n: Array
    block_k: Array
    group: Array
    """GROUP_SIZE_M."""
    warps: Array
    stages: Array
    spill_bytes: Array
    occupancy: Array
    """Blocks that an SM holds."""


@dataclass(frozen=True)
class Terms:
    """What a launch would take if one thing alone limited it, µs."""

    bandwidth: Array
    compute: Array
    shared_reads: Array
    l2: Array
    latency: Array
    throughput: Array
    """Smooth maximum of compute, shared_reads and l2."""
    resident: Array
    """Blocks that an SM really holds, no time: no more than its part of all blocks, and then less than 1."""
    us: Array
    """The launch's time."""

    def bounds(self) -> list[str]:
        """Return the name of each launch's largest term."""
        names = ("bandwidth", "compute", "shared_reads", "l2", "latency")
        stacked = np.stack([np.broadcast_to(getattr(self, name), self.us.shape) for name in names])
        return [names[int(best)] for best in np.ravel(stacked.argmax(axis=0))]


def terms(load: Load, tile: TileArrays, card: Device, c: Constants) -> Terms:
    """Return the terms of every launch; see the module's text for the formula."""
    # wgmma multiplies 64 rows and more; SGLang swaps A and B of fp8 tiles that have only as many columns (swap_ab).
    wgmma = (card.arch == _WGMMA_ARCH) & (tile.block_m >= _WGMMA_ROWS)
    fp8 = np.asarray(load.fp8) == 1
    swapped = (card.arch == _WGMMA_ARCH) & fp8 & ~wgmma & (tile.block_n >= _WGMMA_ROWS)
    share = np.where(wgmma, c.tensor_share_wgmma, c.tensor_share)
    # 8-bit weights beside 16-bit activations are converted and multiplied at 16 bits; so is fp8 on Hopper's mma.sync.
    unpacked = (card.arch == _WGMMA_ARCH) & fp8 & ~wgmma & ~swapped
    share = np.where((np.asarray(load.activation_bytes) == 1) & ~unpacked, 2 * c.tensor_share_fp8, share)
    step_flop = 2.0 * tile.block_m * tile.block_n * tile.block_k
    tensor_us = step_flop / (card.bf16_flops / card.sm_count * share) * 1e6

    reads_of_a, reads_of_b = _reads(tile, wgmma, swapped)
    row_of_a, row_of_b = tile.block_k * load.activation_bytes, tile.block_k * load.weight_bytes
    shared_us = (tile.block_m * reads_of_a * row_of_a + tile.block_n * reads_of_b * row_of_b) / (c.shared_gb_s * 1e3)

    # Rows of padding are masked out, not loaded.
    used_rows = np.minimum(tile.block_m, load.rows / np.maximum(1, load.row_blocks))
    loaded = used_rows * row_of_a + tile.block_n * row_of_b
    rows_of_a = used_rows * row_of_a * (1 + c.short_row_l2 * _shortness(row_of_a))
    rows_of_b = tile.block_n * row_of_b * (1 + c.short_row_l2 * _shortness(row_of_b))
    columns = np.ceil(load.n / tile.block_n)
    blocks = load.row_blocks * columns
    steps = np.ceil(load.k / tile.block_k)
    again = _read_again(load, tile, columns, card, c) * tile.block_n * row_of_b
    l2_us = (rows_of_a + rows_of_b) / (c.l2_gb_s * 1e3) + again / (card.bandwidth / card.sm_count) * 1e6
    busiest = np.ceil(blocks / card.sm_count) * steps

    # A warp feeds one of the SM's four tensor cores; of two on one, the other multiplies while the first one waits.
    serial_us = tensor_us * c.serial_share * _TENSOR_CORES / tile.warps
    load_us = (c.load_us + c.load_us_per_16k * loaded / 16384) / np.maximum(1, tile.stages - 1)
    store_us = c.store_us * tile.block_m * tile.block_n / (_THREADS_PER_WARP * tile.warps)
    # Block scales: loaded in the step that needs them, whatever num_stages, and multiplied into all of its products.
    scale_us = load.block_scaled * c.scale_us
    rescale_us = load.block_scaled * tile.block_m * tile.block_n / (c.rescale_g_s * 1e3)
    waves = np.ceil(blocks / (card.sm_count * tile.occupancy))
    latency = waves * (c.block_us + store_us + steps * (load_us + serial_us + scale_us))

    loss = c.short_row_loss * _shortness(row_of_b)
    loss = loss * (load.k * load.weight_bytes / _MATRIX_ROW) ** c.short_row_growth
    weights = load.touched * load.n * load.k * load.weight_bytes * load.cold * (1 + loss)
    traffic = weights + load.rows_of_a * load.k * load.activation_bytes + load.rows_of_c * load.n * _C_BYTES
    bandwidth = traffic / (card.bandwidth * c.bandwidth_share) * 1e6

    spilled = np.maximum(0, tile.spill_bytes - _STACK_OUTSIDE_LOOP)
    spilling = 1 + (spilled / c.spill_bytes_that_double) ** _SPILL_POWER
    throughput = busiest * smooth_max(c.step_overlap, tensor_us, shared_us, l2_us, rescale_us)
    return Terms(
        bandwidth=np.asarray(bandwidth),
        compute=busiest * tensor_us,
        shared_reads=busiest * shared_us,
        l2=busiest * l2_us,
        latency=latency,
        throughput=throughput,
        resident=np.minimum(tile.occupancy, blocks / card.sm_count),
        us=c.launch_us + spilling * smooth_max(c.overlap, bandwidth, throughput, latency),
    )


def features(load: Load, tile: TileArrays, found: Terms) -> Array:
    """Return what the learned correction sees of each launch: ``[launches, FEATURES]``."""
    us = found.us
    used = np.minimum(1.0, load.rows / np.maximum(1, load.row_blocks) / tile.block_m)
    staged = tile.stages * tile.block_k * (tile.block_m * load.activation_bytes + tile.block_n * load.weight_bytes)
    found_columns = (
        np.log2(tile.block_m),
        np.log2(tile.block_n),
        np.log2(tile.block_k),
        np.log2(tile.warps),
        tile.stages,
        np.log2(tile.occupancy),
        np.log(np.maximum(_NOTHING, found.bandwidth) / us),
        np.log(np.maximum(_NOTHING, found.latency) / us),
        np.log(np.maximum(_NOTHING, found.throughput) / us),
        np.log2(np.maximum(used, 1e-3)),
        np.log1p(tile.spill_bytes / 50),
        np.where(tile.block_m >= _WGMMA_ROWS, 1.0, 0.0),
        np.log2(np.ceil(load.k / tile.block_k)),
        np.log2(staged),
        np.log(np.maximum(_NOTHING, found.compute) / us),
        np.log2(np.maximum(found.resident * tile.warps, 1e-3)),
    )
    return np.stack([np.broadcast_to(column, us.shape) for column in found_columns], axis=-1)


FEATURES = 16
"""Columns of :func:`features`."""


def _reads(tile: TileArrays, wgmma: Flags, swapped: Flags) -> tuple[Array, Array]:
    """Return how often A and B of a step are read from shared memory.

    wgmma: the operand that lies across once for every 64 rows of the other, which each warpgroup beside another reads
    itself. mma.sync: each warp reads what it multiplies, and Triton lays the warps out so that they read least, rather
    along N where two layouts read as much (``warpsPerCTA`` of 3.6.0 on SM90 and 3.8.0 on SM120).
    """
    beside, of_rows = _warpgroup_reads(tile.block_m, tile.warps)
    of_columns, beside_swapped = _warpgroup_reads(tile.block_n, tile.warps)[::-1]
    down, least = np.ones_like(tile.warps), tile.warps * tile.block_m + tile.block_n
    for rows in (2, 4, 8):
        read = tile.warps / rows * tile.block_m + rows * tile.block_n
        better = (rows <= tile.warps) & (rows * _MMA_ROWS <= tile.block_m) & (read < least)
        down, least = np.where(better, rows, down), np.where(better, read, least)
    of_a = np.where(wgmma, beside, np.where(swapped, of_columns, tile.warps / down))
    of_b = np.where(wgmma, of_rows, np.where(swapped, beside_swapped, down))
    return of_a, of_b


def _warpgroup_reads(rows: Array, warps: Array) -> tuple[Array, Array]:
    """Return how often warpgroups read the operand that has these rows, and the other."""
    groups = np.maximum(1, rows / _WGMMA_ROWS)
    return np.maximum(1, warps / _WARPGROUP / groups), groups


def _read_again(load: Load, tile: TileArrays, columns: Array, card: Device, c: Constants) -> Array:
    """Return the share of a block's weights that comes from memory although a block of the same expert had it before.

    Within a group the next block of an expert's rows follows at once and finds its columns in the L2. From one group to
    the next all columns lie between, in part run at the same time, and what of them the L2 does not hold is lost.
    """
    lost = np.maximum(0, 1 - c.l2_held_share * card.l2_bytes / (load.n * load.k * load.weight_bytes))
    at_once = np.minimum(load.row_blocks * columns, card.sm_count * tile.occupancy)
    apart = np.minimum(1, tile.group * columns / np.maximum(1, at_once))
    an_expert = np.maximum(1, load.row_blocks / np.maximum(1, load.touched))
    return np.asarray(lost * apart * (an_expert - 1) / an_expert / tile.group)


def _shortness(row_bytes: Numbers) -> Numbers:
    return (_SHORT_ROW / row_bytes) ** _SHORT_ROW_POWER


def smooth_max(power: float, *values: Numbers) -> Array:
    """Return a maximum without kinks: the p-norm; values are not negative."""
    top = np.maximum(_NOTHING, np.maximum.reduce(np.broadcast_arrays(*values)))
    total = sum((value / top) ** power for value in values)
    return np.asarray(top * np.asarray(total) ** (1 / power))
