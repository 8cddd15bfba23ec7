"""What is installed under one folder, and whether it still fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune import provenance as prov
from sm120tune._atomic import FilesError, read_optional
from sm120tune.errors import UserError
from sm120tune.install.manifest import InstalledPair, load_manifest
from sm120tune.install.place import Place
from sm120tune.install.soundness import stale_reasons
from sm120tune.provenance import FileProvenance


@dataclass(frozen=True)
class Listed:
    """One installed pair."""

    pair: InstalledPair
    up_path: Path
    record: FileProvenance | None
    """None where the provenance is gone or damaged."""
    changed: tuple[Path, ...]
    """Files that are no longer what was installed."""
    stale: tuple[str, ...]
    """Why the pair no longer fits what is installed; empty where it does, or where there is no SGLang to ask."""

    @property
    def state(self) -> str:
        """ok, stale, changed, or both of the last two."""
        words = [word for word, found in (("changed", self.changed), ("stale", self.stale)) if found]
        return ", ".join(words) or "ok"

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        record = self.record
        return {
            "file": str(self.up_path),
            "down_file": str(self.up_path.with_name(self.pair.down_name)),
            "triton_folder": self.pair.triton_folder,
            "kind": self.pair.kind,
            "installed_at": self.pair.installed_at,
            "installed_by": self.pair.installed_by,
            "source": self.pair.source,
            "tuned_by": None if record is None else record.tool_version,
            "tuned_for": None if record is None else dict(record.versions),
            "state": self.state,
            "changed": [str(path) for path in self.changed],
            "stale": list(self.stale),
        }


def list_installed(base: Path, place: Place | None) -> list[Listed]:
    """Return the pairs installed under ``base``, in the order of their files.

    ``place`` is None where there is no SGLang to compare with. Raises UserError for a damaged manifest or a file
    that cannot be read.
    """
    pairs = load_manifest(base).pairs
    return [_listed(base, pair, place) for pair in sorted(pairs, key=lambda pair: pair.key)]


def _listed(base: Path, pair: InstalledPair, place: Place | None) -> Listed:
    try:
        contents = {base / file.path: (file, read_optional(base / file.path)) for file in pair.files}
    except FilesError as error:
        raise UserError(str(error)) from None
    written = contents.get(base / "provenance" / pair.triton_folder / pair.up_name)
    record = _record(None if written is None else written[1])
    stale: list[str] = []
    if place is not None and record is not None:
        stale = stale_reasons(record, place)
    return Listed(
        pair=pair,
        up_path=base / "configs" / pair.triton_folder / pair.up_name,
        record=record,
        changed=tuple(path for path, (file, content) in contents.items() if not file.as_installed(content)),
        stale=tuple(stale),
    )


def _record(content: bytes | None) -> FileProvenance | None:
    try:
        return prov.loads((content or b"").decode())
    except ValueError:
        return None
