"""Measure the tuner itself: wall time from cold caches, quality against an exhaustive table, and a later re-measure.

    python bench/performance.py --runs 3 --table bench/tables/h200_E256_N256_H6144.parquet --json performance.json

Runs the main command several times as a process of its own, each with an empty cache and output, and prints one
table. Then every row of the last run is timed again in three interleaved repeats: a tuned one beside today's pair
(``slower``), and where the table has its M beside the table's best pair (``regret``; the row itself need not be in the
table) and beside its best single tile for both GEMMs, which is what upstream's exhaustive tuner looks for. The
table's repeatability is how far a second timing of the same tile was off.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from sm120tune.compiler.cache import CompileCache
from sm120tune.job import Job, Settings
from sm120tune.measure.gpu_lane import GpuLane
from sm120tune.measure.replay import best_pair
from sm120tune.measure.results import RaceRequest
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.table import Table, read_table
from sm120tune.problem import Gemm
from sm120tune.provenance import FileProvenance, RowStatus, load
from sm120tune.resolve import CardRequest, JobRequest, resolve_card, resolve_job
from sm120tune.search.race import compare
from sm120tune.tiles import TilePair
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


def best_single(table: Table, m: int) -> TilePair:
    """Return the tile that is best when it serves both GEMMs."""
    times = {row.key: row.us for row in table.rows if row.m == m and row.us is not None and not row.at_least}
    both = {
        tile: us + times[Gemm.DOWN, tile, m]
        for (gemm, tile, _), us in times.items()
        if gemm is Gemm.GATE_UP and (Gemm.DOWN, tile, m) in times
    }
    return TilePair.same(min(both, key=lambda tile: both[tile]))


def repeatability(table: Table) -> float:
    """Return the geometric mean, over M, of how far second timings were off in the median."""
    off: dict[int, list[float]] = {}
    for row in table.rows:
        if row.repeat_us is not None and row.us is not None:
            off.setdefault(row.m, []).append(abs(math.log(row.repeat_us / row.us)))
    return math.exp(statistics.fmean(statistics.median(values) for values in off.values()))


@contextmanager
def lane_for(record: FileProvenance, sglang: Path | None) -> Iterator[tuple[Job, GpuLane]]:
    """Open a GPU's lane with the problem of a finished run, on data of its own."""
    sizes = tuple(row.m for row in record.rows)
    card = resolve_card(CardRequest(None, None, None, "cuda"))
    settings = Settings(trials=1, exhaustive=False, budget_s=None, seed=4711)
    routing = parse_routing(record.rows[0].routing)
    job = resolve_job(JobRequest(record.problem, sizes, routing, settings, sglang, Path("none")), card)
    with one_lane(job) as lane:
        yield job, lane


@contextmanager
def one_lane(job: Job) -> Iterator[GpuLane]:
    """Open a GPU's process for a job, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        lane = GpuLane("GPU", worker_setup(job, job.gpus[0], CompileCache(Path(folder))), print)
        try:
            lane.prepare().result()
            yield lane
        finally:
            lane.stop()


def remeasure(record: FileProvenance, table: Table | None, sglang: Path | None) -> list[dict[str, Any]]:
    """Time rows again beside today's pair and the table's best; a row is slower by the project's own definition."""
    recorded = sorted({row.m for row in table.rows}) if table else []
    best = {m: best_pair(table, m)[1] for m in recorded} if table else {}
    single = {m: best_single(table, m) for m in recorded} if table else {}
    found = []
    with lane_for(record, sglang) as (_, lane):
        for row in record.rows:
            if row.today is None:
                continue
            others = {"today": row.today}
            if row.m in best:
                others |= {"best": best[row.m], "single": single[row.m]}
            samples = repeated_race(lane, row.m, (row.chosen, *others.values()))
            one_row: dict[str, Any] = {"m": row.m, "tuned": row.status is RowStatus.TUNED}
            for name, other in others.items():
                ratio = compare(samples[row.chosen], samples[other])
                one_row[name] = {"ratio": ratio.middle, "low": ratio.low, "slower": ratio.slower}
            found.append(one_row)
    return found


def repeated_race(lane: GpuLane, m: int, pairs: Iterable[TilePair]) -> dict[TilePair, list[float]]:
    """Return every pair's samples over three interleaved repeats."""
    samples: dict[TilePair, list[float]] = {pair: [] for pair in pairs}
    for _ in range(REPEATS):
        lanes = lane.race(RaceRequest(m, tuple(samples), ROUNDS)).result()
        assert isinstance(lanes, list), lanes
        for one in lanes:
            samples[one.pair] += one.samples_us
    return samples


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
    table = read_table(options.table) if options.table else None
    result["remeasured"] = remeasure(record, table, options.sglang)
    tuned = [one for one in result["remeasured"] if one["tuned"]]
    slower = [one["m"] for one in tuned if one["today"]["slower"]]
    mean = geometric_mean(one["today"]["ratio"] for one in tuned)
    print(f"re-measured: {len(tuned)} tuned rows, {mean:.3f} of today's time (geomean), slower: {slower or 'none'}")
    if table:
        print(f"the table's own repeatability: {repeatability(table):.4f}")
        result["regret"] = {"repeatability": repeatability(table)}
        for name in ("best", "single"):
            by_m = {one["m"]: one[name]["ratio"] for one in result["remeasured"] if name in one}
            worst = max(by_m, key=lambda m: by_m[m])
            result["regret"][name] = by_m
            print(
                f"beside the {name} of {options.table.name} at {len(by_m)} M: "
                f"geomean {geometric_mean(by_m.values()):.4f}, worst {by_m[worst]:.4f} (M={worst})"
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
