"""vLLM's format of config files, and what its launcher makes of a row.

Read off ``vllm/model_executor/layers/fused_moe/fused_moe.py``: ``get_config_file_name``, ``get_moe_configs``,
``try_get_optimal_moe_config`` and ``invoke_fused_moe_kernel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sm120tune.tiles import TILE_FIELDS, Tile

VERSION_KEY = "triton_version"
"""The one top-level key that is no M; vLLM's tuner writes it and its loader drops it."""

CONFIG_DIR_VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
"""Names a flat folder that vLLM searches before its own."""

_SPLIT_K = "SPLIT_K"
"""In vLLM's default rows, always 1; SGLang's kernel has no such parameter."""

UNLIKE = {
    "int8_w8a8": "vLLM names no dtype for it, so that bf16 layers would read the file too",
    "int4_w4a16": "vLLM's N counts unpacked weights where SGLang's counts packed ones, and its kernels differ",
}
"""Dtypes whose files do not mean the same on both sides."""

_H200_FAMILY = "H200"


def file_name(experts: int, inter: int, device: str, dtype: str | None, block_shape: tuple[int, int] | None) -> str:
    """Return the name that vLLM asks for; ``device`` has underscores for blanks.

    There is one file for both GEMMs, no blank in the block shape, no ``per_channel_quant``, and every card of the
    H200 family asks for the H200's.
    """
    card = "NVIDIA_H200" if _H200_FAMILY in device.split("_") else device
    name = f"E={experts},N={inter},device_name={card}"
    if dtype:
        name += f",dtype={dtype}"
    if block_shape:
        name += f",block_shape=[{block_shape[0]},{block_shape[1]}]"
    return f"{name}.json"


def read_rows(content: Mapping[str, Any]) -> tuple[str | None, dict[int, Tile]]:
    """Return the Triton version and the rows of a file; raises ValueError for what SGLang's kernel cannot take."""
    version = content.get(VERSION_KEY)
    if version is not None and not isinstance(version, str):
        raise ValueError(f"{VERSION_KEY} must be a text, not {version!r:.40}")
    rows: dict[int, Tile] = {}
    for key, row in content.items():
        if key == VERSION_KEY:
            continue
        if not key.isascii() or not key.isdigit() or int(key) < 1:
            raise ValueError(f"key {key!r} is no number of tokens")
        if not isinstance(row, dict):
            raise ValueError(f"row {key} must be a JSON object, not {row!r:.60}")
        fields = dict(row)
        if fields.pop(_SPLIT_K, 1) != 1:
            raise ValueError(f"row {key} has SPLIT_K {row[_SPLIT_K]}, which SGLang's kernel does not have")
        rows[int(key)] = Tile.from_row(fields)
    if not rows:
        raise ValueError("it has no rows")
    return version, dict(sorted(rows.items()))


def clamped(tile: Tile, block_shape: tuple[int, int] | None) -> Tile:
    """Return what vLLM launches: BLOCK_SIZE_K no larger than the quantization block. SGLang does not clamp."""
    if block_shape is None:
        return tile
    fields = tile.to_row()
    return Tile.from_row({**fields, "BLOCK_SIZE_K": min(tile.BLOCK_SIZE_K, *block_shape)})


def dump_rows(rows: Mapping[int, Tile], triton_version: str | None) -> dict[str, Any]:
    """Return a file's content; USE_TMA is left out, since vLLM hands every field to a kernel without it."""
    head = {} if triton_version is None else {VERSION_KEY: triton_version}
    return {**head, **{str(m): {name: getattr(rows[m], name) for name in TILE_FIELDS} for m in sorted(rows)}}
