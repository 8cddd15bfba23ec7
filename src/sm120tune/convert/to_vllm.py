"""From a pair of SGLang to vLLM's one file, and what is lost on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm120tune._atomic import FilesError, replace_files
from sm120tune._jsonfile import dump_object
from sm120tune.check.content import ConfigFile
from sm120tune.check.reach import nearest
from sm120tune.convert.sources import read_sglang_files, triton_of
from sm120tune.errors import UserError
from sm120tune.tiles import Tile
from sm120tune.upstream import vllm

_SHOWN = 6

Half = Literal["up", "down"]


@dataclass(frozen=True)
class VllmFile:
    """A written file."""

    path: Path
    rows: int
    lost: tuple[str, ...]
    """What vLLM cannot be told, a sentence each."""


def convert_to_vllm(path: Path, output: Path, use: Half | None, *, replace: bool = False) -> VllmFile:
    """Write vLLM's file into ``output/vllm``; raises UserError where up and down differ and ``use`` chooses neither."""
    up_path = path.with_name(path.stem.removesuffix("_down") + path.suffix)
    up, down = read_sglang_files(up_path)
    name = up.name
    assert name is not None
    if name.dtype in vllm.UNLIKE:
        raise UserError(f"{up_path}: {name.dtype} is not converted: {vllm.UNLIKE[name.dtype]}; tune for vLLM")
    lost = _lost(up, down, use)
    chosen = down if use == "down" and down is not None else up
    rows = {m: chosen.rows[nearest(chosen.rows, m)] for m in _keys(up, down)}
    target = (
        output
        / "vllm"
        / vllm.file_name(name.experts, name.intermediate, name.device.replace(" ", "_"), name.dtype, name.block_shape)
    )
    if target.exists() and not replace:
        raise UserError(f"{target} is there already; give --replace, or another --output")
    try:
        replace_files({target: dump_object(vllm.dump_rows(rows, triton_of(up_path))).encode()})
    except FilesError as error:
        raise UserError(f"{error}; choose another --output") from None
    return VllmFile(target, len(rows), lost)


def _lost(up: ConfigFile, down: ConfigFile | None, use: Half | None) -> tuple[str, ...]:
    """Say what one file for both GEMMs, without TMA, cannot hold."""
    lost: list[str] = []
    differing = [m for m in _keys(up, down) if _plain(up, m) != _plain(down or up, m)]
    where = _some(differing)
    if differing and use is None:
        raise UserError(
            f"{up.path}: up and down rows differ at M={where}, and vLLM has one file for both GEMMs; choose the rows "
            "that both are to run with --use up or --use down"
        )
    if differing:
        lost.append(f"the {'down' if use == 'up' else 'up'} rows at M={where}: vLLM runs the {use} rows in both GEMMs")
    tma = [m for m in _keys(up, down) if any(file.rows[nearest(file.rows, m)].USE_TMA for file in _files(up, down))]
    if tma:
        lost.append(f"USE_TMA at M={_some(tma)}: vLLM's kernel has none, and nobody timed these rows without it")
    if up.name is not None and up.name.per_channel:
        lost.append("per_channel_quant: vLLM reads the same file for per-tensor scales")
    return tuple(lost)


def _some(sizes: Sequence[int]) -> str:
    """Return a few M as text: a whole ladder would be no line to read."""
    shown = ", ".join(map(str, sizes[:_SHOWN]))
    return shown if len(sizes) <= _SHOWN else f"{shown} and {len(sizes) - _SHOWN} more"


def _files(up: ConfigFile, down: ConfigFile | None) -> Iterable[ConfigFile]:
    return (up,) if down is None else (up, down)


def _keys(up: ConfigFile, down: ConfigFile | None) -> list[int]:
    return sorted({m for file in _files(up, down) for m in file.rows})


def _plain(file: ConfigFile, m: int) -> Tile:
    """Return the row that serves M without its TMA."""
    row = file.rows[nearest(file.rows, m)].to_row()
    return Tile.from_row({name: value for name, value in row.items() if name != "USE_TMA"})
