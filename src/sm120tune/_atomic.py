"""Replaces several files as if at once: all of them, or none and nothing left behind."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_SUFFIX = ".sm120tune.tmp"


class FilesError(Exception):
    """One line with the path and the reason; the files are as they were unless it says otherwise."""


def read_optional(path: Path) -> bytes | None:
    """Return a file's content, None where there is no such file; raises FilesError where it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FilesError(f"cannot read {path}: {error.strerror or error}") from None


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Write every file, or raise FilesError and leave each as it was.

    Everything is staged and synced beside its target before the first target changes, so that a full disk fails
    early; a failure or an interrupt between two replacements is rolled back. The caller holds a lock.
    """
    old = {path: read_optional(path) for path in contents}
    made: list[Path] = []
    staged: dict[Path, Path] = {}
    replaced: list[Path] = []
    current = next(iter(contents))
    try:
        for current in contents:
            _make_folder(current.parent, made)
            _remove_leftovers(current)
        for current, content in contents.items():
            # Noted before it exists, so that an interrupt cannot hide it.
            staged[current] = _temporary(current)
            _write(staged[current], content)
        for current, temporary in staged.items():
            replaced.append(current)
            os.replace(temporary, current)
    except BaseException as error:
        lost = _roll_back(old, staged, replaced, made)
        if isinstance(error, OSError):
            reason = f"cannot write {current}: {error.strerror or error}"
            if lost:
                raise FilesError(f"{reason}, nor restore {', '.join(map(str, lost))}") from None
            raise FilesError(f"{reason}; nothing was changed") from None
        raise
    for folder in {path.parent for path in contents}:
        _sync_folder(folder)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _make_folder(folder: Path, made: list[Path]) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")


def _remove_leftovers(path: Path) -> None:
    # Under the caller's lock nobody else stages this file: what is there was left by a killed process.
    for name in os.listdir(path.parent):
        if name.startswith(f".{path.name}.") and name.endswith(_SUFFIX):
            (path.parent / name).unlink(missing_ok=True)


def _roll_back(
    old: Mapping[Path, bytes | None], staged: Mapping[Path, Path], replaced: list[Path], made: list[Path]
) -> list[Path]:
    """Undo what was done and return the paths that could not be restored."""
    # First of all free the space that restoring needs.
    for temporary in staged.values():
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    lost = []
    for path in reversed(replaced):
        content = old[path]
        try:
            if read_optional(path) == content:
                continue
            if content is None:
                path.unlink()
            else:
                temporary = _temporary(path)
                try:
                    _write(temporary, content)
                    os.replace(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
        except (OSError, FilesError):
            lost.append(path)
    for folder in reversed(made):
        with suppress(OSError):
            folder.rmdir()
    return lost


def _sync_folder(folder: Path) -> None:
    # The files are whole either way; this only makes the renames survive a power cut. Not all file systems can.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
