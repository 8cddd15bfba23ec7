"""The folders of a config tree: which files there are, and folder names that make SGLang raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120tune.check.findings import Finding, Level
from sm120tune.check.names import parse_name
from sm120tune.errors import UserError

_PREFIX = "triton_"


@dataclass(frozen=True)
class Source:
    """A file to read and how the findings name it."""

    path: Path
    label: str


def sources_of(paths: Sequence[Path]) -> tuple[Source, ...]:
    """Return the files to check: those given, and every config file under the folders given.

    Raises UserError for a path that is not there, one that cannot be listed, or a folder without config files.
    """
    found: dict[Path, Source] = {}
    for path in paths:
        try:
            if path.is_dir():
                # Two folders may hold the same names.
                prefix = path if len(paths) > 1 else Path()
                inside = [Source(file, str(prefix / file.relative_to(path))) for file in _config_files(path)]
                if not inside:
                    raise UserError(
                        f"{path}: no config file (E=…,N=…,device_name=….json) there; give another file or folder"
                    )
            elif path.exists():
                inside = [Source(path, str(path))]
            else:
                raise UserError(f"{path}: no such file or folder; give a config file or a folder of them")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from None
        for source in inside:
            found.setdefault(source.path.resolve(), source)
    return tuple(found.values())


def tree_sources(configs: Path, device_files: Iterable[str]) -> tuple[Source, ...]:
    """Return the files of a config tree for cards by their name in files."""
    wanted = set(device_files)
    found: list[Source] = []
    for path in sorted(configs.glob(f"{_PREFIX}*/*.json")):
        name = parse_name(path.name)
        if name is not None and name.device in wanted:
            found.append(Source(path, str(path.relative_to(configs))))
    return tuple(found)


def _config_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*.json"))
        if "device_name=" in path.name and "provenance" not in path.relative_to(folder).parts[:-1]
    ]


def configs_root(path: Path) -> Path | None:
    """Return the folder of ``triton_X_Y_Z`` folders that a file lies in, or None."""
    folder = path.absolute().parent
    return folder.parent if folder.name.startswith(_PREFIX) else None


def version_of(folder: str) -> tuple[int, ...] | None:
    """Return the version that SGLang reads from a folder name, or None where it raises ValueError."""
    try:
        return tuple(int(part) for part in folder.removeprefix(_PREFIX).replace("_", ".").split("."))
    except ValueError:
        return None


def folder_findings(root: Path) -> list[Finding]:
    """Return the entries beside the version folders that make every lookup without an exact file raise."""
    found: list[Finding] = []
    for name in _folders(root):
        if version_of(name) is None:
            what = "SGLang parses every such name with int(): each lookup that finds no exact file raises ValueError"
            fix = "rename it to the released version, or move it away"
            found.append(Finding(Level.ERROR, "folder-version", name, what, fix))
    return found


def other_folders(path: Path) -> list[Path]:
    """Return the version folders beside a file's own, newest first as SGLang searches them."""
    root = configs_root(path)
    if root is None:
        return []
    versions = {name: version for name in _folders(root) if (version := version_of(name)) is not None}
    own = path.absolute().parent.name
    return [root / name for name in sorted(versions, key=lambda name: versions[name], reverse=True) if name != own]


def _folders(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if entry.name.startswith(_PREFIX))
