"""How many blocks of a tile an SM holds, from what the compiler says of it."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from sm120tune.quantization import Quantization
from sm120tune.search_space import staged_shared_bytes
from sm120tune.tiles import Tile

_SHARED_RESERVED = 1024
"""Bytes of shared memory that CUDA itself takes for each resident block."""
_REGISTERS_PER_THREAD = 255
_THREADS_PER_WARP = 32
_REGISTER_UNIT = 256
"""Registers are handed out in units of 256 a warp (CUDA programming guide)."""
_UNPACKED_REGISTERS = 5
"""Registers a thread for each of its int4 weights of a tile, before Triton 3.7.

Fitted on compiled tiles of both cards and group sizes 32 and 128: 5.7 to 6.7 with Triton 3.6.0, 1.1 with 3.7.1 and
3.8.0, less than what the fixed allowance of the guess is too large by.
"""
_UNPACKED_UNTIL = (3, 7)


class Device(Protocol):
    """What the model needs to know of a card."""

    @property
    def arch(self) -> int:
        """90 for capability 9.0, 120 for 12.0."""

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors."""

    @property
    def shared_memory_per_sm(self) -> int:
        """Bytes, those that CUDA reserves included."""

    @property
    def registers_per_sm(self) -> int:
        """32-bit registers."""

    @property
    def max_warps_per_sm(self) -> int:
        """Resident warps."""

    @property
    def l2_bytes(self) -> int:
        """Bytes of the L2."""

    @property
    def bandwidth(self) -> float:
        """Bytes/s of device memory."""

    @property
    def bf16_flops(self) -> float:
        """Dense tensor-core flop/s with fp32 accumulation."""


class TileFacts(Protocol):
    """What the compiler says about a tile's kernel."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory a block."""

    @property
    def registers(self) -> int:
        """Registers a thread."""

    @property
    def spill_bytes(self) -> int:
        """Stack bytes a thread."""


@dataclass(frozen=True)
class StoredFacts:
    """Facts of a tile that was not compiled here: from the shipped record, or guessed."""

    shared_bytes: int
    registers: int
    spill_bytes: int


def recorded_facts(tile: Tile, arch: int, stored: Quantization) -> StoredFacts | None:
    """Return what the compiler said of a tile on this architecture for another problem so stored, or None.

    The facts depend on tile, architecture, Triton and kernel source alone (bench/record_facts.py); the record is of
    one Triton per architecture, of bf16 and of block-wise fp8. Capability 12.1 is taken as 12.0, whose limits and
    instructions it shares.
    """
    found = _record(record_name(120 if arch // 10 == 12 else arch, stored)).get(binary_key(tile))
    return None if found is None else StoredFacts(*found)


def record_name(arch: int, stored: Quantization) -> str:
    """Return the name of an architecture's record; layers that are stored alike share it."""
    if not stored.quantized:
        return str(arch)
    # The length of a block is how often scales are loaded, an integer argument of the launch.
    return f"{arch} {stored.dtype} {stored.granularity}"


def binary_key(tile: Tile) -> str:
    """Return what names a tile's binary: all but GROUP_SIZE_M, which changes no resource."""
    return f"{tile.BLOCK_SIZE_M}x{tile.BLOCK_SIZE_N}x{tile.BLOCK_SIZE_K} w{tile.num_warps} s{tile.num_stages}"


@functools.cache
def _record(name: str) -> Mapping[str, tuple[int, int, int]]:
    text = importlib.resources.files("sm120tune").joinpath("data/tile_facts.json").read_text(encoding="utf-8")
    tiles: Mapping[str, tuple[int, int, int]] = json.loads(text).get(name, {}).get("tiles", {})
    return tiles


def guess_facts(tile: Tile, stored: Quantization, triton_version: str | None = None) -> StoredFacts:
    """Guess a tile's facts without a compiler or a record.

    Shared memory is what SM120 stages (:func:`staged_shared_bytes`, one buffer at least). Registers are the fp32
    accumulator's share of a thread and a fixed allowance, with older releases of Triton (None is a new one) also the
    unpacked int4 weights; what exceeds 255 spills.
    """
    shared = staged_shared_bytes(replace(tile, num_stages=max(2, tile.num_stages)), stored)
    threads = _THREADS_PER_WARP * tile.num_warps
    needed = 56 + tile.BLOCK_SIZE_M * tile.BLOCK_SIZE_N // threads
    if stored.weight_bits == 4 and triton_version is not None and _release(triton_version) < _UNPACKED_UNTIL:
        needed += _UNPACKED_REGISTERS * tile.BLOCK_SIZE_N * tile.BLOCK_SIZE_K // threads
    # Values are spilled again in every unrolled step: 128x256x64 with 4 warps is 57 over and takes 5.4 KB.
    spill = max(0, needed - _REGISTERS_PER_THREAD) * 96
    return StoredFacts(shared, min(needed, _REGISTERS_PER_THREAD), spill)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def blocks_per_sm(tile: Tile, device: Device, facts: TileFacts) -> tuple[int, str]:
    """Return how many blocks of a tile one SM holds, and what limits it: shared_memory, registers or warps."""
    registers = -(-facts.registers * _THREADS_PER_WARP // _REGISTER_UNIT) * _REGISTER_UNIT * tile.num_warps
    limits = {
        "shared_memory": device.shared_memory_per_sm // (facts.shared_bytes + _SHARED_RESERVED),
        "registers": device.registers_per_sm // max(1, registers),
        "warps": device.max_warps_per_sm // tile.num_warps,
    }
    name = min(limits, key=limits.__getitem__)
    return limits[name], name
