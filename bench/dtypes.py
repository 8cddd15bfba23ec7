"""Every quantization on one real model each: the default, today's pair, the tuned pair, with TMA and without.

    python bench/dtypes.py --json dtypes.json

Runs the main command for each model, then times the pairs again with one common method: chains on new data, three
interleaved repeats. ``error`` is that of the tuned pair against the reference. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from performance import lane_for, repeated_race, run_once

from sm120tune.accuracy import ErrorMeasure
from sm120tune.measure.results import VerifyRequest
from sm120tune.provenance import FileProvenance, RowStatus
from sm120tune.search.race import compare
from sm120tune.tiles import TilePair

SHOWN = (1, 16, 64, 256, 1024, 4096, 16384)
QWEN3_30B = ["--experts", "128", "--inter", "768", "--hidden", "2048"]
QWEN35_35B = ["--experts", "256", "--inter", "512", "--hidden", "2048"]
DEEPSEEK_V3 = ["--experts", "256", "--tp", "8", "--inter", "2048", "--hidden", "7168", "--shared-experts", "1"]
KIMI_K2 = ["--experts", "384", "--tp", "8", "--inter", "2048", "--hidden", "7168"]
BLOCK = ["--dtype", "fp8_w8a8", "--block-shape", "128,128"]
MODELS: dict[str, list[str]] = {
    "DeepSeek-V3 tp 8, fp8 block": [*DEEPSEEK_V3, *BLOCK],
    "Qwen3-30B-A3B, bf16": QWEN3_30B,
    "Qwen3-30B-A3B, fp8 block": [*QWEN3_30B, *BLOCK],
    "Qwen3.5-35B-A3B, bf16": QWEN35_35B,
    "Kimi-K2 tp 8, int4 group 32": [*KIMI_K2, "--dtype", "int4_w4a16", "--group-size", "32"],
    "Qwen3-30B-A3B, int8 channel": [*QWEN3_30B, "--dtype", "int8_w8a8", "--per-channel"],
    "Qwen3-30B-A3B, fp8 channel": [*QWEN3_30B, "--dtype", "fp8_w8a8", "--per-channel"],
    "Qwen3-30B-A3B, int8_w8a16 group 128": [*QWEN3_30B, "--dtype", "int8_w8a16", "--group-size", "128"],
}


def without_tma(pair: TilePair) -> TilePair:
    """Return the same tiles loaded without descriptors."""
    return TilePair(replace(pair.gate_up, USE_TMA=False), replace(pair.down, USE_TMA=False))


def measure(record: FileProvenance, sglang: Path | None) -> list[dict[str, Any]]:
    """Time default, today's and the tuned pair again, and check the tuned one."""
    found: list[dict[str, Any]] = []
    with lane_for(record, sglang) as (job, lane):
        for row in record.rows:
            if row.m not in SHOWN or row.today is None:
                continue
            default = job.lookup.builtin_pair(record.problem, row.m)
            pairs = {"default": default, "today": row.today, "tuned": row.chosen, "no_tma": without_tma(row.chosen)}
            samples = repeated_race(lane, row.m, pairs.values())
            error = lane.verify(VerifyRequest(row.m, row.chosen, seed=99)).result()
            ratio = compare(samples[row.chosen], samples[row.today])
            found.append(
                {
                    "m": row.m,
                    "us": {name: median(samples[pair]) for name, pair in pairs.items()},
                    "status": row.status.value,
                    "ratio": ratio.middle,
                    "slower": ratio.slower,
                    "tma": [row.chosen.gate_up.USE_TMA, row.chosen.down.USE_TMA],
                    "error": error.relative if isinstance(error, ErrorMeasure) else str(error),
                    "pair": str(row.chosen),
                }
            )
    return found


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Print one model's table."""
    columns = ("M", "default", "today", "tuned", "without TMA", "tuned / today", "error")
    print(f"\n{name}\n| {' | '.join(columns)} |\n|{'---:|' * len(columns)}")
    for row in rows:
        us, tma = row["us"], any(row["tma"])
        plain = f"{us['no_tma']:.1f}" if tma else ""
        kept = " (kept)" if row["status"] != RowStatus.TUNED.value else ""
        error = f"{row['error']:.4f}" if isinstance(row["error"], float) else row["error"]
        print(
            f"| {row['m']} | {us['default']:.1f} | {us['today']:.1f} | {us['tuned']:.1f} | {plain} "
            f"| {row['ratio']:.3f}{kept} | {error} |"
        )
    ratios = geometric_mean(row["ratio"] for row in rows)
    print(f"geometric mean {ratios:.3f}, slower: {[row['m'] for row in rows if row['slower']] or 'none'}", flush=True)


def _headline(name: str, figures: dict[str, Any]) -> str:
    return f"{name}: {figures['tuned']} of {figures['rows']} rows tuned in {figures['wall_s']:.0f} s"


def main() -> int:
    """Tune and measure every model; exit 1 where a tuned row is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run the models whose name holds this")
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="where to leave the pairs")
    parser.add_argument("--show", type=Path, help="print the tables of an earlier --json, and stop")
    parser.add_argument("args", nargs="*", help="more arguments of the main command, after --")
    options = parser.parse_args()
    if options.show is not None:
        for name, one in json.loads(options.show.read_text()).items():
            show(_headline(name, one["figures"]), one["rows"])
        return 0
    result: dict[str, Any] = {}
    for name, args in MODELS.items():
        if options.only and options.only not in name:
            continue
        folder = Path(tempfile.mkdtemp(prefix="sm120tune-dtypes-"))
        extra = [*options.args, *(["--sglang", str(options.sglang)] if options.sglang else [])]
        figures, record = run_once([*args, *extra], folder)
        rows = measure(record, options.sglang)
        result[name] = {"args": args, "figures": figures, "rows": rows}
        show(_headline(name, figures), rows)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            (folder / "out").rename(options.keep / str(len(result)))
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["slower"] for one in result.values() for row in one["rows"]))


if __name__ == "__main__":
    sys.exit(main())
