"""Run one SGLang release's kernels in Triton's interpreter: ``python interpreted_moe.py PACKAGE < cases > results``.

A program of its own, since Triton looks at TRITON_INTERPRET when a kernel is decorated. The cases and the results
are JSON lists; a result has the errors against the reference and how much of the buffers was in use.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from sm120tune.accuracy import is_correct
from sm120tune.measure.align import Alignment, align
from sm120tune.measure.routing import parse_routing, topk_ids, topk_weights
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.reference import measure_error, reference_moe
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import (
    Variant,
    activation_arguments,
    gemm_arguments,
    intermediate_rows,
)
from sm120tune.upstream.locate import find_sglang
from sm120tune.upstream.source import Kernels, load_kernels
from sm120tune.upstream.values import Argument, launch_values

ARCH = 80
"""A card without programmatic dependent launch: its instructions are nothing that the interpreter knows."""


def launch(kernel: Any, arguments: dict[str, Argument], dynamic: dict[str, Any], programs: int) -> None:
    """Launch by name, with the values that the product's launcher would pass by position."""

    def no_descriptor(_tensor: Any, _block: Any) -> Any:
        raise AssertionError("no TMA here")

    values = launch_values(arguments, dynamic, no_descriptor)
    kernel[(programs, 1, 1)](**dict(zip(arguments, values, strict=True)))


