"""What the compiler says of every tile of the search space, once per architecture: bf16 and block-wise fp8.

    python bench/record_facts.py --device "NVIDIA RTX PRO 6000 Blackwell Server Edition" --sglang PATH [--fp8-block]
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from sm120tune.compiler import TileFacts
from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.pool import CompilePool
from sm120tune.compiler.spec import CompileSpec
from sm120tune.devices import find_device
from sm120tune.failures import Failure
from sm120tune.measure.occupancy import binary_key, record_name
from sm120tune.measure.table import read_table
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.search_space import Space, SpaceLimits, every_tile
from sm120tune.state import cache_root
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import launch_flags, variant_for
from sm120tune.upstream.locate import find_sglang
from sm120tune.upstream.source import load_kernels

OUTPUT = Path(__file__).parents[1] / "src/sm120tune/data/tile_facts.json"
BF16 = MoEProblem.from_parallelism(experts=256, tp=8, inter=2048, hidden=6144, topk=8)
FP8_BLOCK = replace(BF16, dtype="fp8_w8a8", block_shape=(128, 128))
M = 4096
"""Large enough that GDC_EARLY is off; it changes no resource."""

Facts = dict[str, list[int]]


def compiled(device_name: str, sglang: Path | None, workers: int, problem: MoEProblem) -> tuple[str, dict[str, Any]]:
    """Compile every tile for a card; returns the record's name and the record."""
    import triton

    device, tree = find_device(device_name), find_sglang(sglang)
    kernels = load_kernels(tree)
    pdl = launch_flags(kernels.fused_moe, device.arch).pdl
    pool = CompilePool(CompileCache(cache_root() / "compile"), workers)
    pending: dict[Tile, Future[TileFacts | Failure]] = {}
    space = Space(problem, M, SpaceLimits(device.shared_memory_per_block))
    for tile in every_tile():
        if tile.GROUP_SIZE_M == 1 and space.allows(tile):
            variant = variant_for(problem, Gemm.GATE_UP, tile, m=M, sorted_intermediate=False, pdl=pdl)
            spec = CompileSpec(tree.package, kernels.source_hash, triton.__version__, device.arch, problem, variant)
            pending[tile] = pool.submit(spec)
    facts: Facts = {}
    for number, (tile, future) in enumerate(pending.items(), 1):
        outcome = future.result()
        if isinstance(outcome, TileFacts):
            facts[binary_key(tile)] = [outcome.shared_bytes, outcome.registers, outcome.spill_bytes]
        print(f"\r{number} of {len(pending)}", end="", file=sys.stderr, flush=True)
    pool.stop()
    made = {"triton": triton.__version__, "kernel_source_hash": kernels.source_hash, "gemm": "gate_up"}
    return record_name(device.arch, problem.quantization), {**made, "tiles": facts}


def recorded(path: Path) -> tuple[str, dict[str, Any]]:
    """Take the facts of a recorded table; returns the record's name and the record."""
    table = read_table(path)
    facts: Facts = {}
    for row in table.rows:
        if row.gemm is Gemm.GATE_UP and row.shared_bytes and row.registers and row.spill_bytes is not None:
            facts[binary_key(row.tile)] = [row.shared_bytes, row.registers, row.spill_bytes]
    made = {"triton": table.meta["triton"], "kernel_source_hash": table.meta["kernel_source_hash"], "gemm": "gate_up"}
    return record_name(find_device(table.device_name).arch, table.problem.quantization), {**made, "tiles": facts}


def main() -> int:
    """Replace one architecture's record in the package's data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--device")
    source.add_argument("--table", type=Path)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--fp8-block", action="store_true", help="compile block-wise fp8 instead of bf16")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    problem = FP8_BLOCK if args.fp8_block else BF16
    name, record = recorded(args.table) if args.table else compiled(args.device, args.sglang, args.workers, problem)
    data = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    data[name] = record
    lines = []
    for each in sorted(data):
        head = {field: value for field, value in data[each].items() if field != "tiles"}
        tiles = ",\n".join(f"   {json.dumps(tile)}: {json.dumps(facts)}" for tile, facts in data[each]["tiles"].items())
        lines.append(f' "{each}": {json.dumps(head)[:-1]}, "tiles": {{\n{tiles}\n }}}}')
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"\n{name}: {len(record['tiles'])} tiles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
