"""Writes a ladder's config pair and its provenance: all four files or none, under a lock, merged with what is there.

The tree under ROOT is ``<kind>/configs/triton_X_Y_Z/<name>`` (what ``SGLANG_MOE_CONFIG_DIR=ROOT/<kind>`` reads) and,
beside it, ``<kind>/provenance/triton_X_Y_Z/<same name>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from sm120tune import provenance as prov
from sm120tune._atomic import FilesError, read_optional, replace_files
from sm120tune._jsonfile import dump_object, parse_object
from sm120tune.errors import UserError
from sm120tune.provenance import FileProvenance
from sm120tune.tiles import Tile, TilePair

LOCK_NAME = ".sm120tune.lock"

_HINT = "use --replace to overwrite or another --output"


@dataclass(frozen=True)
class Ladder:
    """Every row of one config pair. Raises ValueError where rows and provenance are not of the same M and tiles."""

    up_name: str
    """SGLang's file name of the up file; the caller asks SGLang's rules for both."""
    down_name: str
    triton_version: str
    """Of the Triton that measured, as it reports itself."""
    rows: Mapping[int, TilePair]
    provenance: FileProvenance
    superseded: frozenset[int] = frozenset()
    """M whose rows in an older file go, although this ladder has none for them."""

    def __post_init__(self) -> None:
        chosen = {row.m: row.chosen for row in self.provenance.rows}
        if not self.rows or dict(self.rows) != chosen:
            raise ValueError(f"a ladder of M {sorted(self.rows)} has provenance for M {sorted(chosen)} or other tiles")

    @property
    def folder(self) -> str:
        """Name of the Triton folder, ``triton_3_6_0`` for 3.6.0.

        Raises UserError for a version that is not plain integers: SGLang's lookup parses every ``triton_*`` folder
        with ``int()`` and crashes on any other.
        """
        return _folder(self.triton_version)


@dataclass(frozen=True)
class WrittenPair:
    """Where a ladder went."""

    up_path: Path
    down_path: Path
    provenance_paths: tuple[Path, Path]
    """Beside the up and the down file, with the same content."""


def write_ladder(root: Path, ladder: Ladder, *, replace: bool = False, lock_timeout_s: float = 60.0) -> WrittenPair:
    """Write a ladder under ``root``, merging it into a pair that is already there.

    New rows win over old ones of the same M; other old rows survive with their provenance. Raises UserError, with
    nothing changed on disk, where the old pair belongs to another problem, was not written by this tool, was edited
    or is damaged (unless ``replace``), where another process holds the lock for ``lock_timeout_s`` seconds, and
    where the files cannot be written.
    """
    for name in (ladder.up_name, ladder.down_name):
        if not name.endswith(".json") or Path(name).name != name:
            raise UserError(f"{name!r} is no SGLang config file name; it must be a plain name ending in .json")
    if ladder.up_name == ladder.down_name:
        raise UserError(f"{ladder.up_name!r} is given for both files of the pair; the down file's name must differ")
    paths = _paths(root / ladder.provenance.kind, ladder.folder, (ladder.up_name, ladder.down_name))
    with _locked(root, lock_timeout_s):
        try:
            # Provenance last: a config that it does not match is told as damaged, never as ours.
            replace_files(_contents(paths, ladder, replace))
        except FilesError as error:
            raise UserError(f"{error}; free the space or the path, or choose another --output") from None
    return paths


def existing_rows(root: Path, record: FileProvenance, names: tuple[str, str], routing: str) -> dict[int, TilePair]:
    """Return the rows under ``root`` that a ladder of this provenance is going to be merged into, if there is a pair.

    ``record`` needs no rows yet; ``routing`` is that of the rows to come. Raises what :func:`write_ladder` raises.
    """
    paths = _paths(root / record.kind, _folder(record.versions["triton"]), names)
    old = _existing(paths)
    if old is None:
        return {}
    conflict = prov.merge_conflict(old, record, routing)
    if conflict is not None:
        raise UserError(f"{paths.up_path} is for something else: {conflict}; {_HINT}")
    return {row.m: row.chosen for row in old.rows}


def _folder(triton_version: str) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)+", triton_version):
        raise UserError(
            f"Triton {triton_version!r} is no release version; SGLang's lookup crashes on a folder named "
            "after it, so tune with a released Triton such as 3.6.0"
        )
    return "triton_" + triton_version.replace(".", "_")


def _paths(kind_root: Path, folder: str, names: tuple[str, str]) -> WrittenPair:
    configs, records = (kind_root / part / folder for part in ("configs", "provenance"))
    return WrittenPair(configs / names[0], configs / names[1], (records / names[0], records / names[1]))


@contextmanager
def _locked(root: Path, timeout_s: float) -> Iterator[None]:
    path = root / LOCK_NAME
    lock = filelock.FileLock(path, timeout=timeout_s)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise UserError(
            f"{path} has been held by another sm120tune for {timeout_s:g} s; wait for it or choose another --output"
        ) from None
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write under {root}: {reason}; choose another --output") from None
    try:
        yield
    finally:
        lock.release()


def _contents(paths: WrittenPair, ladder: Ladder, replace: bool) -> dict[Path, bytes]:
    record = ladder.provenance
    old = None if replace else _existing(paths)
    if old is not None:
        conflict = prov.merge_conflict(old, record)
        if conflict is not None:
            raise UserError(f"{paths.up_path} is for something else: {conflict}; {_HINT}")
        record = prov.merge(old, record, ladder.superseded)
    text = record.dumps().encode()
    return {
        paths.up_path: _config(record.tiles(down=False)),
        paths.down_path: _config(record.tiles(down=True)),
        paths.provenance_paths[0]: text,
        paths.provenance_paths[1]: text,
    }


def _config(rows: Mapping[int, Tile]) -> bytes:
    return dump_object({str(m): rows[m].to_row() for m in sorted(rows)}).encode()


def _existing(paths: WrittenPair) -> FileProvenance | None:
    """Return the provenance of a pair that is whole, consistent and ours, or None where there is no file at all."""
    wanted = (paths.up_path, paths.down_path, *paths.provenance_paths)
    try:
        found = {path: read_optional(path) for path in wanted}
    except FilesError as error:
        raise UserError(f"{error}; choose another --output") from None
    if all(content is None for content in found.values()):
        return None
    for path, content in found.items():
        if content is None:
            present = next(there for there, text in found.items() if text is not None)
            raise UserError(f"{present} is there without {path}, so its origin is unknown; {_HINT}")
    (up, down, *records) = ((path, content or b"") for path, content in found.items())
    record, other = (_record(path, content) for path, content in records)
    if record != other:
        raise UserError(f"{records[0][0]} and {records[1][0]} differ; {_HINT}")
    for (path, content), tiles in ((up, record.tiles(down=False)), (down, record.tiles(down=True))):
        try:
            rows = {int(m): Tile.from_row(row) for m, row in parse_object(content.decode()).items()}
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged: {error}; {_HINT}") from None
        if rows != tiles:
            raise UserError(f"{path} was changed since it was written (its provenance has other rows); {_HINT}")
    return record


def _record(path: Path, content: bytes) -> FileProvenance:
    try:
        return prov.loads(content.decode())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {_HINT}") from None
