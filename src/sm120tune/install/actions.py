"""Install and uninstall: plan every change, apply all of them at once, undo them where the proof fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm120tune._atomic import FilesError
from sm120tune._atomic import _remove_leftovers as remove_leftovers
from sm120tune.errors import UserError
from sm120tune.install.changes import Changes, folders_under, remove_folders
from sm120tune.install.manifest import (
    BACKUP_FOLDER,
    MANIFEST,
    RECORDS_FOLDER,
    InstalledFile,
    InstalledPair,
    Manifest,
    load_manifest,
)
from sm120tune.install.pair import ConfigPair
from sm120tune.install.pickup import Pickup, prove_pickup
from sm120tune.install.place import Place, locked
from sm120tune.install.plan import choose_pairs, merge_pairs, plan_fill, plan_pair, plan_removal
from sm120tune.install.soundness import Consent, check_pair


@dataclass(frozen=True)
class InstallOptions:
    """How to install."""

    consent: Consent = field(default_factory=Consent)
    fill: bool = False
    """Copy SGLang's shipped files into a config folder too."""
    dry_run: bool = False


@dataclass(frozen=True)
class Installed:
    """What became of one pair."""

    pair: ConfigPair
    state: str
    """installed, updated or unchanged."""
    paths: tuple[Path, Path]
    """The up and the down file."""
    kept: tuple[Path, ...]
    """Backups of the config files that were there before."""
    pickup: Pickup | None
    """None for a dry run."""


@dataclass(frozen=True)
class Outcome:
    """What an install did, or with ``dry_run`` would do."""

    pairs: tuple[Installed, ...]
    filled: int
    """Shipped files copied."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Uninstalled:
    """What an uninstall did."""

    pairs: tuple[InstalledPair, ...]
    restored: tuple[Path, ...]
    """Config files that were there before and are again."""
    filled: int
    """Copies of shipped files removed."""


def install(pairs: Iterable[ConfigPair], place: Place, options: InstallOptions) -> Outcome:
    """Install some pairs, all or none, and prove that SGLang loads them.

    Raises UserError, with nothing changed, for a pair that must not go there and for files that cannot be written
    or were edited since an earlier install; PickupError, with everything put back, where the proof fails.
    """
    pairs = list(pairs)
    warnings = dict.fromkeys(warning for pair in pairs for warning in check_pair(pair, place, options.consent))
    with locked(place.base), _told():
        changes = Changes(place.base)
        filled = plan_fill(place, changes) if options.fill else ()
        manifest = load_manifest(place.base)
        planned = [plan_pair(pair, manifest.find(pair.key), changes, options.consent.force) for pair in pairs]
        folders: list[str] = []
        if filled or any(state != "unchanged" for state, _ in planned):
            # The folder of the manifest counts among the new ones, which the manifest names.
            changes.put(MANIFEST, b"")
            folders = changes.new_folders()
            manifest = replace(
                manifest,
                pairs=merge_pairs(manifest.pairs, [entry for _, entry in planned]),
                filled=(*manifest.filled, *filled),
                made_folders=tuple(dict.fromkeys([*manifest.made_folders, *folders])),
            )
            changes.put(MANIFEST, manifest.dumps())
            # Backups, then the manifest, then what it explains: a killed process leaves nothing unexplained.
            changes.contents = dict(sorted(changes.contents.items(), key=lambda item: _rank(item[0])))
            changes.explained_by = MANIFEST
        else:
            changes = Changes(place.base)
        proofs: list[Pickup | None] = [None] * len(pairs)
        if not options.dry_run:
            back = changes.apply()
            try:
                proofs = [prove_pickup(pair, place) for pair in pairs]
            except BaseException:
                back.apply()
                remove_folders(place.base, folders)
                raise
    results = [
        _installed(pair, state, entry, proof, place)
        for pair, (state, entry), proof in zip(pairs, planned, proofs, strict=True)
    ]
    return Outcome(tuple(results), len(filled), tuple(warnings))


def uninstall(base: Path, files: Sequence[Path] | None, *, force: bool = False) -> Uninstalled:
    """Put back what was under ``base`` before the pairs of some files were installed.

    None for ``files`` means everything, copies of shipped files too. Raises UserError, with nothing changed, for a
    file that is not installed or was edited since (unless ``force``), a damaged backup or manifest, and where
    something cannot be written.
    """
    with locked(base), _told():
        manifest = load_manifest(base)
        chosen = choose_pairs(manifest, files)
        filled = manifest.filled if files is None else ()
        if not chosen and not filled:
            return Uninstalled((), (), 0)
        changes = Changes(base)
        ours = [file for pair in chosen for file in pair.files]
        plan_removal(ours, filled, changes, force)
        left = replace(
            manifest,
            pairs=tuple(pair for pair in manifest.pairs if pair not in chosen),
            filled=() if files is None else manifest.filled,
        )
        for file in ours:
            if file.original is not None:
                changes.put(file.original.backup, None)
        # Last, so that what a killed process leaves can be finished by the same command.
        changes.put(MANIFEST, None if left.empty else left.dumps())
        changes.apply()
        _clean_up(base, manifest, [*ours, *filled], everything=left.empty)
    return Uninstalled(chosen, _restored(base, ours, filled), len(filled))


def _clean_up(base: Path, manifest: Manifest, files: Iterable[InstalledFile], *, everything: bool) -> None:
    """Remove empty folders, and what a killed install had staged; the work is done, so nothing here is an error."""
    for file in files:
        with suppress(OSError):
            remove_leftovers(base / file.path)
    remove_folders(base, [*manifest.made_folders, *(folders_under(base, RECORDS_FOLDER) if everything else ())])


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except FilesError as error:
        raise UserError(f"{error}; free the space or the path, or choose another folder") from None


def _rank(path: str) -> int:
    if path == MANIFEST:
        return 1
    return 0 if path.startswith(f"{BACKUP_FOLDER}/") else 2


def _installed(pair: ConfigPair, state: str, entry: InstalledPair, proof: Pickup | None, place: Place) -> Installed:
    up, down = (place.base / target for target in pair.targets[:2])
    kept = [file.original.backup for file in entry.files if file.original is not None and _is_config(file)]
    return Installed(pair, state, (up, down), tuple(place.base / backup for backup in kept), proof)


def _restored(base: Path, files: Iterable[InstalledFile], filled: Iterable[InstalledFile]) -> tuple[Path, ...]:
    gone = {file.path for file in filled}
    return tuple(
        base / file.path for file in files if file.original is not None and _is_config(file) and file.path not in gone
    )


def _is_config(file: InstalledFile) -> bool:
    return file.path.startswith("configs/")
