"""Record an exhaustive table: the time of every tile of a base space, gate_up and down apart, at ten M.

    python bench/record_table.py --experts 256 --inter 256 --hidden 6144 --topk 8 --output bench/tables/x.parquet

The base space is num_stages 2-5, BLOCK_SIZE_M 16-256, BLOCK_SIZE_N 32-256, BLOCK_SIZE_K 64-256, num_warps 4/8,
GROUP_SIZE_M 1/16/64 (copies that are the same program at an M left out), plus SGLang's built-in defaults. A tile that
is far too slow is timed once and recorded as "at least"; a failure with its kind. A part of the rows is timed a second
time at the end, so that the table's own repeatability is known. Finished rows go to a ``.jsonl`` beside the output;
the same command goes on from there. ``sm120tune.measure.table`` documents the columns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layer_arguments import add_layer_arguments, layer_of

from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.facts import TileFacts
from sm120tune.compiler.pool import CompilePool
from sm120tune.compiler.spec import over_limit
from sm120tune.failures import Failure
from sm120tune.job import Job, Settings
from sm120tune.measure.gpu_lane import GpuLane
from sm120tune.measure.results import GemmRequest, Measured
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.table import TableRow, write_table
from sm120tune.problem import Gemm
from sm120tune.resolve import CardRequest, JobRequest, resolve_card, resolve_job
from sm120tune.search_space import SpaceLimits, cut_reason
from sm120tune.state import cache_root
from sm120tune.tiles import Tile
from sm120tune.tune import worker_setup

SIZES = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 16384)
BASE = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128, 256),
    "GROUP_SIZE_M": (1, 16, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
GOOD_FIRST = (
    Tile(16, 64, 64, 1, 4, 3),
    Tile(32, 128, 64, 1, 4, 3),
    Tile(64, 128, 64, 1, 4, 3),
    Tile(128, 128, 64, 16, 8, 3),
)
STOP_FACTOR = 2.0
IN_FLIGHT = 96
REPEAT_SHARE = 0.05
REPEAT_BEST = 12

Key = tuple[Gemm, Tile, int]


def base_tiles(job: Job) -> list[Tile]:
    """Return the base space in an order that soon has good times for every M."""
    tiles = [Tile.from_row(dict(zip(BASE, values, strict=True))) for values in itertools.product(*BASE.values())]
    extra = {job.lookup.builtin_pair(job.problem, m).gate_up for m in SIZES}
    tiles = [tile for tile in dict.fromkeys([*extra, *tiles]) if tile not in GOOD_FIRST]
    random.Random(0).shuffle(tiles)
    return [*GOOD_FIRST, *sorted(extra), *[tile for tile in tiles if tile not in extra]]


class Recorder:
    """Compiles and times everything that is not recorded yet."""

    def __init__(self, job: Job, pool: CompilePool, lane: GpuLane, log: Path, sizes: tuple[int, ...]) -> None:
        self.job, self.pool, self.lane, self.log, self.sizes = job, pool, lane, log, sizes
        self.rows: dict[Key, TableRow] = {}
        self.best: dict[tuple[Gemm, int], float] = {}
        for line in log.read_text().splitlines() if log.exists() else ():
            self._keep(TableRow.from_json(json.loads(line)))

    def wanted(self) -> Iterator[Key]:
        """Yield every (gemm, tile, M), tile by tile so that a loaded binary serves all M."""
        limits = SpaceLimits(self.job.device.shared_memory_per_block)
        for tile, gemm in itertools.product(base_tiles(self.job), Gemm):
            for m in self.sizes:
                if cut_reason(self.job.problem, m, tile, limits) is None:
                    yield gemm, tile, m

    def run(self, deadline: float) -> bool:
        """Record until done (True) or the deadline (False)."""
        todo = iter([key for key in self.wanted() if key not in self.rows])
        return self._drain(todo, deadline, repeat=False)

    def repeat(self, deadline: float) -> bool:
        """Time the best and a random part of the rows again."""
        timed = [row for row in self.rows.values() if row.us is not None and not row.at_least]
        chosen: dict[Key, None] = {}
        for gemm, m in itertools.product(Gemm, self.sizes):
            here = sorted((row for row in timed if row.gemm is gemm and row.m == m), key=lambda row: row.us or 0.0)
            chosen.update({row.key: None for row in here[:REPEAT_BEST]})
        chosen.update({row.key: None for row in random.Random(1).sample(timed, int(len(timed) * REPEAT_SHARE))})
        return self._drain(iter([key for key in chosen if self.rows[key].repeat_us is None]), deadline, repeat=True)

    def _drain(self, todo: Iterator[Key], deadline: float, *, repeat: bool) -> bool:
        # One compile future serves every M of its binary, so it can stand for several keys.
        pending: dict[Future[Any], list[tuple[Key, TileFacts | None]]] = {}
        more = True
        with self.log.open("a") as file:
            while True:
                while more and len(pending) < IN_FLIGHT:
                    if time.monotonic() > deadline:
                        more = False
                        break
                    key = next(todo, None)
                    if key is None:
                        more = False
                        break
                    gemm, tile, m = key
                    future = self.pool.submit(self.job.spec(self.job.variant(m, gemm, tile)))
                    pending.setdefault(future, []).append((key, None))
                if not pending:
                    return time.monotonic() <= deadline
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    for key, facts in pending.pop(future):
                        self._advance(future.result(), key, facts, pending, file, repeat=repeat)

    def _advance(
        self, answer: Any, key: Key, facts: TileFacts | None, pending: Any, file: Any, *, repeat: bool
    ) -> None:
        gemm, tile, m = key
        if isinstance(answer, TileFacts):
            over = over_limit(answer.shared_bytes, answer.registers, answer.num_warps, self.job.limits)
            if over is None:
                best = self.best.get((gemm, m))
                stop = None if best is None or repeat else STOP_FACTOR * best
                pending[self.lane.time_gemm(GemmRequest(m, gemm, tile, stop), answer)] = [(key, answer)]
                return
            answer, facts = over, answer
        if isinstance(answer, Failure):
            row = TableRow.failed(gemm, tile, m, answer, facts)
        elif repeat:
            assert isinstance(answer, Measured)
            row = self.rows[key].repeated(answer.us)
        else:
            assert isinstance(answer, Measured)
            assert facts is not None
            row = TableRow.timed(gemm, tile, m, answer, facts)
        self._keep(row)
        file.write(json.dumps(row.to_json()) + "\n")

    def _keep(self, row: TableRow) -> None:
        self.rows[row.key] = row
        if row.us is not None and not row.at_least:
            key = (row.gemm, row.m)
            self.best[key] = min(row.us, self.best.get(key, row.us))


def circumstances(job: Job) -> dict[str, Any]:
    """Return what a reader of the table has to know."""
    return {
        "problem": job.problem.to_json(),
        "device": job.device.name,
        "driver": sorted({gpu.driver for gpu in job.gpus}),
        "triton": job.triton_version,
        "sglang": job.tree.version,
        "kernel_source_hash": job.source_hash,
        "routing": str(job.routing),
        "seed": job.settings.seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> int:
    """Record one table; exit 1 when the time limit came first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_layer_arguments(parser)
    parser.add_argument("--gpus", default="0", help="one GPU")
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which to stop, to be resumed")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    begin = time.monotonic()
    sizes = tuple(int(m) for m in args.sizes.split(","))
    settings = Settings(trials=1, exhaustive=True, budget_s=None, seed=0)
    card = resolve_card(CardRequest(None, None, args.gpus, "cuda"))
    request = JobRequest(
        layer_of(args), sizes, parse_routing("uniform"), settings, args.sglang, Path("generated_configs")
    )
    job = resolve_job(request, card)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    cache = CompileCache(cache_root() / "compile")
    pool = CompilePool(cache, args.workers)
    lane = GpuLane("GPU", worker_setup(job, job.gpus[0], cache), lambda text: print(text, flush=True))
    try:
        print(lane.prepare().result(), flush=True)
        recorder = Recorder(job, pool, lane, args.output.with_suffix(".jsonl"), sizes)
        done = recorder.run(begin + args.limit) and recorder.repeat(begin + args.limit)
    finally:
        lane.stop()
        pool.stop()
    write_table(args.output, circumstances(job), recorder.rows.values())
    print(f"{len(recorder.rows)} rows, {'complete' if done else 'NOT complete'}, {time.monotonic() - begin:.0f} s")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
