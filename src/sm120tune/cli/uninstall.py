"""``sm120tune uninstall``: put back what was there before an install."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sm120tune.cli.options import place_options
from sm120tune.errors import UserError
from sm120tune.install import Uninstalled, find_base, uninstall


@click.command("uninstall")
@click.argument("files", nargs=-1, metavar="[FILE...]", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Every installed pair, and the files that --fill copied.")
@place_options
@click.option("--force", is_flag=True, help="Also where a file was edited since; the edit is lost.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def uninstall_command(
    files: tuple[Path, ...],
    everything: bool,
    sglang: Path | None,
    config_dir: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Remove installed pairs by the name of either file, and restore what they replaced."""
    if everything == bool(files):
        raise UserError("say what to uninstall: the name of an installed file, or --all (`sm120tune list` shows them)")
    base = find_base(sglang, config_dir)
    done = uninstall(base, None if everything else files, force=force)
    if as_json:
        print(json.dumps(_done_json(done, base), indent=4))
    else:
        _show(done, base)
    return 0


def _show(done: Uninstalled, base: Path) -> None:
    if not done.pairs and not done.filled:
        print(f"nothing is installed in {base / 'configs'}")
    for pair in done.pairs:
        print(f"uninstalled {base / 'configs' / pair.triton_folder / pair.up_name}\n  and {pair.down_name}")
    for path in done.restored:
        print(f"restored {path}")
    if done.filled:
        print(f"removed {done.filled} copies of shipped files")


def _done_json(done: Uninstalled, base: Path) -> dict[str, Any]:
    folder = base / "configs"
    return {
        "configs": str(folder),
        "uninstalled": [
            [str(folder / pair.triton_folder / name) for name in (pair.up_name, pair.down_name)] for pair in done.pairs
        ],
        "restored": [str(path) for path in done.restored],
        "filled_removed": done.filled,
    }
