"""What the alternatives cost and reach: upstream's tuning procedure, Triton's own autotuner, one tile for both GEMMs.

    python bench/upstream_side_by_side.py --preload shim.py --json out.json --limit 300
    python bench/upstream_side_by_side.py --table bench/tables/h200_E256_N256_H6144.parquet --provenance FILE

``upstream`` does what SGLang's tuner does per candidate (fresh random weights, JIT compile in process, a CUDA graph of
ten whole calls, 5 replays to warm up and 10 timed) on a random sample of its 1,920 tiles, once cold and once more with
everything compiled. ``autotune`` points ``triton.autotune`` at SGLang's kernel for the gate_up GEMM. Both need a GPU;
the first an SGLang whose fused_moe imports (``--preload`` as in ``sm120tune verify``), the second its source
(``--sglang``).
``quality`` needs only a recorded table: what an exhaustive search for a single tile, and our file, lose to the best
pair. What is scaled up from a sample has ``extrapolated`` in its name. Each part starts from an empty Triton cache.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import torch

from sm120tune.compiler.build import captured_output, use_cache_folder
from sm120tune.measure.replay import best_pair
from sm120tune.measure.routing import UNIFORM
from sm120tune.measure.table import read_table
from sm120tune.measure.workload import Workload
from sm120tune.problem import DEFAULT_BATCH_SIZES, Gemm, MoEProblem
from sm120tune.provenance import load as load_provenance
from sm120tune.tiles import TILE_FIELDS, Tile, TilePair
from sm120tune.upstream.arguments import gemm_arguments, launch_flags, variant_for
from sm120tune.upstream.locate import find_sglang
from sm120tune.upstream.running import import_fused_moe
from sm120tune.upstream.source import load_kernels
from sm120tune.upstream.values import launch_values

_AXES = ((16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128, 256), (1, 16, 32, 64), (4, 8), (2, 3, 4, 5))
GRID = tuple(Tile(*values) for values in itertools.product(*_AXES))
"""Upstream's tiles: 1,920."""
CALLS, WARM_REPLAYS, REPLAYS = 10, 5, 10
COLD_SHARE = 0.7  # of an M's time; the rest repeats the same tiles with everything compiled
AUTOTUNE_NOTES = (
    "its do_bench writes 256 MB before each timed launch: a cold L2, but always the same inputs and routing",
    "it tunes one launch: the two GEMMs cannot share BLOCK_SIZE_M, and the alignment cannot follow it",
    "any error but OutOfResources, PTXASError or a compile-time assertion ends the whole run, unless pruned before",
)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Result = dict[str, Any]


class Report:
    """Collects the parts' results, failures included, and writes them as they come."""

    def __init__(self, path: Path | None, limit_s: float) -> None:
        self._path = path
        self._stop = time.monotonic() + limit_s - 15
        self.results: Result = {}
        self.failed = False

    @property
    def left_s(self) -> float:
        """Seconds in which a part may still begin something."""
        return self._stop - time.monotonic()

    def part(self, name: str, run: Callable[..., Any], *args: Any) -> Any:
        """Run one part; returns None where it failed."""
        begin, result, error = time.monotonic(), None, None
        try:
            if self.left_s <= 0:
                raise TimeoutError(f"no time left for {name}; give a larger --limit")
            result = run(*args)
        except Exception:
            self.failed, error = True, traceback.format_exc()
            print(error, file=sys.stderr, flush=True)
        self.results[name] = {"part_s": time.monotonic() - begin, "error": error, "result": result}
        if self._path:
            self._path.write_text(json.dumps(self.results, indent=1, default=str) + "\n")
        if isinstance(result, dict):
            print(name, json.dumps({k: v for k, v in result.items() if not k.endswith("records")}), flush=True)
        return result


