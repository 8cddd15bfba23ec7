"""One release's real fused_moe in Triton's interpreter: ``python interpreted_call.py SITE CARD < cases > answers``.

The launcher, its checks of shapes and scales, the lookup and the kernels are SGLang's. bf16 does not work in the
interpreter, so that layers are held in fp16. Where a case says so, one thing is done as it should not be.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}

import torch
from stand_ins import install

from sm120tune.measure import stored as stored_module
from sm120tune.quantization import DTYPES
from sm120tune.upstream import SGLangTree, find_sglang
from sm120tune.upstream.running import FusedMoE, RunningSGLang, import_fused_moe
from sm120tune.verify import judge
from sm120tune.verify.messages import Request
from sm120tune.verify.stopwatch import Call, Recording

stored_module._COMPUTE.update(dict.fromkeys(DTYPES, torch.float16))


class _NoTime:
    device = torch.device("cpu")
    l2_bytes = 1

    def record(self, calls: Sequence[Call]) -> Recording:
        return self  # type: ignore[return-value]

    def replay_us(self) -> float:
        return 1.0

    def close(self) -> None:
        pass


class _Wrong(RunningSGLang):
    """A call that passes one thing wrongly."""

    what = ""

    def call(self, tokens: Any, w1: Any, w2: Any, *more: Any) -> torch.Tensor:
        if self.what == "scales of the next expert":
            w1 = replace(w1, scales=w1.scales.roll(1, dims=0))
        elif self.what == "zero points off by one":
            w2 = replace(w2, zeros=w2.zeros + 0x11)
        elif self.what == "scales of two dimensions":
            w1 = replace(w1, scales=w1.scales.flatten(1))
        return super().call(tokens, w1, w2, *more)


def answer(tree: SGLangTree, fused_moe: FusedMoE) -> None:
    """Answer the cases on standard input."""
    answers = []
    for case in json.load(sys.stdin):
        request = Request.from_json(case["request"])
        sglang = _Wrong(tree, request.problem, fused_moe)
        sglang.what = case["wrong"]
        if sglang.what == "codes that are cut off":
            stored_module.call_rounds = lambda _stored: False  # type: ignore[attr-defined]
        answers.append([answer.to_json() for answer in judge.Judge(request, sglang, _NoTime()).answers()])
    print(json.dumps(answers))


if __name__ == "__main__":
    site = Path(sys.argv[1])
    install(site, sys.argv[2])
    tree = find_sglang(site)
    answer(tree, import_fused_moe(tree))
