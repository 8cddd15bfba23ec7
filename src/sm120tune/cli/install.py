"""``sm120tune install``: put pairs where SGLang loads them, and prove that it does."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from sm120tune.cli.options import place_options
from sm120tune.install import (
    Consent,
    Installed,
    InstallOptions,
    Outcome,
    PickupError,
    Place,
    find_pairs,
    find_place,
    install,
)

EXIT_NOT_PICKED_UP = 1

_DONE = {"installed": "installed", "updated": "updated", "unchanged": "already installed, nothing changed"}
_PLANNED = {"installed": "would install", "updated": "would update", "unchanged": "already installed"}


@dataclass(frozen=True)
class _Options:
    files: tuple[Path, ...]
    sglang: Path | None
    config_dir: Path | None
    fill: bool
    allow_estimated: bool
    force: bool
    dry_run: bool
    as_json: bool


@click.command("install")
@click.argument("files", nargs=-1, required=True, metavar="FILE|FOLDER...", type=click.Path(path_type=Path))
@place_options
@click.option("--fill", is_flag=True, help="Copy SGLang's shipped files into --config-dir too.")
@click.option("--allow-estimated", is_flag=True, help="Install pairs that were never measured on the card.")
@click.option("--force", is_flag=True, help="Install for another Triton or kernel source, over edited files too.")
@click.option("--dry-run", is_flag=True, help="Check everything, say what would be done, and stop.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def install_command(**options: Any) -> int:
    """Install tuned pairs: a file of a pair, its folder, or the --output of a run.

    What was there before is kept; `sm120tune uninstall` puts it back.
    """
    return _install(_Options(**options))


def _install(options: _Options) -> int:
    pairs = find_pairs(options.files)
    place = find_place(options.sglang, options.config_dir)
    consent = Consent(options.allow_estimated, options.force)
    try:
        outcome = install(pairs, place, InstallOptions(consent, options.fill, options.dry_run))
    except PickupError as error:
        print(f"sm120tune: not picked up, so everything was put back: {error}", file=sys.stderr)
        return EXIT_NOT_PICKED_UP
    warnings = [*outcome.warnings, *_place_warnings(place, outcome)]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.as_json:
        document = {**_outcome_json(outcome, place, options.dry_run), "warnings": warnings}
        print(json.dumps(document, indent=4))
    else:
        _show(outcome, place, options.dry_run)
    return 0


def _place_warnings(place: Place, outcome: Outcome) -> list[str]:
    if place.config_dir is None:
        elsewhere = os.environ.get("SGLANG_MOE_CONFIG_DIR")
        if not elsewhere:
            return []
        return [
            f"SGLANG_MOE_CONFIG_DIR={elsewhere} is set here: a server with it reads that folder alone (--config-dir)"
        ]
    missing = sum(not (place.configs / path.parent.name / path.name).exists() for path in _shipped(place))
    if not missing or outcome.filled:
        return []
    return [
        f"with SGLANG_MOE_CONFIG_DIR SGLang reads {place.config_dir} instead of its whole shipped tree, and {missing} "
        "of its files are not there: --fill copies them"
    ]


def _shipped(place: Place) -> list[Path]:
    return list(place.tree.configs_dir.glob("triton_*/*.json"))


def _show(outcome: Outcome, place: Place, dry_run: bool) -> None:
    print(f"into {place}")
    if outcome.filled:
        print(f"{'would copy' if dry_run else 'copied'} {outcome.filled} shipped files")
    for item in outcome.pairs:
        up, down = item.paths
        print(f"{(_PLANNED if dry_run else _DONE)[item.state]} ({item.pair.record.kind}): {up}")
        print(f"  and {down.name}")
        for kept in item.kept:
            print(f"  {'would keep' if dry_run else 'kept'} what was there: {kept}")
        if item.pickup is not None:
            print(f"  {item.pickup}")
    if dry_run:
        return
    if place.config_dir is not None:
        print(f"serve with SGLANG_MOE_CONFIG_DIR={place.config_dir}")
    if any(item.state != "unchanged" for item in outcome.pairs):
        print("restart the server: a running one keeps the rows it has read")


def _outcome_json(outcome: Outcome, place: Place, dry_run: bool) -> dict[str, Any]:
    return {
        "configs": str(place.configs),
        "sglang": {"package": str(place.tree.package), "version": place.tree.version},
        "triton": place.triton_version,
        "dry_run": dry_run,
        "filled": outcome.filled,
        "pairs": [_pair_json(item) for item in outcome.pairs],
    }


def _pair_json(item: Installed) -> dict[str, Any]:
    proof = None
    if item.pickup is not None:
        proof = {"rows": item.pickup.rows, "lookup": True, "imported": item.pickup.imported, "line": str(item.pickup)}
    return {
        "state": item.state,
        "kind": item.pair.record.kind,
        "source": str(item.pair.up_path),
        "files": [str(path) for path in item.paths],
        "kept": [str(path) for path in item.kept],
        "pickup": proof,
    }