class Upstream:
    """SGLang's own call, and what its tuner does with one candidate."""

    def __init__(self, problem: MoEProblem, preload: Path | None, sglang: Path | None) -> None:
        self.fused_moe = import_fused_moe(find_sglang(sglang), preload)
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
        from sglang.srt.layers.moe.moe_runner.triton_utils import override_config
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        self.problem, self.override, self.topk_output = problem, override_config, StandardTopKOutput
        self.runner = MoeRunnerConfig(inplace=True)

    def attempt(self, m: int, tile: Tile) -> Result:
        """Time one candidate, failures included; raises where the device itself is lost."""
        begin = time.perf_counter()
        us = failure = None
        # SGLang's context restores nothing after an exception, so none may leave it.
        with captured_output(), self.override(tile.to_row()):
            try:
                us = self._time(m)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        torch.cuda.synchronize()
        return {"tile": str(tile), "s": time.perf_counter() - begin, "us": us, "failure": failure}

    def _choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.topk(torch.softmax(scores, dim=-1), self.problem.topk, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids.to(torch.int32)

    def _time(self, m: int) -> float:
        """Return µs per call."""
        e, n, k = self.problem.experts, self.problem.intermediate, self.problem.hidden
        shapes = ((m, k), (e, 2 * n, k), (e, k, n))
        hidden, w1, w2 = (torch.randn(shape, dtype=_DTYPES[self.problem.dtype], device="cuda") for shape in shapes)
        scores = torch.randn((REPLAYS, m, e), dtype=torch.float32, device="cuda")
        route = self.topk_output(*self._choose(scores[0]), scores[0])
        self.fused_moe(hidden, w1, w2, route, self.runner)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                self.fused_moe(hidden, w1, w2, route, self.runner)
        for _ in range(WARM_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
        for index, (start, end) in enumerate(events):
            for old, new in zip(route[:2], self._choose(scores[index]), strict=True):
                old.copy_(new)
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        graph.reset()
        return fmean(start.elapsed_time(end) for start, end in events) * 1e3 / CALLS

    def sample(self, m: int, tiles: Sequence[Tile], limit_s: float) -> Result:
        """Run the procedure on as many tiles as fit, cold and then compiled."""
        # Not in the grid: what is compiled once per process is out of the way.
        if failure := self.attempt(m, Tile(16, 32, 32, 1, 4, 2))["failure"]:
            raise RuntimeError(f"SGLang's call does not run at all: {failure}")
        begin = time.monotonic()
        passes: list[list[Result]] = []
        for share in (COLD_SHARE, 1.0):
            done: list[Result] = []
            for tile in tiles[: len(passes[0])] if passes else tiles:
                if done and time.monotonic() - begin > share * limit_s:
                    break
                done.append(self.attempt(m, tile))
            passes.append(done)
        cold, compiled = (fmean(one["s"] for one in done) for done in passes)
        failures = Counter(one["failure"].split(":")[0] for one in passes[0] if one["failure"])
        best = min((one for one in passes[0] if one["us"]), key=lambda one: one["us"], default=None)
        result = {"m": m, "candidates": [len(done) for done in passes], "failures": dict(failures), "best": best}
        result |= {"s_per_candidate": cold, "s_per_candidate_compiled": compiled, "records": passes}
        full = {"s_per_m_extrapolated": cold * len(GRID), "s_per_m_compiled_extrapolated": compiled * len(GRID)}
        return result | full


def whole_file(problem: MoEProblem, sampled: Sequence[Result]) -> Result:
    """Scale the means over the sampled M up to a file, compiling anew only where Triton does."""
    rows, few = [m * problem.topk for m in DEFAULT_BATCH_SIZES], problem.experts + 1
    # Triton compiles apart by whether M*topk and EM divide by 16; EM as in SGLang 0.5.15, for any multiple of 16.
    kinds = {(row % 16 == 0, (row * 16 if row < few else row + few * 15) % 16 == 0) for row in rows}
    cold, compiled = (fmean(one[f"s_per_m{kind}_extrapolated"] for one in sampled) for kind in ("", "_compiled"))
    seconds = len(kinds) * cold + (len(rows) - len(kinds)) * compiled
    result = {"sizes": len(rows), "m_that_compile": len(kinds), "s_per_file_extrapolated": seconds}
    return result | {"s_per_file_if_every_m_compiles_extrapolated": len(rows) * cold}


def autotune(problem: MoEProblem, m: int, count: int, seed: int, sglang: Path | None) -> Result:
    """Let Triton's autotuner choose among some tiles for gate_up at M, cold and then compiled."""
    import triton

    use_cache_folder(Path(tempfile.mkdtemp(prefix="autotune-cache-")))
    kernels = load_kernels(find_sglang(sglang))
    kernel = kernels.fused_moe
    shape, block_m = problem.gemm(Gemm.GATE_UP), 16 if m <= problem.experts else 64
    # One even_Ks for all: only what divides K.
    tiles = [tile for tile in GRID if tile.BLOCK_SIZE_M == block_m and shape.k % tile.BLOCK_SIZE_K == 0]
    tiles = random.Random(f"{seed} {m}").sample(tiles, count)
    names = TILE_FIELDS[:4]
    configs = [triton.Config({k: getattr(t, k) for k in names}, t.num_warps, t.num_stages) for t in tiles]
    work = Workload(problem, UNIFORM, max_m=m, copies=1, seed=seed, device=torch.device("cuda"))
    operands, alignment = work.operands(m, 0, m * problem.topk), work.alignment(m, 0, block_m)
    em = alignment.sorted_token_ids.shape[0]
    arch = int("{}{}".format(*torch.cuda.get_device_capability()))
    pdl = launch_flags(kernel, arch).pdl
    variant = variant_for(problem, Gemm.GATE_UP, tiles[0], m=m, sorted_intermediate=False, pdl=pdl)
    arguments = gemm_arguments(kernels, problem, variant, arch)
    dynamic: Result = {f"{name}_ptr": tensor for name, tensor in vars(alignment).items()}
    dynamic |= {"a_ptr": operands.hidden.codes, "b_ptr": operands.w1.codes, "c_ptr": operands.gate_up_out}
    dynamic |= {"topk_weights_ptr": operands.route.weights, "num_valid_tokens": operands.route.ids.numel(), "EM": em}
    # No tile here has USE_TMA, so no descriptor is asked for.
    bound = zip(arguments, launch_values(arguments, dynamic, lambda *_: None), strict=True)
    values = {name: value for name, value in bound if name not in names} | ({"launch_pdl": True} if pdl else {})

    result: Result = {"m": m, "block_size_m": block_m, "configs": count, "notes": AUTOTUNE_NOTES}
    for suffix in ("", "_compiled"):
        tuned = triton.autotune(configs=configs, key=["EM"])(kernel)
        begin = time.perf_counter()
        with captured_output():
            tuned[lambda meta: (-(-em // block_m) * -(-shape.n // meta["BLOCK_SIZE_N"]),)](**values)
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / count
        result |= {f"s_per_config{suffix}": seconds, f"s_per_m{suffix}_extrapolated": seconds * len(GRID) * 2}
    times_ms = [timing[0] for timing in tuned.configs_timings.values()]
    failed = sum(math.isinf(ms) for ms in times_ms)
    return result | {"failed": failed, "best": str(tuned.best_config), "best_us": min(times_ms) * 1e3}


def quality(table_path: Path, provenance: Path | None) -> list[Result]:
    """Compare the best single tile, and our file's pairs, with the best pair of every M of a table."""
    table = read_table(table_path)
    # A tile that was stopped early for being slow is as good as absent.
    us = {row.key: row.us for row in table.rows if row.us is not None and not row.at_least}
    tiles = sorted({tile for _, tile, _ in us} & set(GRID))
    record = load_provenance(provenance) if provenance else None
    if record and record.problem != table.problem:
        raise ValueError(f"{provenance} is of another problem: {record.problem}")
    ours = {row.m: row.chosen for row in record.rows} if record else {}

    def total(pair: TilePair, m: int) -> float:
        return us.get((Gemm.GATE_UP, pair.gate_up, m), math.inf) + us.get((Gemm.DOWN, pair.down, m), math.inf)

    found: list[Result] = []
    print(f"{table_path.name}: {table.problem} on {table.device_name}; {len(tiles)} of upstream's {len(GRID)} tiles")
    print("     M   best pair  one tile  our file  the one tile")
    for m in table.sizes:
        best_us, _ = best_pair(table, m)
        single_us, single = min((total(TilePair.same(tile), m), tile) for tile in tiles)
        our = total(ours[m], m) / best_us if m in ours else math.inf
        shown = f"{our:.3f}" if math.isfinite(our) else "-"  # no such M or tile in the table
        one: Result = {"m": m, "best_us": best_us, "single": single_us / best_us, "tile": str(single)}
        found.append(one | {"ours": our if math.isfinite(our) else None})
        print(f"{m:>6} {best_us:>8.1f} us {single_us / best_us:>9.3f} {shown:>9}  {single}")
    both = [one for one in found if one["ours"]]
    for name, rows in (("one tile", found), ("one tile, where ours is recorded", both), ("our file", both)):
        if ratios := [one["ours" if name == "our file" else "single"] for one in rows]:
            print(f"{name}: geomean {geometric_mean(ratios):.4f} worst {max(ratios):.3f} over {len(ratios)} M")
    return found


def main() -> int:
    """Run the parts that the options and the machine allow; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("experts", 256), ("inter", 256), ("hidden", 6144), ("topk", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bf16")
    parser.add_argument("--batch-sizes", default="64,4096")
    parser.add_argument("--per-m-limit", type=float, default=30.0, help="seconds of upstream's procedure")
    parser.add_argument("--autotune-configs", type=int, default=20, help="tiles per M")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds in all; the process ends then")
    for name in ("preload", "sglang", "table", "provenance", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args()
    # On a copy of the descriptor: a candidate's output is redirected while it runs.
    faulthandler.dump_traceback_later(args.limit, exit=True, file=os.fdopen(os.dup(2), "w"))
    # Triton reads this at every use, so that a new folder counts at once.
    use_cache_folder(Path(tempfile.mkdtemp(prefix="upstream-cache-")))
    report = Report(args.json, args.limit)
    if args.table:
        report.part("quality", quality, args.table, args.provenance)
    if not torch.cuda.is_available():
        print("no GPU here: upstream and autotune are left out")
        return int(report.failed)
    torch.manual_seed(args.seed)
    sizes = [int(m) for m in args.batch_sizes.split(",")]
    problem = MoEProblem(args.experts, args.inter, args.hidden, args.topk, args.experts, args.dtype)
    tiles = random.Random(args.seed).sample(GRID, len(GRID))
    sampled: list[Result] = []
    upstream = report.part("sglang", Upstream, problem, args.preload, args.sglang)
    for index, m in enumerate(sizes if upstream else ()):
        # Every M has tiles of its own, so that its first pass compiles.
        own, limit_s = tiles[index :: len(sizes)], min(args.per_m_limit, report.left_s)
        sampled.append(report.part(f"upstream M={m}", upstream.sample, m, own, limit_s))
    if any(sampled):
        report.part("upstream file", whole_file, problem, list(filter(None, sampled)))
    for m in sizes:
        # The autotuner cannot be stopped: a guess of 2 s a tile keeps it within the limit.
        count = max(2, min(args.autotune_configs, int(report.left_s / 2)))
        report.part(f"autotune M={m}", autotune, problem, m, count, args.seed, args.sglang)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
