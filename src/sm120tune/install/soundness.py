"""What must hold before a pair goes into a tree of SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from sm120tune.check import Level
from sm120tune.check.files import Context, check_files
from sm120tune.check.folders import folder_findings, sources_of
from sm120tune.check.resources import Resources
from sm120tune.check.rules import rules_of
from sm120tune.errors import UserError
from sm120tune.install.pair import ConfigPair
from sm120tune.install.place import Place
from sm120tune.provenance import UNKNOWN_SOURCE, FileProvenance
from sm120tune.upstream.lookup import ConfigLookup
from sm120tune.upstream.source import load_kernels

_SHOWN_HASH = 12


@dataclass(frozen=True)
class Consent:
    """What a person has agreed to."""

    allow_estimated: bool = False
    force: bool = False


def check_pair(pair: ConfigPair, place: Place, consent: Consent) -> list[str]:
    """Return warnings about a pair; raises UserError where it must not go there.

    Never allowed: a name that SGLang would not ask for, and what ``sm120tune check`` calls an error. Without consent:
    a pair that was not measured, and one for another kernel source or Triton.
    """
    lookup = place.lookup(pair.device_name, pair.record.versions["triton"])
    _check_names(pair, lookup)
    content = _check_content(pair, place)
    if pair.record.kind != "measured" and not consent.allow_estimated:
        raise UserError(
            f"{pair.up_path} is {pair.record.kind}, not measured on the card; measure it, or give --allow-estimated"
        )
    differences = stale_reasons(pair.record, place)
    if differences and not consent.force:
        raise UserError(f"{pair.up_path}: {' and '.join(differences)}; tune with what is installed, or give --force")
    warnings = [*content, *(f"{pair.ladder.up_name}: {difference}" for difference in differences)]
    if place.triton_version is None:
        warnings.append(f"no Triton beside {place.tree.package} or here, so its version was not compared")
    return warnings


def stale_reasons(record: FileProvenance, place: Place) -> list[str]:
    """Say in what a pair's origin differs from what is installed; raises UpstreamError for an unreadable kernel."""
    reasons = []
    tuned, triton_version = record.kernel_source_hash, record.versions["triton"]
    here = load_kernels(place.tree).hash_for(record.problem.quantization)
    if tuned not in {here, UNKNOWN_SOURCE}:
        reasons.append(
            f"tuned for kernel source {tuned[:_SHOWN_HASH]}, SGLang {place.tree.version} has {here[:_SHOWN_HASH]}"
        )
    if place.triton_version not in {None, triton_version}:
        reasons.append(f"tuned with Triton {triton_version}, {place.triton_version} is installed")
    return reasons


def _check_names(pair: ConfigPair, lookup: ConfigLookup) -> None:
    for name, asked in zip(
        (pair.ladder.up_name, pair.ladder.down_name), lookup.file_names(pair.record.problem), strict=True
    ):
        if name != asked:
            raise UserError(f"{pair.up_path.with_name(name)}: SGLang asks for {asked} for what the provenance names")


def _check_content(pair: ConfigPair, place: Place) -> list[str]:
    """Raise UserError for the first error that ``sm120tune check`` finds; return what is wrong with the place itself.

    Nothing is compiled, as an install takes no minutes: a lower bound of the shared memory is certain as far as it
    goes. Warnings on the ladder are left to the command: with ``--keys auto`` a wide gap is meant.
    """
    down_path = pair.up_path.with_name(pair.ladder.down_name)
    context = Context(None, max(pair.up_rows), rules_of(place.tree), Resources(None, 1))
    findings = check_files(sources_of([pair.up_path, down_path]), context).findings
    for found in findings:
        if found.level is Level.ERROR:
            key = f" at M={found.key}" if found.key else ""
            raise UserError(f"{found.file}{key}: {found.what}; {found.fix or 'tune the pair again'}")
    return [f"{place.configs / found.file}: {found.what}" for found in folder_findings(place.configs)]
