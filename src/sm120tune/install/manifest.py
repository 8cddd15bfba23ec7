"""What is installed under one folder and how to undo it, as a JSON file beside the backups."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from sm120tune._atomic import FilesError, read_optional
from sm120tune._jsonfile import Fields, dump_object, parse_object
from sm120tune.errors import UserError

RECORDS_FOLDER = "provenance"
BACKUP_FOLDER = f"{RECORDS_FOLDER}/.backup"
MANIFEST = f"{BACKUP_FOLDER}/manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Original:
    """A file that was there before."""

    sha256: str
    mode: int
    backup: str
    """Where its content is kept, below the base folder."""


@dataclass(frozen=True)
class InstalledFile:
    """One file as it was installed."""

    path: str
    """Below the base folder."""
    sha256: str
    original: Original | None

    def as_installed(self, content: bytes | None) -> bool:
        """Whether a file still is what was installed."""
        return content is not None and digest(content) == self.sha256

    def as_before(self, content: bytes | None) -> bool:
        """Whether a file is what was there before, as after an upgrade of SGLang or a process that was killed."""
        if content is None or self.original is None:
            return content is None and self.original is None
        return digest(content) == self.original.sha256


@dataclass(frozen=True)
class InstalledPair:
    """One pair: the up and the down file, and the provenance of each."""

    triton_folder: str
    up_name: str
    down_name: str
    kind: str
    """measured, estimated or replayed."""
    installed_by: str
    """Version of the sm120tune that installed it."""
    installed_at: str
    source: str
    """Where the up file came from."""
    files: tuple[InstalledFile, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What tells pairs apart."""
        return self.triton_folder, self.up_name


@dataclass(frozen=True)
class Manifest:
    """Everything that this tool put under one base folder."""

    pairs: tuple[InstalledPair, ...] = ()
    filled: tuple[InstalledFile, ...] = ()
    """Copies of SGLang's shipped files."""
    made_folders: tuple[str, ...] = ()

    def find(self, key: tuple[str, str]) -> InstalledPair | None:
        """Return the pair of that key, or None."""
        return next((pair for pair in self.pairs if pair.key == key), None)

    @property
    def empty(self) -> bool:
        """Whether nothing is installed."""
        return not self.pairs and not self.filled

    def dumps(self) -> bytes:
        """Render as the manifest's file."""
        return dump_object({"schema_version": SCHEMA_VERSION, **asdict(self)}).encode()


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def load_manifest(base: Path) -> Manifest:
    """Read the manifest under ``base``, an empty one where there is none; raises UserError where it is damaged."""
    path = base / MANIFEST
    try:
        content = read_optional(path)
        return Manifest() if content is None else _manifest(Fields(parse_object(content.decode())))
    except FilesError as error:
        raise UserError(str(error)) from None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged: {error}; restore the files that lie beside it by hand, then remove that folder"
        ) from None


def _manifest(data: Fields) -> Manifest:
    version = data.integer("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {version}; this release reads {SCHEMA_VERSION}")
    result = Manifest(
        pairs=tuple(_pair(item, f"pairs[{index}].") for index, item in enumerate(data.items("pairs"))),
        filled=tuple(_file(item, f"filled[{index}].") for index, item in enumerate(data.items("filled"))),
        made_folders=tuple(
            _inside(Fields({"folder": item}, f"made_folders[{index}]."), "folder")
            for index, item in enumerate(data.items("made_folders"))
        ),
    )
    data.finish()
    return result


def _pair(item: object, where: str) -> InstalledPair:
    data = Fields(item, where)
    result = InstalledPair(
        triton_folder=data.text("triton_folder"),
        up_name=data.text("up_name"),
        down_name=data.text("down_name"),
        kind=data.text("kind"),
        installed_by=data.text("installed_by"),
        installed_at=data.text("installed_at"),
        source=data.text("source"),
        files=tuple(_file(file, f"{where}files[{index}].") for index, file in enumerate(data.items("files"))),
    )
    data.finish()
    return result


def _file(item: object, where: str) -> InstalledFile:
    data = Fields(item, where)
    original = None
    if data.take("original") is not None:
        before = Fields(data.mapping("original"), f"{where}original.")
        original = Original(before.text("sha256"), before.integer("mode", most=0o7777), _inside(before, "backup"))
        before.finish()
    result = InstalledFile(_inside(data, "path"), data.text("sha256"), original)
    data.finish()
    return result


def _inside(data: Fields, key: str) -> str:
    """Return a path below the base folder; anything else could remove a stranger's file."""
    path = data.text(key)
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise ValueError(f"{data.name(key)} must be a path inside the folder, not {path!r:.60}")
    return path
