"""Reads pairs that this tool wrote: both config files, both provenance files, and nothing that was changed since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune import provenance as prov
from sm120tune._atomic import FilesError, read_optional
from sm120tune._jsonfile import parse_object
from sm120tune.errors import UserError
from sm120tune.provenance import FileProvenance
from sm120tune.tiles import Tile, TilePair
from sm120tune.writer import Ladder

_DOWN = "_down"
_TUNE_AGAIN = "tune the pair again"


@dataclass(frozen=True)
class ConfigPair:
    """One pair as it lies in an output folder."""

    up_path: Path
    ladder: Ladder
    up_rows: dict[int, dict[str, Any]]
    """As SGLang's loader sees them."""
    down_rows: dict[int, dict[str, Any]]
    contents: tuple[bytes, bytes, bytes, bytes]
    """Of the up and the down file, and of the provenance of each."""

    @property
    def record(self) -> FileProvenance:
        """The pair's provenance."""
        return self.ladder.provenance

    @property
    def device_name(self) -> str:
        """The card's name as torch reports it."""
        return str(self.record.device["name"])

    @property
    def key(self) -> tuple[str, str]:
        """Triton folder and name of the up file: two pairs with the same key take each other's place."""
        return self.ladder.folder, self.ladder.up_name

    @property
    def targets(self) -> tuple[str, str, str, str]:
        """Where the contents go, below the folder that holds ``configs``."""
        names = (self.ladder.up_name, self.ladder.down_name)
        up, down, *records = (
            f"{kind}/{self.ladder.folder}/{name}" for kind in ("configs", "provenance") for name in names
        )
        return up, down, records[0], records[1]


def find_pairs(sources: Iterable[Path]) -> list[ConfigPair]:
    """Read the pairs that files and folders name, each once, in order.

    Raises UserError for a path that holds no pair, a file without its partner or its provenance, a file that is
    damaged or was changed since it was written, and two pairs that would take each other's place.
    """
    pairs: dict[tuple[str, str], ConfigPair] = {}
    for source in sources:
        for up_path in _up_files(source):
            pair = read_pair(up_path)
            other = pairs.setdefault(pair.key, pair)
            if not other.up_path.samefile(up_path):
                raise UserError(f"{other.up_path} and {up_path} are for the same name and Triton; give one of them")
    return list(pairs.values())


def _up_files(source: Path) -> list[Path]:
    if source.is_dir():
        found = sorted(path for path in source.rglob("*.json") if _is_config(path.absolute()))
        if not found:
            raise UserError(f"{source}: no configs/triton_*/*.json in it; give a pair's file or the --output of a run")
        return sorted({_up_of(path) for path in found})
    if source.is_symlink() and not source.exists():
        raise UserError(f"{source} is a symbolic link to nowhere ({source.readlink()})")
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if source.suffix != ".json":
        raise UserError(f"{source} is no SGLang config file (….json)")
    return [_up_of(source)]


def _is_config(path: Path) -> bool:
    return path.parent.name.startswith("triton_") and path.parent.parent.name == "configs"


def _up_of(path: Path) -> Path:
    return path.with_name(path.stem.removesuffix(_DOWN) + path.suffix)


def read_pair(up_path: Path) -> ConfigPair:
    """Read one pair, its up file given; raises UserError as :func:`find_pairs` does."""
    down_path = up_path.with_name(up_path.stem + _DOWN + up_path.suffix)
    records = [
        up_path.parent.parent.parent / "provenance" / up_path.parent.name / path.name for path in (up_path, down_path)
    ]
    contents = [_read(path) for path in (up_path, down_path)]
    for path, other, content in ((up_path, down_path, contents[0]), (down_path, up_path, contents[1])):
        if content is None:
            raise UserError(f"{other} has no partner {path.name} beside it; SGLang needs both, so give the whole pair")
    contents += [_read(path) for path in records]
    for path, content in zip(records, contents[2:], strict=True):
        if content is None:
            raise UserError(f"{up_path} has no provenance at {path}; only pairs that sm120tune wrote can be installed")
    up, down, up_record, down_record = (content or b"" for content in contents)
    rows = _rows(up_path, up), _rows(down_path, down)
    _check_shape(up_path, *rows)
    record = _record(records[0], up_record)
    if record != _record(records[1], down_record):
        raise UserError(f"{records[0]} and {records[1]} differ; {_TUNE_AGAIN}")
    ladder = _ladder(up_path, down_path, rows, record)
    return ConfigPair(up_path, ladder, *rows, (up, down, up_record, down_record))


def _read(path: Path) -> bytes | None:
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a symbolic link to nowhere ({path.readlink()})")
    try:
        return read_optional(path)
    except FilesError as error:
        raise UserError(str(error)) from None


def _record(path: Path, content: bytes) -> FileProvenance:
    try:
        return prov.loads(content.decode())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {_TUNE_AGAIN}") from None


def _rows(path: Path, content: bytes) -> dict[int, dict[str, Any]]:
    try:
        data = parse_object(content.decode())
        for key, row in data.items():
            # SGLang's loader calls int() on every key; "01" or "1_0" would pass there.
            if not key.isascii() or not key.isdigit() or str(int(key)) != key or int(key) < 1:
                raise ValueError(f"key {key!r} is no number of tokens")
            if not isinstance(row, dict):
                raise ValueError(f"row {key} must be a JSON object, not {row!r:.60}")
            Tile.from_row(row)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {_TUNE_AGAIN}") from None
    if not data:
        raise UserError(f"{path} has no rows; {_TUNE_AGAIN}")
    return {int(key): row for key, row in data.items()}


def _check_shape(up_path: Path, up: dict[int, dict[str, Any]], down: dict[int, dict[str, Any]]) -> None:
    for m in sorted(set(up) ^ set(down)):
        raise UserError(f"{up_path} and its down file differ in their keys: M={m} is in one only; {_TUNE_AGAIN}")
    for m, row in up.items():
        here, there = row["BLOCK_SIZE_M"], down[m]["BLOCK_SIZE_M"]
        if here != there:
            raise UserError(
                f"{up_path}: BLOCK_SIZE_M at M={m} is {here} there and {there} in the down file; SGLang needs one "
                f"for both, so {_TUNE_AGAIN}"
            )


def _ladder(
    up_path: Path,
    down_path: Path,
    rows: tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]],
    record: FileProvenance,
) -> Ladder:
    up, down = rows
    pairs = {m: TilePair(Tile.from_row(up[m]), Tile.from_row(down[m])) for m in up}
    if list(up) != sorted(up) or list(down) != sorted(down):
        raise UserError(f"{up_path} or its down file was changed since it was written: keys not in order")
    try:
        return Ladder(up_path.name, down_path.name, record.versions["triton"], pairs, record)
    except ValueError:
        raise UserError(
            f"{up_path} or its down file was changed since it was written (its provenance has other rows); "
            f"{_TUNE_AGAIN}"
        ) from None
