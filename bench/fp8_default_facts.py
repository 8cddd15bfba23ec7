"""What the compiler says of SGLang's built-in default tile for block-wise fp8, for SM120.

    python bench/fp8_default_facts.py --sglang PATH

The whole of block-wise fp8 is not there yet; this binds the kernel's arguments for the one tile whose public times the
cost model is fitted on (bench/field_data.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from field_data import FP8_BLOCK
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as triton_compile

from sm120tune.compiler.build import ast_source
from sm120tune.compiler.facts import read_facts
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.upstream.arguments import Constant, Pointer, Scalar, gemm_arguments, variant_for
from sm120tune.upstream.locate import find_sglang
from sm120tune.upstream.source import load_kernels

PROBLEM = MoEProblem(experts=256, intermediate=512, hidden=4096, topk=8, router_experts=256)
GROUP = 128
ARCH = 120


def main() -> int:
    """Print the facts of both GEMMs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", type=Path)
    args = parser.parse_args()
    kernel = load_kernels(find_sglang(args.sglang)).fused_moe
    for gemm in Gemm:
        variant = variant_for(PROBLEM, gemm, FP8_BLOCK, m=4096, sorted_intermediate=False, pdl=False)
        arguments, shape = gemm_arguments(kernel, PROBLEM, variant, ARCH), PROBLEM.gemm(gemm)
        groups_n, groups_k = shape.n // GROUP, shape.k // GROUP
        operand, scale = Pointer("fp8e4nv"), Pointer("fp32")
        arguments |= {"a_ptr": operand, "b_ptr": operand, "a_scale_ptr": scale, "b_scale_ptr": scale}
        arguments |= {"group_n": Constant(GROUP), "group_k": Constant(GROUP), "use_fp8_w8a8": Constant(True)}
        arguments |= {"stride_asm": Scalar(groups_k), "stride_ask": Scalar(1)}
        arguments |= {
            "stride_bse": Scalar(groups_n * groups_k), "stride_bsn": Scalar(groups_k), "stride_bsk": Scalar(1),
        }  # fmt: skip
        options = {"num_warps": FP8_BLOCK.num_warps, "num_stages": FP8_BLOCK.num_stages}
        target = GPUTarget("cuda", ARCH, 32)
        print(gemm, read_facts(triton_compile(ast_source(kernel, arguments), target=target, options=options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
