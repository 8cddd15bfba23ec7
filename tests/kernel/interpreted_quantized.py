"""Run quantized layers in Triton's interpreter: ``python interpreted_quantized.py PACKAGE < cases > results``.

bf16 does not work in the interpreter, so that everything between quantized numbers is fp16 here: the tests bind
``compute_type`` themselves, and the stored weights are asked for in fp16. fp8 works, since its dot is done in fp16;
only where fp32 is rounded up to a power of two the interpreter loses the carry and makes half of it.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from interpreted_moe import ARCH, launch

from sm120tune.accuracy import is_correct
from sm120tune.measure import stored as stored_module
from sm120tune.measure.align import align
from sm120tune.measure.routing import parse_routing, topk_ids, topk_weights
from sm120tune.measure.stored import Activations, Weights, empty_activations, quantize_rows, random_weights
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import DTYPES, Granularity
from sm120tune.reference import measure_error, reference_quantized_moe
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import Variant, gemm_arguments, quantize_arguments
from sm120tune.upstream.locate import find_sglang
from sm120tune.upstream.source import Kernels, load_kernels, load_quantize
from sm120tune.upstream.values import Constant

stored_module._COMPUTE.update(dict.fromkeys(DTYPES, torch.float16))


class Layer:
    """The tensors of one case, all outputs filled with NaN."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.problem = problem = MoEProblem.from_json(case["problem"])
        self.m: int = case["m"]
        self.up, self.down = (Tile.from_row(row) for row in case["tiles"])
        self.stored = problem.quantization
        generator = torch.Generator().manual_seed(7)
        e, n, k = problem.experts, problem.intermediate, problem.hidden
        routing = parse_routing("uniform")
        self.ids = torch.from_numpy(topk_ids(problem, self.m, routing, seed=1))
        self.weights = torch.from_numpy(topk_weights(problem, self.m, routing, seed=1))
        self.w1 = random_weights(self.stored, e, 2 * n, k, generator)
        self.w2 = random_weights(self.stored, e, k, n, generator)
        self.a = quantize_rows(torch.randn(self.m, k, generator=generator).half(), self.stored)
        self.alignment = align(self.ids, self.up.BLOCK_SIZE_M, e)
        self.numel = self.m * problem.topk

    def reference(self) -> torch.Tensor:
        def requantize(inner: torch.Tensor) -> torch.Tensor:
            return quantize_rows(inner.half(), self.stored).values()

        return reference_quantized_moe(
            self.a.values(), self.w1.expert, self.w2.expert, requantize, self.weights, self.ids
        )

    def make_wrong(self, what: str) -> None:
        """Do one thing as no launcher should, after the reference was computed."""
        w1, a = self.w1, self.a
        if what == "scales of the neighbour along K":
            assert w1.scales is not None
            self.w1 = replace(w1, scales=w1.scales.roll(1, dims=2))
        elif what == "scales of the neighbour along N":
            assert w1.scales is not None
            self.w1 = replace(w1, scales=w1.scales.roll(1, dims=1))
        elif what == "scales of the next expert":
            assert w1.scales is not None
            self.w1 = replace(w1, scales=w1.scales.roll(1, dims=0))
        elif what == "scales of the next token":
            assert a.scales is not None
            # Scales of tokens are alike: those of one are made unlike the others' first.
            a.scales[0] *= 4
            self.a = Activations(a.codes, a.scales.roll(1, dims=0))
        elif what == "zero points off by one":
            assert w1.zeros is not None
            self.w1 = replace(w1, zeros=w1.zeros + (0x11 if self.stored.weight_bits == 4 else 1))
        elif what == "zero points of the neighbour along N":
            assert w1.zeros is not None
            self.w1 = replace(w1, zeros=w1.zeros.roll(1, dims=1))
        elif what == "halves of a byte swapped":
            self.w1 = replace(w1, codes=(w1.codes >> 4) | (w1.codes << 4))
        else:
            raise ValueError(what)

    def gemm(self, kernels: Kernels, gemm: Gemm, a: Activations, weights: Weights, tile: Tile) -> torch.Tensor:
        out = torch.full((self.numel, weights.codes.shape[1]), math.nan, dtype=torch.half)
        padded = self.alignment.sorted_token_ids.shape[0]
        dynamic = {
            "a_ptr": a.codes,
            "a_scale_ptr": a.scales,
            "b_ptr": weights.codes,
            "b_scale_ptr": weights.scales,
            "b_zp_ptr": weights.zeros,
            "c_ptr": out,
            "topk_weights_ptr": self.weights,
            "sorted_token_ids_ptr": self.alignment.sorted_token_ids,
            "expert_ids_ptr": self.alignment.expert_ids,
            "num_tokens_post_padded_ptr": self.alignment.num_tokens_post_padded,
            "EM": padded,
            "num_valid_tokens": self.numel,
        }
        arguments = gemm_arguments(kernels, self.problem, Variant(gemm, tile), ARCH)
        arguments["compute_type"] = Constant(tl.float16)
        programs = -(-padded // tile.BLOCK_SIZE_M) * -(-out.shape[1] // tile.BLOCK_SIZE_N)
        launch(kernels.gemm_kernel(self.stored), arguments, dynamic, programs)
        return out

    def quantize(self, kernel: Any, rows: torch.Tensor) -> Activations:
        """Quantize as the product's launcher does: by SGLang's kernel, or by one static scale."""
        if self.stored.operand_bytes != 1 or self.stored.granularity is Granularity.TENSOR:
            return quantize_rows(rows, self.stored)
        made = empty_activations(*rows.shape, self.stored, rows.device)
        assert made.scales is not None
        dynamic = {"y_ptr": rows, "y_q_ptr": made.codes, "y_s_ptr": made.scales}
        launch(kernel, quantize_arguments(kernel, self.stored, rows.shape[1]), dynamic, made.scales.numel())
        return made


def run(kernels: Kernels, quantize: Any, case: dict[str, Any]) -> dict[str, Any]:
    layer = Layer(case)
    reference = layer.reference()
    if case.get("wrong"):
        layer.make_wrong(case["wrong"])
    wide = layer.gemm(kernels, Gemm.GATE_UP, layer.a, layer.w1, layer.up)
    gate, up = wide.float().chunk(2, dim=1)
    activated = (torch.nn.functional.silu(gate) * up).half()
    down_in = layer.quantize(quantize, activated)
    by_reference = quantize_rows(activated, layer.stored)
    codes, expected = down_in.codes.float(), by_reference.codes.float()
    same = codes == expected
    if layer.problem.dtype == "fp8_w8a8":
        same |= 2 * codes == expected
        down_in = Activations(by_reference.codes, down_in.scales)
    out = layer.gemm(kernels, Gemm.DOWN, down_in, layer.w2, layer.down)
    error = measure_error(out.view(layer.m, layer.problem.topk, -1).float().sum(dim=1), reference)
    return {
        "relative": error.relative,
        "worst_row": error.worst_row,
        "nan_rows": error.nan_rows,
        "correct": is_correct(error, layer.problem.dtype),
        "same_codes": float(same.float().mean()),
        "norm": float(reference.norm()),
    }


def main() -> None:
    tree = find_sglang(Path(sys.argv[1]))
    kernels, quantize = load_kernels(tree), load_quantize(tree)
    print(json.dumps([run(kernels, quantize, case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
