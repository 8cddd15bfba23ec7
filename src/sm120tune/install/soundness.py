"""What must hold before a pair goes into a tree of SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from sm120tune.errors import UserError
from sm120tune.install.pair import ConfigPair
from sm120tune.install.place import Place
from sm120tune.provenance import UNKNOWN_SOURCE
from sm120tune.upstream.lookup import ConfigLookup
from sm120tune.upstream.source import load_kernels

_SHOWN_HASH = 12
_ONE_SCALE_PER_STEP = ("fp8_w8a8", "int8_w8a8")
"""Block-wise dtypes whose kernel loads one scale per K step."""


@dataclass(frozen=True)
class Consent:
    """What a person has agreed to."""

    allow_estimated: bool = False
    force: bool = False


def check_pair(pair: ConfigPair, place: Place, consent: Consent) -> list[str]:
    """Return warnings about a pair; raises UserError where it must not go there.

    Never allowed: a name that SGLang would not ask for, rows that it could not run. Without consent: a pair that
    was not measured, and one for another kernel source or Triton.
    """
    lookup = place.lookup(pair.device_name, pair.record.versions["triton"])
    _check_names(pair, lookup)
    _check_rows(pair, place, lookup)
    if pair.record.kind != "measured" and not consent.allow_estimated:
        raise UserError(
            f"{pair.up_path} is {pair.record.kind}, not measured on the card; measure it, or give --allow-estimated"
        )
    differences = stale_reasons(pair.record.kernel_source_hash, pair.record.versions["triton"], place)
    if differences and not consent.force:
        raise UserError(f"{pair.up_path}: {' and '.join(differences)}; tune with what is installed, or give --force")
    warnings = [f"{pair.ladder.up_name}: {difference}" for difference in differences]
    if place.triton_version is None:
        warnings.append(f"no Triton beside {place.tree.package} or here, so its version was not compared")
    return warnings


def stale_reasons(kernel_source_hash: str, triton_version: str, place: Place) -> list[str]:
    """Say in what a pair's origin differs from what is installed; raises UpstreamError for an unreadable kernel."""
    reasons = []
    here = load_kernels(place.tree).source_hash
    if kernel_source_hash not in {here, UNKNOWN_SOURCE}:
        reasons.append(
            f"tuned for kernel source {kernel_source_hash[:_SHOWN_HASH]}, SGLang {place.tree.version} has "
            f"{here[:_SHOWN_HASH]}"
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


def _check_rows(pair: ConfigPair, place: Place, lookup: ConfigLookup) -> None:
    if not lookup.up_tma_supported:
        for m, row in pair.up_rows.items():
            if "USE_TMA" in row:
                raise UserError(
                    f"{pair.up_path}: USE_TMA at M={m} in an up file stops SGLang {place.tree.version} with a "
                    "KeyError; tune with that SGLang"
                )
    problem = pair.record.problem
    if problem.block_shape is None or problem.dtype not in _ONE_SCALE_PER_STEP:
        return
    group = problem.block_shape[1]
    for name, rows in ((pair.ladder.up_name, pair.up_rows), (pair.ladder.down_name, pair.down_rows)):
        for m, row in rows.items():
            if group and group % row["BLOCK_SIZE_K"]:
                raise UserError(
                    f"{pair.up_path.with_name(name)}: BLOCK_SIZE_K {row['BLOCK_SIZE_K']} at M={m} does not divide the "
                    f"quantization group of {group}: wrong results"
                )
