"""Judge a pair of config files by SGLang's own ``fused_moe``: loaded or not, right or not, faster or not.

    python bench/whole_call.py --config-dir generated_configs/measured --provenance FILE --batch-sizes 1,64,4096

FILE is the pair's own, generated_configs/measured/provenance/triton_X_Y_Z/….json; it brings the problem.
The folder is used as SGLANG_MOE_CONFIG_DIR and compared with ``--baseline-dir`` (default: what SGLang ships). For
every M two CUDA graphs of the whole call are captured, one per folder, and replayed in turn; their ratio carries a
distribution-free confidence interval. Needs a GPU and an SGLang whose fused_moe imports; ``--preload FILE`` runs a
Python file with a ``load()`` that makes it import and returns (fused_moe, …).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sm120tune.measure.routing import parse_routing, topk_ids, topk_weights
from sm120tune.problem import MoEProblem
from sm120tune.provenance import load as load_provenance
from sm120tune.reference import measure_error, reference_moe
from sm120tune.search.race import compare

ROUNDS = 41
ROTATION_BYTES = 4


def load_fused_moe(preload: Path | None) -> Callable[..., torch.Tensor]:
    """Return SGLang's fused_moe, through a helper file if one is given."""
    if preload is not None:
        spec = importlib.util.spec_from_file_location("preload", preload)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["preload"] = module
        spec.loader.exec_module(module)
        return module.load()[0]  # type: ignore[no-any-return]
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_moe

    return fused_moe  # type: ignore[no-any-return]


class Judge:
    """One problem's tensors and SGLang's call over them."""

    def __init__(self, problem: MoEProblem, fused_moe: Callable[..., torch.Tensor], seed: int, max_m: int) -> None:
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        self.problem = problem
        self.fused_moe = fused_moe
        self.topk_output = StandardTopKOutput
        self.config = MoeRunnerConfig(
            num_experts=problem.router_experts + problem.shared_experts,
            num_local_experts=problem.experts,
            inplace=False,
        )
        dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
        e, n, k = problem.experts, problem.intermediate, problem.hidden
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.w1 = torch.empty((e, 2 * n, k), dtype=dtype, device="cuda").normal_(0, k**-0.5, generator=generator)
        self.w2 = torch.empty((e, k, n), dtype=dtype, device="cuda").normal_(0, n**-0.5, generator=generator)
        self.hidden = torch.empty((max_m, k), dtype=dtype, device="cuda").normal_(0, 1, generator=generator)

    def routes(self, m: int, count: int, routing: str, seed: int) -> list[Any]:
        """Return several routings of M tokens in SGLang's own type."""
        kind = parse_routing(routing)
        made = []
        for index in range(count):
            ids = torch.from_numpy(topk_ids(self.problem, m, kind, seed + index)).cuda()
            weights = torch.from_numpy(topk_weights(self.problem, m, kind, seed + index)).cuda()
            made.append(self.topk_output(weights, ids, torch.empty((m, 1), device="cuda")))
        return made

    def call(self, m: int, route: Any) -> torch.Tensor:
        """Run SGLang's call once."""
        return self.fused_moe(self.hidden[:m], self.w1, self.w2, route, self.config)

    def graph(self, m: int, routes: list[Any]) -> Callable[[], float]:
        """Capture the call over all routings; returns a function that replays and gives µs per call."""
        for route in routes[:2]:
            self.call(m, route)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for route in routes:
                self.call(m, route)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def replay() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3 / len(routes)

        return replay


def use_folder(folder: str | None) -> None:
    """Make SGLang's lookup read another folder (None: its shipped tree)."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as lookup

    lookup.get_moe_configs.cache_clear()
    os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)
    if folder is not None:
        os.environ["SGLANG_MOE_CONFIG_DIR"] = folder


def judge_m(judge: Judge, m: int, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the two folders at one M."""
    per_call = min(judge.problem.experts, m * judge.problem.topk) * judge.w1[0].nbytes * 1.5
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = min(32, max(8 if m <= 64 else 2, round(ROTATION_BYTES * l2 / per_call)))
    routes = judge.routes(m, count, args.routing, args.seed + 1)
    graphs = []
    for folder in (args.baseline_dir, args.config_dir):
        use_folder(folder)
        graphs.append(judge.graph(m, routes))
        if folder == args.config_dir:
            out = judge.call(m, routes[0])
    ids, weights = routes[0].topk_ids, routes[0].topk_weights
    error = measure_error(out, reference_moe(judge.hidden[:m], judge.w1, judge.w2, weights, ids))
    samples: list[list[float]] = [[], []]
    for turn in range(ROUNDS + 2):
        for lane in ((0, 1), (1, 0))[turn % 2]:
            time_us = graphs[lane]()
            if turn >= 2:
                samples[lane].append(time_us)
    ratio = compare(samples[1], samples[0])
    return {
        "m": m,
        "baseline_us": statistics.median(samples[0]),
        "tuned_us": statistics.median(samples[1]),
        "ratio": ratio.middle,
        "low": ratio.low,
        "high": ratio.high,
        "error": error.relative,
    }


def main() -> int:
    """Judge every M; exit 1 where a row is more than 2 % slower or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-dir", required=True, help="folder that holds configs/triton_X_Y_Z/")
    parser.add_argument("--baseline-dir", help="folder to compare with (default: SGLang's shipped tree)")
    parser.add_argument("--provenance", type=Path, required=True, help="a provenance file, for the problem")
    parser.add_argument("--batch-sizes", help="default: every M of the provenance")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--preload", type=Path)
    parser.add_argument("--json", type=Path, help="write the results here as they come")
    args = parser.parse_args()
    record = load_provenance(args.provenance)
    sizes = [int(m) for m in args.batch_sizes.split(",")] if args.batch_sizes else [row.m for row in record.rows]
    fused_moe = load_fused_moe(args.preload)
    logging.getLogger("sglang").setLevel(logging.INFO)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    judge = Judge(record.problem, fused_moe, args.seed, max(sizes))
    results = []
    for m in sizes:
        one = judge_m(judge, m, args)
        results.append(one)
        print(
            f"M={m:<6} baseline {one['baseline_us']:9.1f} us  tuned {one['tuned_us']:9.1f} us  "
            f"ratio {one['ratio']:.3f} [{one['low']:.3f}, {one['high']:.3f}]  error {one['error']:.4f}",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    bad = [one["m"] for one in results if one["ratio"] > 1.02 or one["error"] > 0.01]
    print("verdict:", "every row holds" if not bad else f"look at M={bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
