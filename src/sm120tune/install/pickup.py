"""The proof that SGLang loads an installed pair: its own lookup, and where it can be imported, itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune.install.pair import ConfigPair
from sm120tune.install.place import Place
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import UpstreamError
from sm120tune.upstream.lookup import config_dtype

_CHILD = Path(__file__).with_name("_ask_sglang.py")
_CHILD_TIMEOUT_S = 180.0


class PickupError(Exception):
    """SGLang would not load what was installed: one line with what it loads instead."""


@dataclass(frozen=True)
class Pickup:
    """A proof that holds."""

    rows: int
    sglang_version: str
    triton_version: str
    device_name: str
    imported: str
    """What SGLang itself said in a fresh process, or why it was not asked."""

    def __str__(self) -> str:
        return (
            f"proof: SGLang {self.sglang_version}'s own lookup returns exactly these {self.rows} rows for up and down "
            f"({self.device_name}, Triton {self.triton_version}); SGLang imported in a new process: {self.imported}"
        )


def prove_pickup(pair: ConfigPair, place: Place) -> Pickup:
    """Ask SGLang for the pair's key; raises PickupError unless it answers with exactly these rows from these files."""
    triton_version = pair.record.versions["triton"]
    try:
        _ask_lookup(pair, place, triton_version)
    except UpstreamError as error:
        raise PickupError(str(error)) from None
    return Pickup(
        rows=len(pair.up_rows),
        sglang_version=place.tree.version,
        triton_version=triton_version,
        device_name=pair.device_name,
        imported=_ask_imported(pair, place, triton_version),
    )


def _ask_lookup(pair: ConfigPair, place: Place, triton_version: str) -> None:
    lookup = place.lookup(pair.device_name, triton_version)
    problem = pair.record.problem
    for down, wanted in ((False, pair.up_rows), (True, pair.down_rows)):
        _compare(pair, f"SGLang {place.tree.version}'s lookup", lookup.rows(problem, down=down), wanted, down)
    for m in pair.up_rows:
        today = lookup.todays_pair(problem, m)
        for source, target in zip((today.up_source, today.down_source), pair.targets[:2], strict=True):
            if Path(source).resolve() != (place.base / target).resolve():
                raise PickupError(f"SGLang {place.tree.version} takes {source} for M={m}, not {place.base / target}")
        if today.pair is None:
            raise PickupError(
                f"SGLang {place.tree.version} cannot run M={m} of {place.base / pair.targets[0]}: {today.problem}"
            )
        if today.pair != TilePair(Tile.from_row(pair.up_rows[m]), Tile.from_row(pair.down_rows[m])):
            raise PickupError(
                f"SGLang {place.tree.version} would run {today.pair} for M={m}, which the pair does not say"
            )


def _compare(
    pair: ConfigPair, who: str, rows: dict[int, dict[str, Any]] | None, wanted: dict[int, dict[str, Any]], down: bool
) -> None:
    name = pair.ladder.down_name if down else pair.ladder.up_name
    if rows is None:
        raise PickupError(f"{who} does not load {name}: it falls back to its built-in default")
    if rows != wanted:
        raise PickupError(f"{who} returns other rows than those of {name}: for M {', '.join(map(str, sorted(rows)))}")


def _ask_imported(pair: ConfigPair, place: Place, triton_version: str) -> str:
    """Say what the imported SGLang answers; raises PickupError where it answers with other rows."""
    spec = importlib.util.find_spec("sglang")
    locations = (
        [Path(location).resolve() for location in (spec.submodule_search_locations or ()) if spec] if spec else []
    )
    if place.tree.package not in locations:
        return (
            "not asked (this Python has no such sglang)"
            if not locations
            else "not asked (another sglang is importable)"
        )
    problem = pair.record.problem
    request = {
        "module": place.tree.module_of(place.tree.config_file),
        "device_name": pair.device_name,
        "triton_version": triton_version,
        "arguments": [problem.experts, problem.key_n, config_dtype(problem), *(problem.block_shape or (0, 0))],
        "per_channel_quant": problem.per_channel_quant,
    }
    answer = _run_child(request, place)
    if "error" in answer:
        return f"not asked ({answer['error']})"
    for down, wanted in ((False, pair.up_rows), (True, pair.down_rows)):
        rows = answer["down" if down else "up"]
        rows = None if rows is None else {int(m): row for m, row in rows.items()}
        _compare(pair, "SGLang itself, imported,", rows, wanted, down)
    return "the same"


def _run_child(request: dict[str, Any], place: Place) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "SGLANG_MOE_CONFIG_DIR"}
    if place.config_dir is not None:
        env["SGLANG_MOE_CONFIG_DIR"] = str(place.config_dir)
    env["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(place.tree.package.parent), env.get("PYTHONPATH")) if part
    )
    # SGLang's folder has to be as it was after an uninstall, without the import's leavings.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            [sys.executable, str(_CHILD), json.dumps(request)],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT_S,
        )
        # SGLang may print on its own account; the answer is the last line.
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"its import took more than {_CHILD_TIMEOUT_S:g} s"}
    except (OSError, ValueError, IndexError):
        return {"error": "its import ended the process"}
    return answer if isinstance(answer, dict) else {"error": "no answer"}
