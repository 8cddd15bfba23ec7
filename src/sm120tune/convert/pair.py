"""From foreign rows to a pair of SGLang with a provenance that claims nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from sm120tune import __version__
from sm120tune.check import Finding, Level
from sm120tune.check.files import Context, check_files
from sm120tune.check.folders import sources_of
from sm120tune.convert.alias import check_alias
from sm120tune.convert.sources import Source
from sm120tune.devices import known_device
from sm120tune.errors import UserError
from sm120tune.provenance import UNKNOWN_ROUTING, FileProvenance, RowProvenance, RowStatus
from sm120tune.upstream import SGLangTree
from sm120tune.upstream.lookup import ConfigLookup, Target
from sm120tune.writer import Ladder, WrittenPair, write_ladder


@dataclass(frozen=True)
class Converted:
    """A conversion to SGLang."""

    source: Source
    device_name: str
    ladder: Ladder
    written: WrittenPair | None
    """None where the check found errors: nothing was written then."""
    findings: tuple[Finding, ...]
    differences: str
    """Between the cards of an alias."""


@dataclass(frozen=True)
class Wanted:
    """What the pair is to be, and where."""

    output: Path
    triton_version: str | None = None
    """Instead of the source's own."""
    alias_device: str | None = None
    replace: bool = False


def convert_to_pair(source: Source, wanted: Wanted, tree: SGLangTree, context: Context) -> Converted:
    """Write the pair, if ``check`` finds no error in it; raises UserError for what cannot be converted."""
    device_name, differences = source.device_name, ""
    if wanted.alias_device is not None:
        target, differences = check_alias(source.device_name, wanted.alias_device)
        device_name = target.name
    version = wanted.triton_version or source.triton_version
    if version is None:
        raise UserError(f"{source.path} does not say with which Triton it was tuned; give --triton, for example 3.6.0")
    ladder = _ladder(source, device_name, version, tree)
    folder = wanted.output / ladder.provenance.kind / "configs" / ladder.folder
    for name in (ladder.up_name, ladder.down_name):
        if (folder / name).exists() and not wanted.replace:
            raise UserError(f"{folder / name} is there already; give --replace, or another --output")
    with TemporaryDirectory(prefix="sm120tune-convert-") as scratch:
        trial = write_ladder(Path(scratch), ladder)
        report = check_files(sources_of([trial.up_path, trial.down_path]), context)
        shown = {str(trial.up_path): ladder.up_name, str(trial.down_path): ladder.down_name}
    findings = tuple(
        Finding(one.level, one.code, shown.get(one.file, one.file), one.what, one.fix, one.key)
        for one in report.findings
    )
    written = None
    if not report.count(Level.ERROR):
        written = write_ladder(wanted.output, ladder, replace=wanted.replace)
    return Converted(source, device_name, ladder, written, findings, differences)


def _ladder(source: Source, device_name: str, version: str, tree: SGLangTree) -> Ladder:
    lookup = ConfigLookup(tree, Target(device_name, 0, version))
    up_name, down_name = lookup.file_names(source.problem)
    card = known_device(device_name)
    record = FileProvenance(
        tool_version=__version__,
        kind="converted",
        problem=source.problem,
        device={"name": device_name, "capability": list(card.capability) if card else None, "driver": "none"},
        versions={"triton": version},
        kernel_source_hash=source.kernel_source_hash,
        search={
            "converted_from": source.origin,
            "file": source.path.name,
            "sha256": source.digest,
            "device": source.device_name,
        },
        failures={},
        rows=tuple(_row(source, m, device_name) for m in sorted(source.rows)),
    )
    return Ladder(up_name, down_name, version, dict(source.rows), record)


def _row(source: Source, m: int, device_name: str) -> RowProvenance:
    notes = [f"converted from a file of {source.origin}; nothing was measured here"]
    if device_name != source.device_name:
        notes.append(f"made for {source.device_name}")
    if m in source.notes:
        notes.append(source.notes[m])
    return RowProvenance(
        m=m,
        status=RowStatus.CONVERTED,
        today=None,
        chosen=source.rows[m],
        today_us=None,
        today_spread_us=None,
        chosen_us=None,
        chosen_spread_us=None,
        ratio=None,
        ratio_interval=None,
        roofline_share=None,
        bound="unknown",
        timer="none",
        measured=False,
        what="nothing",
        repetitions=0,
        routing=UNKNOWN_ROUTING,
        error=None,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        note="; ".join(notes),
    )
