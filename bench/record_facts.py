"""What the compiler says of every bf16 tile of the search space, once per architecture.

    python bench/record_facts.py --device "NVIDIA RTX PRO 6000 Blackwell Server Edition" --sglang PATH
    python bench/record_facts.py --table bench/tables/h200_E256_N256_H6144.parquet

Shared memory, registers and stack depend on the tile, the architecture, Triton and the kernel source, not on E, N,
hidden or GROUP_SIZE_M (the recorded tables agree on all 979 tiles). So the model can rank tiles that nobody has
compiled for the problem at hand. The facts are those of gate_up; down's differ by a few registers. Tiles whose
accumulator does not fit are left out, as in a search.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sm120tune.compiler import TileFacts
from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.pool import CompilePool
from sm120tune.compiler.spec import CompileSpec
from sm120tune.devices import find_device
from sm120tune.failures import Failure
from sm120tune.measure.table import read_table
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.search_space import HEURISTICS, every_tile, staged_shared_bytes
from sm120tune.state import cache_root
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import launch_flags, variant_for
from sm120tune.upstream.locate import find_sglang
from sm120tune.upstream.source import load_kernels

OUTPUT = Path(__file__).parents[1] / "src/sm120tune/data/tile_facts.json"
PROBLEM = MoEProblem.from_parallelism(experts=256, tp=8, inter=2048, hidden=6144, topk=8)
M = 4096
"""Large enough that GDC_EARLY is off; it changes no resource."""

Facts = dict[str, list[int]]


def compiled(device_name: str, sglang: Path | None, workers: int) -> tuple[str, dict[str, Any]]:
    """Compile every tile for a card; returns the architecture and its record."""
    import triton

    device, tree = find_device(device_name), find_sglang(sglang)
    kernels = load_kernels(tree)
    pdl = launch_flags(kernels.fused_moe, device.arch).pdl
    pool = CompilePool(CompileCache(cache_root() / "compile"), workers)
    pending: dict[Tile, Future[TileFacts | Failure]] = {}
    for tile in every_tile():
        fits = staged_shared_bytes(tile, PROBLEM.quantization) <= device.shared_memory_per_block
        if tile.GROUP_SIZE_M == 1 and fits and HEURISTICS["accumulator-fits"](PROBLEM, M, tile):
            variant = variant_for(PROBLEM, Gemm.GATE_UP, tile, m=M, sorted_intermediate=False, pdl=pdl)
            spec = CompileSpec(tree.package, kernels.source_hash, triton.__version__, device.arch, PROBLEM, variant)
            pending[tile] = pool.submit(spec)
    facts: Facts = {}
    for number, (tile, future) in enumerate(pending.items(), 1):
        outcome = future.result()
        if isinstance(outcome, TileFacts):
            facts[key(tile)] = [outcome.shared_bytes, outcome.registers, outcome.spill_bytes]
        print(f"\r{number} of {len(pending)}", end="", file=sys.stderr, flush=True)
    pool.stop()
    made = {"triton": triton.__version__, "kernel_source_hash": kernels.source_hash, "gemm": "gate_up"}
    return str(device.arch), {**made, "tiles": facts}


def recorded(path: Path) -> tuple[str, dict[str, Any]]:
    """Take the facts of a recorded table."""
    table = read_table(path)
    facts: Facts = {}
    for row in table.rows:
        if row.gemm is Gemm.GATE_UP and row.shared_bytes and row.registers and row.spill_bytes is not None:
            facts[key(row.tile)] = [row.shared_bytes, row.registers, row.spill_bytes]
    made = {"triton": table.meta["triton"], "kernel_source_hash": table.meta["kernel_source_hash"], "gemm": "gate_up"}
    return str(find_device(table.device_name).arch), {**made, "tiles": facts}


def key(tile: Tile) -> str:
    """Return what names a tile's binary: all but GROUP_SIZE_M, which is an integer argument of the launch."""
    return f"{tile.BLOCK_SIZE_M}x{tile.BLOCK_SIZE_N}x{tile.BLOCK_SIZE_K} w{tile.num_warps} s{tile.num_stages}"


def main() -> int:
    """Replace one architecture's record in the package's data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--device")
    source.add_argument("--table", type=Path)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    arch, record = recorded(args.table) if args.table else compiled(args.device, args.sglang, args.workers)
    data = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    data[arch] = record
    lines = []
    for name in sorted(data):
        head = {field: value for field, value in data[name].items() if field != "tiles"}
        tiles = ",\n".join(f"   {json.dumps(tile)}: {json.dumps(facts)}" for tile, facts in data[name]["tiles"].items())
        lines.append(f' "{name}": {json.dumps(head)[:-1]}, "tiles": {{\n{tiles}\n }}}}')
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"\n{arch}: {len(record['tiles'])} tiles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
