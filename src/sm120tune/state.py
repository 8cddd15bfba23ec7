"""Where state lives on the user's machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sm120tune.errors import UserError


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/sm120tune`` (``~/.cache/sm120tune`` when unset), which need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sm120tune"


def cache_root() -> Path:
    """Return :func:`cache_folder`, made if need be; raises UserError when it cannot be written."""
    root = cache_folder()
    try:
        make_writable(root)
    except OSError as error:
        raise UserError(
            f"cannot write the cache folder {root}: {error.strerror}; set XDG_CACHE_HOME to one that can"
        ) from error
    return root


def make_writable(folder: Path) -> None:
    """Make a folder, if need be, and see that a file can be written there; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
