"""Measure the tuner itself: wall time from cold caches, quality against an exhaustive table, and a later re-measure.

    python bench/performance.py --runs 3 --table bench/tables/h200_E256_N256_H6144.parquet --json performance.json

Runs the main command several times as a process of its own, each with an empty cache and output, and prints one
table. ``regret`` compares the pairs of the last run, at the M that the table has, by the table's own times; beside it
stands the table's repeatability (how far a second timing of the same tile was off). ``slower`` times every tuned row
of the last run again, beside today's pair, in three interleaved repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sm120tune.compiler.cache import CompileCache
from sm120tune.job import Settings
from sm120tune.measure.gpu_lane import GpuLane
from sm120tune.measure.replay import best_pair
from sm120tune.measure.results import RaceRequest
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.table import Table, read_table
from sm120tune.problem import Gemm
from sm120tune.provenance import FileProvenance, RowStatus, load
from sm120tune.resolve import CardRequest, JobRequest, resolve_card, resolve_job
from sm120tune.search.race import compare
from sm120tune.tune import worker_setup

DEFAULT_ARGS = ["--experts", "256", "--tp", "8", "--inter", "2048"]
REPEATS = 3
ROUNDS = 21


def run_once(args: list[str], folder: Path) -> tuple[dict[str, Any], FileProvenance]:
    """Run the main command from a cold cache; returns its figures and the provenance that it wrote."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "sm120tune", *args, "--output", str(folder / "out"), "--json", "--quiet"]
    begin = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall = time.monotonic() - begin
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    document = json.loads(done.stdout)
    record = load(Path(document["provenance"][0]))
    seconds = document["seconds"]
    gpus = max(1, int(record.search["gpus"]))
    figures = {
        "wall_s": wall,
        "seconds": seconds,
        "gpu_busy": record.search["gpu_busy_s"] / seconds["search"] / gpus,
        "compiled": document["compiled"],
        "timed": document["timed"],
        "tuned": sum(row.status is RowStatus.TUNED for row in record.rows),
        "rows": len(record.rows),
    }
    return figures, record


def regret(record: FileProvenance, table: Table) -> dict[int, float]:
    """Return the table's time of each chosen pair over the table's best, where the table has the pair."""
    times = {row.key: row.us for row in table.rows if row.us is not None}
    found: dict[int, float] = {}
    for row in record.rows:
        parts = [
            times.get((gemm, tile, row.m))
            for gemm, tile in ((Gemm.GATE_UP, row.chosen.gate_up), (Gemm.DOWN, row.chosen.down))
        ]
        if all(part is not None for part in parts):
            found[row.m] = sum(part for part in parts if part is not None) / best_pair(table, row.m)[0]
    return found


def repeatability(table: Table) -> float:
    """Return the geometric mean, over M, of how far second timings were off in the median."""
    off: dict[int, list[float]] = {}
    for row in table.rows:
        if row.repeat_us is not None and row.us is not None:
            off.setdefault(row.m, []).append(abs(math.log(row.repeat_us / row.us)))
    return math.exp(statistics.fmean(statistics.median(values) for values in off.values()))


def remeasure(record: FileProvenance, sglang: Path | None) -> list[dict[str, Any]]:
    """Time every tuned row again beside today's pair; a row is slower by the project's own definition."""
    rows = [row for row in record.rows if row.status is RowStatus.TUNED and row.today is not None]
    sizes = tuple(row.m for row in rows)
    card = resolve_card(CardRequest(None, None, None, "cuda"))
    settings = Settings(trials=1, exhaustive=False, budget_s=None, seed=4711)
    routing = parse_routing(rows[0].routing)
    job = resolve_job(JobRequest(record.problem, sizes, routing, settings, sglang, Path("none")), card)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        lane = GpuLane("GPU", worker_setup(job, job.gpus[0], CompileCache(Path(folder))), print)
        try:
            lane.prepare().result()
            for row in rows:
                assert row.today is not None
                samples: list[list[float]] = [[], []]
                for _ in range(REPEATS):
                    lanes = lane.race(RaceRequest(row.m, (row.today, row.chosen), ROUNDS)).result()
                    assert isinstance(lanes, list), lanes
                    for kept, one in zip(samples, lanes, strict=True):
                        kept += one.samples_us
                ratio = compare(samples[1], samples[0])
                found.append({"m": row.m, "ratio": ratio.middle, "low": ratio.low, "slower": ratio.slower})
        finally:
            lane.stop()
    return found


def main() -> int:
    """Run, re-measure and print; exit 1 where a tuned row is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="where to leave the last run's output")
    parser.add_argument("args", nargs="*", help="arguments of the main command, after --")
    options = parser.parse_args()
    args = (options.args or DEFAULT_ARGS) + (["--sglang", str(options.sglang)] if options.sglang else [])
    result: dict[str, Any] = {"args": options.args or DEFAULT_ARGS, "runs": []}
    record: FileProvenance | None = None
    for number in range(options.runs):
        folder = Path(tempfile.mkdtemp(prefix="sm120tune-performance-"))
        figures, record = run_once(args, folder)
        result["runs"].append(figures)
        phases = ", ".join(f"{name} {value:.1f}" for name, value in figures["seconds"].items())
        print(
            f"run {number + 1}: wall {figures['wall_s']:.1f} s ({phases}), GPU busy {figures['gpu_busy']:.0%}, "
            f"tuned {figures['tuned']} of {figures['rows']} rows, {figures['compiled']} binaries",
            flush=True,
        )
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            (folder / "out").rename(options.keep / f"run{number + 1}")
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    assert record is not None
    walls = [run["wall_s"] for run in result["runs"]]
    print(f"wall, median of {len(walls)}: {statistics.median(walls):.1f} s")
    if options.table:
        table = read_table(options.table)
        by_m = regret(record, table)
        mean = math.exp(statistics.fmean(math.log(value) for value in by_m.values()))
        result["regret"] = {"by_m": by_m, "geomean": mean, "repeatability": repeatability(table)}
        print(
            f"regret against {options.table.name} at {len(by_m)} M: geomean {mean:.4f}, "
            f"worst {max(by_m.values()):.3f}; the table's own repeatability {repeatability(table):.4f}"
        )
    result["remeasured"] = remeasure(record, options.sglang)
    slower = [one["m"] for one in result["remeasured"] if one["slower"]]
    ratios = [one["ratio"] for one in result["remeasured"]]
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    print(f"re-measured: {len(ratios)} tuned rows, {mean:.3f} of today's time (geomean), slower: {slower or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
