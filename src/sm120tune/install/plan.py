"""Works out what an install or an uninstall changes; nothing here writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sm120tune import __version__
from sm120tune.errors import UserError
from sm120tune.install.changes import Changes, file_mode
from sm120tune.install.manifest import (
    BACKUP_FOLDER,
    InstalledFile,
    InstalledPair,
    Manifest,
    Original,
    digest,
)
from sm120tune.install.originals import originals
from sm120tune.install.pair import ConfigPair
from sm120tune.install.place import Place

_USUAL_MODE = 0o644


def plan_pair(pair: ConfigPair, old: InstalledPair | None, changes: Changes, force: bool) -> tuple[str, InstalledPair]:
    """Note one pair's files and the backups of what they replace; return "installed", "updated" or "unchanged".

    A pair that is installed already keeps its original backup. Raises UserError for a target that is a symbolic
    link or the source itself, and, unless ``force``, for one that was edited since an earlier install.
    """
    known = {file.path: file for file in old.files} if old is not None else {}
    files: list[InstalledFile] = []
    same = old is not None
    for target, content in zip(pair.targets, pair.contents, strict=True):
        current = changes.read(target)
        _check_target(pair, changes.base / target)
        before = known.get(target)
        if before is None:
            original = _back_up(target, current, changes)
        else:
            original = before.original
            if not (force or current == content or before.as_installed(current) or before.as_before(current)):
                raise UserError(
                    f"{changes.base / target} was edited since it was installed; save it elsewhere, then give --force "
                    "to overwrite it (the backup from before the first install stays)"
                )
        same = same and current == content
        files.append(InstalledFile(target, digest(content), original))
        changes.put(target, content, original.mode if original is not None else None)
    if same and old is not None:
        return "unchanged", old
    entry = InstalledPair(
        triton_folder=pair.ladder.folder,
        up_name=pair.ladder.up_name,
        down_name=pair.ladder.down_name,
        kind=pair.record.kind,
        installed_by=__version__,
        installed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        source=str(pair.up_path.absolute()),
        files=tuple(files),
    )
    return "installed" if old is None else "updated", entry


def _check_target(pair: ConfigPair, path: Path) -> None:
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link to {path.readlink()}; remove it, or put a file in its place")
    if path.exists() and path.samefile(pair.up_path):
        raise UserError(f"{path} is the very file to install; give a --config-dir other than the output of a run")


def _back_up(target: str, current: bytes | None, changes: Changes) -> Original | None:
    if current is None:
        return None
    backup = f"{BACKUP_FOLDER}/{target}"
    changes.put(backup, current)
    mode = file_mode(changes.base / target)
    return Original(digest(current), _USUAL_MODE if mode is None else mode, backup)


def plan_fill(place: Place, changes: Changes) -> tuple[InstalledFile, ...]:
    """Note a copy of every file of SGLang's shipped tree that a config folder lacks.

    Of pairs that are installed in that tree, what was there before is copied. Raises UserError without a config
    folder, FilesError for a file that cannot be read.
    """
    if place.config_dir is None:
        raise UserError("--fill copies SGLang's shipped tree into a --config-dir; give one")
    shipped = place.tree.configs_dir
    base = shipped.parent
    before = originals(base)
    filled: list[InstalledFile] = []
    for path in sorted(shipped.glob("triton_*/*.json")):
        target = f"configs/{path.parent.name}/{path.name}"
        source = before.get(path, path)
        content = Changes(base).read(str(source.relative_to(base))) if source is not None else None
        if content is not None and changes.read(target) is None:
            changes.put(target, content)
            filled.append(InstalledFile(target, digest(content), None))
    return tuple(filled)


def merge_pairs(old: Iterable[InstalledPair], new: Iterable[InstalledPair]) -> tuple[InstalledPair, ...]:
    """Return the pairs of a manifest with some replaced or added."""
    return tuple({pair.key: pair for pair in (*old, *new)}.values())


def choose_pairs(manifest: Manifest, files: Sequence[Path] | None) -> tuple[InstalledPair, ...]:
    """Return the installed pairs that files name (by either name, with or without a folder), or all for None.

    Raises UserError for a file that is not installed, or is so for several Triton versions.
    """
    if files is None:
        return manifest.pairs
    chosen: dict[tuple[str, str], InstalledPair] = {}
    for file in files:
        folder = file.parent.name
        found = [
            pair
            for pair in manifest.pairs
            if file.name in (pair.up_name, pair.down_name)
            and (not folder.startswith("triton_") or folder == pair.triton_folder)
        ]
        if not found:
            raise UserError(f"{file} is not installed there; `sm120tune list` shows what is")
        if len(found) > 1:
            folders = ", ".join(pair.triton_folder for pair in found)
            raise UserError(
                f"{file} is installed in {folders}; give it with its folder, as {folders.split(',')[0]}/{file.name}"
            )
        chosen[found[0].key] = found[0]
    return tuple(chosen.values())


def plan_removal(
    files: Sequence[InstalledFile], filled: Sequence[InstalledFile], changes: Changes, force: bool
) -> None:
    """Note what puts back the state before ``files`` were installed and ``filled`` were copied.

    Raises UserError, unless ``force``, for a file that was edited since; and for a backup that is damaged.
    """
    paths = {file.path for file in files}
    for file in (*files, *(copy for copy in filled if copy.path not in paths)):
        current = changes.read(file.path)
        if not (force or file.as_installed(current) or file.as_before(current)):
            how = "is gone" if current is None else "was edited"
            raise UserError(
                f"{changes.base / file.path} {how} since it was installed; --force puts back what was there before"
            )
    for file in files:
        _restore(file, changes)
    for file in filled:
        changes.put(file.path, None)


def _restore(file: InstalledFile, changes: Changes) -> None:
    if file.original is None:
        changes.put(file.path, None)
        return
    content = changes.read(file.path)
    if not file.as_before(content):
        content = changes.read(file.original.backup)
        if not file.as_before(content):
            raise UserError(
                f"{changes.base / file.original.backup}, the backup of {file.path}, is damaged or gone; reinstall "
                "SGLang for its own file"
            )
    changes.put(file.path, content, file.original.mode)
