"""Several files written and removed as if at once, and undone as if at once."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sm120tune._atomic import FilesError, read_optional, replace_files


@dataclass
class Changes:
    """An ordered list of changes under one folder. None of them is on disk before :meth:`apply`.

    Files are written and removed in the order in which they were noted, so that a killed process leaves what the
    manifest can explain.
    """

    base: Path
    contents: dict[str, bytes | None] = field(default_factory=dict)
    """By path below ``base``; None removes the file."""
    modes: dict[str, int] = field(default_factory=dict)
    explained_by: str | None = None
    """Path that is on disk, with all that was noted before it, before anything that was noted after it."""

    def read(self, path: str) -> bytes | None:
        """Return a file's content as it will be, None where there is no such file; raises FilesError."""
        return self.contents[path] if path in self.contents else read_optional(self.base / path)

    def put(self, path: str, content: bytes | None, mode: int | None = None) -> None:
        """Note a file's new content, or its removal; a second note on a path takes the place of the first."""
        self.contents.pop(path, None)
        self.contents[path] = content
        self.modes.pop(path, None)
        if mode is not None:
            self.modes[path] = mode

    def new_folders(self) -> list[str]:
        """Return the folders below ``base`` that writing has to make, parents first."""
        folders: dict[str, None] = {}
        for path, content in self.contents.items():
            if content is not None:
                parents = [parent for parent in Path(path).parents if parent != Path()]
                folders.update(dict.fromkeys(str(parent) for parent in reversed(parents)))
        return [folder for folder in folders if not (self.base / folder).exists()]

    def apply(self) -> Changes:
        """Write everything and return the way back; raises FilesError with everything as it was.

        A file whose content is right already is left alone.
        """
        back = Changes(self.base)
        for path in reversed(self.contents):
            back.put(path, read_optional(self.base / path), file_mode(self.base / path))
        folders = self.new_folders()
        try:
            _write(self)
        except BaseException as error:
            try:
                _write(back)
            except FilesError as second:
                raise FilesError(f"{error}; and not all could be undone: {second}") from None
            finally:
                remove_folders(self.base, folders)
            raise
        return back


def remove_folders(base: Path, folders: Iterable[str]) -> None:
    """Remove those of some folders that are empty, deepest first."""
    for folder in sorted(folders, key=lambda path: path.count("/"), reverse=True):
        with suppress(OSError):
            (base / folder).rmdir()


def folders_under(base: Path, top: str) -> list[str]:
    """Return a folder below ``base`` and all folders in it."""
    inside = [path for path in (base / top).rglob("*") if path.is_dir() and not path.is_symlink()]
    return [top, *(str(path.relative_to(base)) for path in inside)]


def file_mode(path: Path) -> int | None:
    """Return a file's permissions, or None where there is no file."""
    with suppress(OSError):
        return stat.S_IMODE(path.stat().st_mode)
    return None


def _write(changes: Changes) -> None:
    base = changes.base
    pending = [(path, new) for path, new in changes.contents.items() if read_optional(base / path) != new]
    order = list(changes.contents)
    last = order.index(changes.explained_by) if changes.explained_by is not None else -1
    early = set(order[: last + 1])
    for (_, removing), group in itertools.groupby(pending, key=lambda item: (item[0] in early, item[1] is None)):
        batch = {base / path: content for path, content in group}
        if removing:
            for path in batch:
                _remove(path)
        else:
            replace_files({path: content for path, content in batch.items() if content is not None})
        _set_modes(changes)
    _set_modes(changes)


def _set_modes(changes: Changes) -> None:
    for path, mode in changes.modes.items():
        # The content is what counts; not every file system keeps permissions.
        with suppress(OSError):
            os.chmod(changes.base / path, mode)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise FilesError(f"cannot remove {path}: {error.strerror or error}; nothing was changed") from None
