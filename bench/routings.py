"""How far winners move with the routing: tune under several, then time each one's winners under all of them.

    python bench/routings.py --json routings.json

Runs the main command once for each routing, then times all winners of an M together, interleaved, under each routing.
A number is the time of one routing's winner under another routing over that of the other's own winner: 1.02 means
that 2 % are lost by serving that traffic with the wrong file. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from performance import lane_for, repeated_race, run_once

from sm120tune.provenance import FileProvenance
from sm120tune.tiles import TilePair

DEFAULT_ARGS = ["--experts", "128", "--inter", "768", "--hidden", "2048"]
ROUTINGS = ("uniform", "balanced", "power:1.2")
SIZES = (4, 64, 512, 1024, 4096, 16384)


def tuned(args: list[str], routing: str) -> FileProvenance:
    """Tune under one routing from cold caches."""
    folder = Path(tempfile.mkdtemp(prefix="sm120tune-routings-"))
    sizes = ",".join(map(str, SIZES))
    figures, record = run_once([*args, "--routing", routing, "--batch-sizes", sizes], folder)
    print(f"{routing}: {figures['tuned']} of {len(SIZES)} rows tuned in {figures['wall_s']:.0f} s", flush=True)
    return record


def winners(record: FileProvenance) -> dict[int, TilePair]:
    """Return the chosen pair at each M."""
    return {row.m: row.chosen for row in record.rows if row.m in SIZES}


def crossed(records: dict[str, FileProvenance], sglang: Path | None) -> dict[str, dict[str, dict[str, float]]]:
    """Return, under each routing and at each M, the µs of every routing's winner."""
    chosen = {routing: winners(record) for routing, record in records.items()}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for under, record in records.items():
        with lane_for(record, sglang) as (_, lane):
            for m in SIZES:
                pairs = {of: pairs_of[m] for of, pairs_of in chosen.items()}
                samples = repeated_race(lane, m, pairs.values())
                found.setdefault(under, {})[str(m)] = {of: median(samples[pair]) for of, pair in pairs.items()}
    return found


def show(us: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print one table for each M and the geometric mean over M."""
    for m in (*map(str, SIZES), "geomean"):
        print(f"\nM={m}\n| under | {' | '.join(f'tuned for {of}' for of in us)} |\n|---|{'---:|' * len(us)}")
        for under, by_m in us.items():
            sizes = by_m if m == "geomean" else [m]
            ratios = [geometric_mean(by_m[one][of] / by_m[one][under] for one in sizes) for of in us]
            print(f"| {under} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |")


def main() -> int:
    """Tune, cross and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("args", nargs="*", help="arguments of the main command, after --")
    options = parser.parse_args()
    extra = ["--sglang", str(options.sglang)] if options.sglang else []
    args = [*(options.args or DEFAULT_ARGS), *extra]
    records = {routing: tuned(args, routing) for routing in ROUTINGS}
    us = crossed(records, options.sglang)
    show(us)
    if options.json:
        pairs: dict[str, Any] = {
            routing: {str(m): str(pair) for m, pair in winners(one).items()} for routing, one in records.items()
        }
        options.json.write_text(json.dumps({"args": args, "pairs": pairs, "us": us}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
