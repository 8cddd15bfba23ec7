"""The importable SGLang's fused_moe in Triton's interpreter: ``python whole_call.py CARD < cases > answers``.

All of SGLang is imported, and its call goes through its own custom operator. Only what needs a card is not its own: the
card's name, the backend of the process group, the sorting of tokens, and the operator's key for CUDA.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import torch
from interpreted_call import answer
from torch import library

from sm120tune.measure.align import align
from sm120tune.upstream import find_sglang
from sm120tune.upstream.running import import_fused_moe


def _moe_align_block_size(ids: torch.Tensor, block_size: int, experts: int) -> tuple[torch.Tensor, ...]:
    order = align(ids, block_size, experts)
    return order.sorted_token_ids, order.expert_ids, order.num_tokens_post_padded


if __name__ == "__main__":
    tree = find_sglang()
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    init = state.init_distributed_environment
    state.init_distributed_environment = lambda **how: init(**{**how, "backend": "gloo"})
    fused_moe = import_fused_moe(tree)
    lookup: Any = importlib.import_module(tree.module_of(tree.config_file))
    lookup.get_device_name = lambda *_args: sys.argv[1]
    call: Any = importlib.import_module(tree.module_of(tree.fused_moe_file))
    call.moe_align_block_size = _moe_align_block_size
    on_cpu = library.Library("sglang", "IMPL")
    on_cpu.impl("outplace_fused_experts", inspect.unwrap(call.outplace_fused_experts), "CPU")
    answer(tree, fused_moe)
