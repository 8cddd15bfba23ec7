"""Rows that SGLang ships for the same or a similar layer: good first candidates, nothing more."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.locate import SGLangTree
from sm120tune.upstream.lookup import config_dtype

_NAME = re.compile(
    r"E=(?P<E>\d+),N=(?P<N>\d+),device_name=(?P<device>[^,]+?)(?P<selectors>(,[^/]*?)?)(?P<down>_down)?\.json"
)


@dataclass(frozen=True)
class _File:
    path: Path
    distance: float
    """How far the key is from the problem's, in octaves of E and N; another card adds half an octave."""


class ShippedRows:
    """The up files of one tree for the problem's dtype, nearest key first, read when asked."""

    def __init__(self, tree: SGLangTree, problem: MoEProblem, device_file_name: str, *, files: int = 6) -> None:
        wanted = _selectors(problem)
        found: list[_File] = []
        for path in sorted(tree.configs_dir.glob("triton_*/*.json")):
            match = _NAME.fullmatch(path.name)
            if match is None or match["down"] or match["selectors"] != wanted:
                continue
            distance = abs(math.log2(int(match["E"]) / problem.experts)) if int(match["E"]) else math.inf
            distance += abs(math.log2(int(match["N"]) / problem.key_n)) if int(match["N"]) else math.inf
            found.append(_File(path, distance + (0.0 if match["device"] == device_file_name else 0.5)))
        nearest = sorted(found, key=lambda file: (file.distance, file.path.name))[:files]
        self._ladders = [_read(file.path) for file in nearest]

    def pairs(self, m: int) -> list[TilePair]:
        """Return the rows nearest to M, each used for both GEMMs, nearest key first and without repeats."""
        pairs: dict[TilePair, None] = {}
        for rows in self._ladders:
            if rows:
                nearest = min(rows, key=lambda key: abs(key - m))
                pairs[TilePair.same(rows[nearest])] = None
        return list(pairs)


def _selectors(problem: MoEProblem) -> str:
    dtype = config_dtype(problem)
    shape = f",block_shape={list(problem.block_shape)}" if problem.block_shape else ""
    channel = ",per_channel_quant=True" if problem.per_channel_quant else ""
    return (f",dtype={dtype}" if dtype else "") + shape + channel


def _read(path: Path) -> dict[int, Tile]:
    """Return the rows that can be read; a file that SGLang itself could not use seeds nothing."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        items = content.items()
    except (OSError, ValueError, AttributeError):
        return {}
    rows: dict[int, Tile] = {}
    for key, row in items:
        try:
            rows[int(key)] = Tile.from_row({**row, "USE_TMA": False})
        except (ValueError, TypeError):
            continue
    return rows
