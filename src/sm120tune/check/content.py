"""The content of a config file: rows that SGLang can run, and everything that is wrong with the others."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune._jsonfile import read_object
from sm120tune.check.findings import Finding, Level
from sm120tune.check.names import ConfigName, parse_name
from sm120tune.check.reach import nearest
from sm120tune.tiles import TILE_FIELDS, Tile, is_field_value

_OPTIONS = ("num_ctas", "maxnreg")
"""Launch options of Triton that SGLang would pass on, and that are not checked here."""

_POWERS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")
"""Fields that Triton takes as powers of two only."""

GAP = 4
"""Ratio of neighbouring keys above which a ladder counts as sparse: some M is 2.5 times its key or more."""

PAST_END = 2
"""Ratio of the largest M to the last key above which the ladder counts as short."""


@dataclass(frozen=True)
class ConfigFile:
    """One file as far as it could be read."""

    path: Path
    label: str
    name: ConfigName | None
    """None where no server asks for such a name."""
    rows: dict[int, Tile]
    """The rows that SGLang could launch, in file order."""
    tma_keys: tuple[str, ...]
    """Keys whose row has a USE_TMA field, on or off."""
    findings: tuple[Finding, ...]


def read_config(path: Path, label: str) -> ConfigFile:
    """Read a file; whatever is wrong with it becomes a finding."""
    name = parse_name(path.name)
    found: list[Finding] = []
    try:
        content = _load(path, label, found)
    except (OSError, ValueError) as error:
        what = f"cannot be read: {_reason(error)}; SGLang's lookup raises at the first request"
        found.append(Finding(Level.ERROR, "json-damaged", label, what, "restore or remove the file"))
        content = {}
    else:
        if not content:
            what = "no rows: SGLang uses its built-in default as if there were no file"
            found.append(Finding(Level.WARNING, "empty", label, what, "remove the file, or tune the layer"))
    rows: dict[int, Tile] = {}
    tma: list[str] = []
    for key, row in content.items():
        if isinstance(row, dict) and "USE_TMA" in row:
            tma.append(key)
        m = _number(key)
        if m is None:
            found.append(_not_integer(label, key))
            continue
        if m < 1:
            what = "is no number of tokens; M is at least 1"
            found.append(Finding(Level.WARNING, "key-not-positive", label, what, "remove the row", key))
        tile = _tile(label, key, row, name, found)
        if tile is not None:
            rows[m] = tile
    found += _order(label, rows)
    return ConfigFile(path, label, name, rows, tuple(tma), tuple(found))


def _load(path: Path, label: str, found: list[Finding]) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        if "given twice" not in str(error):
            raise
        what = f"{error}; SGLang takes the last one"
        found.append(Finding(Level.WARNING, "key-repeated", label, what, "keep one of the rows"))
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise
        return content


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _number(key: str) -> int | None:
    try:
        return int(key)
    except ValueError:
        return None


def _not_integer(label: str, key: str) -> Finding:
    origin = " (vLLM writes it)" if key == "triton_version" else ""
    what = f"key {key!r} is no integer{origin}: SGLang's loader raises ValueError and the server dies"
    return Finding(Level.ERROR, "key-not-integer", label, what, "remove the key", key)


def _tile(label: str, key: str, row: object, name: ConfigName | None, found: list[Finding]) -> Tile | None:
    def error(code: str, what: str, fix: str) -> None:
        found.append(Finding(Level.ERROR, code, label, what, fix, key))

    if not isinstance(row, dict):
        error("row-not-object", f"the row is {row!r:.40}, no object", "give the row its fields or remove it")
        return None
    fields = dict(row)
    for option in _OPTIONS:
        if fields.pop(option, None) is not None:
            what = f"{option} is passed on to Triton and not checked here"
            found.append(Finding(Level.WARNING, "field-unchecked", label, what, "", key))
    sound = True
    for field in fields:
        if field not in (*TILE_FIELDS, "USE_TMA"):
            error("field-unknown", f"unknown field {field}: the kernel launch raises KeyError", f"remove {field}")
            sound = False
    for field in TILE_FIELDS[:4]:
        if field not in fields:
            error("field-missing", f"{field} is missing", f"add {field}")
            sound = False
    for field, value in fields.items():
        if field in TILE_FIELDS and not is_field_value(value):
            what = f"{field} must be a positive integer below 2**31, not {value!r:.40}"
            error("field-value", what, "correct the value")
            sound = False
        elif field in _POWERS and value & (value - 1):
            error("field-value", f"{field}={value} is no power of two, which Triton refuses", "correct the value")
            sound = False
        elif field == "USE_TMA" and not isinstance(value, bool):
            error("field-value", f"USE_TMA must be true or false, not {value!r:.40}", "correct the value")
            sound = False
    if not sound:
        return None
    tile = Tile.from_row(fields)
    found += _against_name(label, key, tile, name)
    return tile


def _against_name(label: str, key: str, tile: Tile, name: ConfigName | None) -> list[Finding]:
    found: list[Finding] = []
    group = name.block_shape[1] if name is not None and name.block_shape else None
    if group is not None and group % tile.BLOCK_SIZE_K:
        what = (
            f"BLOCK_SIZE_K {tile.BLOCK_SIZE_K} with groups of {group} along K: SGLang loads one scale a step, "
            "so the numbers are wrong"
        )
        found.append(Finding(Level.ERROR, "k-over-group", label, what, f"at most {group}, and tune again", key))
    columns = name.block_shape[0] if name is not None and name.block_shape else None
    if columns and tile.BLOCK_SIZE_N < columns and columns % tile.BLOCK_SIZE_N:
        what = (
            f"BLOCK_SIZE_N {tile.BLOCK_SIZE_N} beside quantization blocks of {columns} columns: SGLang loads one scale "
            "for the whole tile, so the numbers are wrong"
        )
        found.append(
            Finding(Level.ERROR, "n-across-blocks", label, what, f"a divisor of {columns}, and tune again", key)
        )
    # The kernel for int4 has no descriptors, whatever a row says.
    tma = tile.USE_TMA and name is not None and name.down and name.dtype != "int4_w4a16"
    if name is not None and tma and name.intermediate % tile.BLOCK_SIZE_K:
        found.append(uneven_tma(label, key, name.intermediate, tile))
    return found


def uneven_tma(label: str, key: str, k: int, tile: Tile) -> Finding:
    """Return the finding of a tensor descriptor over a K that BLOCK_SIZE_K does not divide."""
    what = f"USE_TMA with K={k}, which BLOCK_SIZE_K {tile.BLOCK_SIZE_K} does not divide: reads past the rows"
    return Finding(Level.ERROR, "tma-uneven", label, what, "switch USE_TMA off or choose a divisor of K", key)


def _order(label: str, rows: dict[int, Tile]) -> list[Finding]:
    keys = list(rows)
    if keys == sorted(keys):
        return []
    ordered = sorted(keys)
    middles = [(a + b) // 2 for a, b in itertools.pairwise(ordered) if (a + b) % 2 == 0]
    moved = [m for m in middles if nearest(keys, m) != nearest(ordered, m)]
    effect = f"; at M={', '.join(map(str, moved))} the tie goes to the larger key" if moved else ""
    what = f"keys are not in ascending order, and SGLang breaks ties by file order{effect}"
    return [Finding(Level.WARNING, "keys-unsorted", label, what, "sort the keys by number")]


def ladder_findings(file: ConfigFile, max_tokens: int) -> list[Finding]:
    """Return where the keys are so sparse that one row serves very different M."""
    keys = sorted(file.rows)
    if not keys:
        return []
    found: list[Finding] = []

    def add(code: str, what: str, fix: str) -> None:
        found.append(Finding(Level.WARNING, code, file.label, what, fix))

    if max_tokens > PAST_END * keys[-1]:
        what = f"the largest key is {keys[-1]}: its row serves everything up to M={max_tokens}"
        add("ladder-short", what, f"tune larger M up to {max_tokens}, or give --max-tokens of the server")
    if keys[0] > GAP:
        add("ladder-start", f"the smallest key is {keys[0]}: its row serves decoding at M=1 too", "tune M=1, 2, 4")
    gaps = [f"{low} to {high}" for low, high in itertools.pairwise(keys) if high > GAP * max(low, 1)]
    if gaps:
        add("ladder-gap", f"more than {GAP}x between neighbouring keys: {', '.join(gaps)}", "tune M in between")
    return found
