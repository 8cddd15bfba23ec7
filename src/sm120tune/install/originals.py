"""What SGLang would read if the installed pairs had never been installed."""

from __future__ import annotations

from pathlib import Path

from sm120tune._atomic import FilesError, read_optional
from sm120tune.errors import UserError
from sm120tune.install.manifest import InstalledFile, load_manifest


def originals(base: Path) -> dict[Path, Path | None]:
    """Return the installed config files under ``base``, each with the backup of what it replaced, or None for nothing.

    A file that is no longer as it was installed is left out: an upgrade of SGLang brought it, or somebody edited it,
    so it is what the server runs. Raises UserError for a damaged manifest or backup.
    """
    files = [file for pair in load_manifest(base).pairs for file in pair.files if file.path.startswith("configs/")]
    return {base / file.path: _backup(base, file) for file in files if file.as_installed(_read(base / file.path))}


def _backup(base: Path, file: InstalledFile) -> Path | None:
    if file.original is None:
        return None
    backup = base / file.original.backup
    if not file.as_before(_read(backup)):
        raise UserError(
            f"{backup}, the backup of {file.path}, is damaged or gone, so nothing tells what ran before; "
            "reinstall SGLang for its own file"
        )
    return backup


def _read(path: Path) -> bytes | None:
    try:
        return read_optional(path)
    except FilesError as error:
        raise UserError(str(error)) from None
