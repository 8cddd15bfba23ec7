"""What people tuned on SM120 cards, as the cost model ranks it.

    python bench/people.py tests/data/sm120_configs SGLANG/…/triton_utils/configs

For each file the median over its rows of: the row's predicted time over the best tile's, its percentile among all
tiles (0 is the best), and how far the median tile is from the best, without which the first figure says little. One
tile serves both GEMMs, as in SGLang's own tuner; a ``_down`` file's row serves its GEMM. Hidden size and topk are not
in the files: the models assumed are below. Facts of bf16 and of block-wise fp8 tiles are the compiler's, those
of other fp8 tiles guessed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sm120tune.devices import known_device
from sm120tune.measure.cost_constants import card_class
from sm120tune.measure.cost_terms import terms
from sm120tune.measure.model import gemm_load, tile_arrays
from sm120tune.measure.occupancy import blocks_per_sm, guess_facts, recorded_facts
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import Quantization
from sm120tune.search_space import every_tile
from sm120tune.tiles import Tile

ASSUMED = {
    (161, 192): (5120, 9, "GLM-4.5 tp 8"),
    (161, 384): (5120, 9, "GLM-4.5 tp 4"),
    (129, 352): (4096, 9, "GLM-4.5-Air tp 4"),
    (256, 512): (2048, 8, "Qwen3.5-35B-A3B"),
    (128, 704): (2816, 8, "26B-A4B of 2816 hidden"),
    (128, 768): (2048, 8, "Qwen3-30B-A3B"),
    (40, 512): (1536, 8, "Granite 3B-A800M"),
}
"""Hidden, topk and model of E and N; elsewhere hidden 4096 and topk 8 are taken."""
_NAME = re.compile(r"E=(\d+),N=(\d+),device_name=([^,]+?)(_down)?(?:,(.*?))?(_down)?$")
_SM120 = ("RTX_PRO", "RTX_50", "GB10")


@dataclass(frozen=True)
class Verdict:
    """One row of a file."""

    m: int
    over_best: float
    percentile: float
    median_over_best: float


def judge(path: Path) -> tuple[str, list[Verdict]]:
    """Return a line's head and the verdict of every row that can run on the card."""
    found = _NAME.match(path.stem)
    assert found is not None, path
    experts, width = int(found[1]), int(found[2])
    hidden, topk, model = ASSUMED.get((experts, width), (4096, 8, "hidden 4096, topk 8"))
    card = known_device(found[3])
    assert card is not None, path
    block_shape = (128, 128) if "block_shape" in path.stem else None
    stored = Quantization("fp8_w8a8" if "fp8" in path.stem else "bf16", block_shape)
    problem = MoEProblem(experts, width, hidden, topk, experts, stored.dtype, block_shape=block_shape)
    down_path = path.with_name(path.stem + "_down.json")
    rows = _rows(path)
    down_rows = _rows(down_path) if down_path.exists() else rows
    longest = 128 if block_shape else 256
    verdicts = []
    for m, tile in rows.items():
        down = down_rows.get(m, tile).with_block_m(tile.BLOCK_SIZE_M)
        space = [t for t in every_tile() if t.GROUP_SIZE_M == 1 and t.BLOCK_SIZE_K <= longest]
        tiles = [replace(tile, GROUP_SIZE_M=1), replace(down, GROUP_SIZE_M=1, USE_TMA=False), *space]
        facts = [recorded_facts(t, card.arch, stored) or guess_facts(t, stored) for t in tiles]
        fits = [blocks_per_sm(t, card, f)[0] > 0 and f.shared_bytes <= card.shared_memory_per_block
                for t, f in zip(tiles, facts, strict=True)]  # fmt: skip
        if not (fits[0] and fits[1]):
            continue
        kept = [i for i, fit in enumerate(fits) if fit]
        arrays = tile_arrays([tiles[i] for i in kept], [facts[i] for i in kept], card)
        times: list[npt.NDArray[np.float64]] = []
        for gemm in Gemm:
            load = gemm_load(problem, gemm, m, UNIFORM, arrays.block_m)
            times.append(terms(load, arrays, card, card_class(card.arch).constants).us)
        theirs, every = float(times[0][0] + times[1][1]), (times[0] + times[1])[2:]
        best = float(every.min())
        verdicts.append(Verdict(m, theirs / best, float((every < theirs).mean()), float(np.median(every)) / best))
    kind = "bf16" if not stored.quantized else "fp8 block" if stored.block_shape else "fp8"
    return f"{found[1]} | {found[2]} | {card.name.removeprefix('NVIDIA ')} | {kind} | {model}", verdicts


def _rows(path: Path) -> dict[int, Tile]:
    return {int(m): Tile.from_row(row) for m, row in json.loads(path.read_text()).items()}


def main() -> int:
    """Print one line a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    args = parser.parse_args()
    paths = [p for folder in args.folders for p in sorted(folder.rglob("E=*.json")) if not p.stem.endswith("_down")]
    columns = "rows | over the best | percentile | median tile over the best | furthest from the best"
    print(f"| E | N | card | dtype | model assumed | {columns} |")
    print("|---:|---:|---|---|---|---:|---:|---:|---:|---|")
    every: dict[bool, list[Verdict]] = {True: [], False: []}
    for path in paths:
        if any(name in path.stem for name in _SM120):
            head, verdicts = judge(path)
            every["bf16" in head] += verdicts
            print(f"| {head} | {_cells(verdicts)} |")
    for is_bf16, name in ((True, "all bf16"), (False, "all fp8")):
        print(f"| | | | {name} | | {_cells(every[is_bf16])} |")
    return 0


def _cells(verdicts: list[Verdict]) -> str:
    if not verdicts:
        return "0 | | | | "
    over, percentile, median = (
        statistics.median(getattr(v, name) for v in verdicts)
        for name in ("over_best", "percentile", "median_over_best")
    )
    worst = max(verdicts, key=lambda verdict: verdict.over_best)
    return f"{len(verdicts)} | {over:.3f} | {percentile:.1%} | {median:.2f} | {worst.over_best:.2f} at M={worst.m}"


if __name__ == "__main__":
    sys.exit(main())
