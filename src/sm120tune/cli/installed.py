"""``sm120tune list``: what is installed, and whether it still fits."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sm120tune.cli.options import place_options
from sm120tune.errors import UserError
from sm120tune.install import Listed, Place, find_base, find_place, list_installed


@click.command("list")
@place_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def list_command(sglang: Path | None, config_dir: Path | None, as_json: bool) -> int:
    """List the installed pairs: measured or estimated, since when, changed or stale."""
    base = find_base(sglang, config_dir)
    listed = list_installed(base, _place(sglang, config_dir))
    if as_json:
        document = {"configs": str(base / "configs"), "pairs": [item.to_json() for item in listed]}
        print(json.dumps(document, indent=4))
        return 0
    if not listed:
        print(f"nothing is installed in {base / 'configs'}")
    for item in listed:
        _show(item)
    return 0


def _place(sglang: Path | None, config_dir: Path | None) -> Place | None:
    try:
        return find_place(sglang, config_dir)
    except UserError:
        # A config folder can be listed without any SGLang; then nothing says what is stale.
        if config_dir is None or sglang is not None:
            raise
        return None


def _show(item: Listed) -> None:
    tuned_by = "unknown" if item.record is None else item.record.tool_version
    print(f"{item.state}: {item.up_path}")
    print(
        f"  {item.pair.kind}, tuned by sm120tune {tuned_by}, installed {item.pair.installed_at} by "
        f"{item.pair.installed_by}"
    )
    for path in item.changed:
        print(f"  changed since: {path}")
    for reason in item.stale:
        print(f"  stale: {reason}")