class Layer:
    """The tensors of one case, all outputs filled with NaN."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.problem = problem = MoEProblem.from_json(case["problem"])
        self.m: int = case["m"]
        self.up, self.down = (Tile.from_row(row) for row in case["tiles"])
        self.is_sorted: bool = case.get("sorted", False)
        assert self.up.BLOCK_SIZE_M == self.down.BLOCK_SIZE_M
        routing = parse_routing("uniform")
        self.weights = torch.from_numpy(topk_weights(problem, self.m, routing, seed=1))
        given = case.get("ids")
        self.ids = (
            torch.tensor(given, dtype=torch.int32)
            if given
            else torch.from_numpy(topk_ids(problem, self.m, routing, seed=1))
        )
        assert self.ids.shape == (self.m, problem.topk)
        e, n, k, wide = problem.experts, problem.intermediate, problem.hidden, problem.gemm(Gemm.GATE_UP).n
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(self.m, k, generator=generator).half()
        self.w1 = (torch.randn(e, wide, k, generator=generator) / math.sqrt(k)).half()
        self.w2 = (torch.randn(e, k, n, generator=generator) / math.sqrt(n)).half()
        rows = intermediate_rows(problem, self.m, self.up.BLOCK_SIZE_M, self.is_sorted)
        self.gate_up_out = torch.full((rows, wide), math.nan, dtype=torch.half)
        self.activated = torch.full((rows, n), math.nan, dtype=torch.half)
        self.out = torch.full((self.m * problem.topk, k), math.nan, dtype=torch.half)
        self.alignment = align(self.ids, self.up.BLOCK_SIZE_M, e)

    def reference(self) -> torch.Tensor:
        return reference_moe(self.x, self.w1, self.w2, self.weights, self.ids)

    def make_wrong(self, what: str) -> None:
        """Do one thing as no launcher should, after the reference was computed."""
        ids, experts, used = vars(self.alignment).values()
        n, block = self.problem.intermediate, self.up.BLOCK_SIZE_M
        if what == "experts shifted":
            self.alignment = Alignment(ids, torch.where(experts < 0, experts, (experts + 1) % len(self.w1)), used)
        elif what == "aligned for larger blocks":
            ids, experts, used = vars(align(self.ids, 2 * block, len(self.w1))).values()
            # More blocks than that alignment knows of: none may be read past its end.
            self.alignment = Alignment(ids, torch.cat([experts, torch.zeros_like(experts)]), used)
        elif what == "gate and up swapped":
            self.w1 = torch.cat([self.w1[:, n:], self.w1[:, :n]], dim=1)
        elif what == "down weights of the next expert":
            self.w2 = self.w2.roll(1, dims=0)
        elif what == "router weights reversed":
            self.weights = self.weights.flip(1).contiguous()
        elif what == "one row lost":
            row = int(torch.nonzero(ids < self.ids.numel())[0])
            ids = ids.clone()
            ids[row] = self.ids.numel()
            self.alignment = Alignment(ids, experts, used)
        elif what == "one row of a wrong expert":
            first = torch.nonzero(ids < self.ids.numel())[:, 0]
            owner = experts[first // block]
            other = first[torch.nonzero(owner != owner[0])[0, 0]]
            ids = ids.clone()
            ids[[int(first[0]), int(other)]] = ids[[int(other), int(first[0])]]
            self.alignment = Alignment(ids, experts, used)
        else:
            raise ValueError(what)

    def fill_tail(self) -> None:
        """Fill the entries past num_tokens_post_padded with nonsense: SGLang leaves them as they were."""
        used = int(self.alignment.num_tokens_post_padded)
        self.alignment.sorted_token_ids[used:] = -(2**30)
        self.alignment.expert_ids[used // self.up.BLOCK_SIZE_M :] = 2**30

    def gemm(self, kernels: Kernels, gemm: Gemm) -> None:
        up = gemm is Gemm.GATE_UP
        tile, weights = (self.up, self.w1) if up else (self.down, self.w2)
        variant = Variant(gemm, tile, sorted_intermediate=self.is_sorted and up)
        padded = self.alignment.sorted_token_ids.shape[0]
        dynamic = {
            "a_ptr": self.x if up else self.activated,
            "b_ptr": weights,
            "c_ptr": self.gate_up_out if up else self.out,
            "topk_weights_ptr": self.weights,
            "sorted_token_ids_ptr": self.alignment.sorted_token_ids,
            "expert_ids_ptr": self.alignment.expert_ids,
            "num_tokens_post_padded_ptr": self.alignment.num_tokens_post_padded,
            "EM": padded,
            "num_valid_tokens": self.ids.numel(),
        }
        programs = -(-padded // tile.BLOCK_SIZE_M) * -(-weights.shape[1] // tile.BLOCK_SIZE_N)
        launch(kernels.fused_moe, gemm_arguments(kernels, self.problem, variant, ARCH), dynamic, programs)

    def activation(self, kernels: Kernels) -> None:
        if not self.problem.gated:
            # As SGLang's fused_experts_impl: torch, not a kernel of its own.
            self.activated = torch.square(torch.nn.functional.relu(self.gate_up_out))
            return
        block = self.up.BLOCK_SIZE_M if self.is_sorted else 0
        dynamic = {
            "gateup_output": self.gate_up_out,
            "down_input": self.activated,
            "expert_ids_ptr": self.alignment.expert_ids if self.is_sorted else self.ids,
        }
        programs = self.activated.shape[0]
        if self.is_sorted:
            # SGLang launches one program per row that it allocated; the last may lie past the blocks of ids.
            programs = min(programs, self.alignment.expert_ids.shape[0] * block)
        arguments = activation_arguments(kernels.act_and_mul, self.problem, block, self.is_sorted)
        launch(kernels.act_and_mul, arguments, dynamic, programs)

    def unsort(self) -> None:
        """Bring the sorted intermediate into token order: without TMA down reads it so."""
        places = torch.nonzero(self.alignment.sorted_token_ids < self.ids.numel())[:, 0]
        places = places[places < self.activated.shape[0]]
        plain = torch.full((self.ids.numel(), self.problem.intermediate), math.nan, dtype=torch.half)
        plain[self.alignment.sorted_token_ids[places].long()] = self.activated[places]
        self.activated = plain


def run(kernels: Kernels, case: dict[str, Any]) -> dict[str, Any]:
    layer = Layer(case)
    reference = layer.reference()
    if case.get("wrong"):
        layer.make_wrong(case["wrong"])
    if case.get("garbage"):
        layer.fill_tail()
    layer.gemm(kernels, Gemm.GATE_UP)
    layer.activation(kernels)
    if layer.is_sorted:
        layer.unsort()
    layer.gemm(kernels, Gemm.DOWN)
    total = layer.out.reshape(layer.m, layer.problem.topk, -1).float().sum(dim=1).half()
    error = measure_error(total, reference)
    return {
        "relative": error.relative,
        "worst_row": error.worst_row,
        "nan_rows": error.nan_rows,
        "correct": is_correct(error, "fp16"),
        "blocks": layer.alignment.expert_ids.shape[0],
        "used_blocks": int(layer.alignment.num_tokens_post_padded) // layer.up.BLOCK_SIZE_M,
        "norm": float(reference.norm()),
    }


def main() -> None:
    kernels = load_kernels(find_sglang(Path(sys.argv[1])))
    print(json.dumps([run(kernels, case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
