"""A release's own lookup inside a package that imports on a CPU: only the kernels, and what they take, are made up."""

from __future__ import annotations

import shutil
from pathlib import Path

from made_pairs import CARD

UTILS = "srt/layers/moe/moe_runner/triton_utils"
KERNELS = "kernels/ops/moe/fused_moe_triton_kernels.py"

SLOW_WARPS, FAST_WARPS = 4, 8
WRONG_GROUP, FAILING_STAGES = 16, 7
"""What a tile's fields do here: 4 warps take longer than 8, and two values break the call."""

_FILES = {
    "srt/utils.py": f"""
def get_device_name(*args):
    return {CARD!r}
def is_hip():
    return False
""",
    "srt/server_args.py": """
class ServerArgs:
    enable_deterministic_inference = False
    def __init__(self, model_path):
        pass
_args = None
def set_global_server_args_for_scheduler(args):
    global _args
    _args = args
def get_global_server_args():
    if _args is None:
        raise ValueError("Global server args is not set yet!")
    return _args
""",
    "srt/runtime_context.py": """
import types
from sglang.srt.server_args import get_global_server_args
def get_exec():
    return types.SimpleNamespace(deterministic=get_global_server_args())
""",
    "srt/layers/moe/moe_runner/__init__.py": """
class MoeRunnerConfig:
    def __init__(self, num_experts, num_local_experts, inplace):
        assert num_experts == num_local_experts and not inplace
""",
    "srt/layers/moe/topk.py": """
from typing import Any, NamedTuple
class StandardTopKOutput(NamedTuple):
    topk_weights: Any
    topk_ids: Any
    router_logits: Any
""",
    f"{UTILS}/__init__.py": """
def get_config():
    return None
""",
    f"{UTILS}/fused_moe.py": f"""
up_moe_use_tma = False
import torch
from sm120tune.measure.stored import Weights, compute_dtype
from sm120tune.quantization import Quantization
from sm120tune.reference import reference_moe, reference_quantized_moe
from .fused_moe_triton_config import get_config_dtype_str, try_get_optimal_moe_config
last_us = 0.0
def fused_moe(hidden, w1, w2, topk_output, config, use_int4_w4a16=False, w1_scale=None, w2_scale=None, w1_zp=None,
              w2_zp=None, block_shape=None):
    global last_us
    m = hidden.shape[0]
    dtype = get_config_dtype_str(hidden.dtype, use_int4_w4a16=use_int4_w4a16)
    up, (down, _) = try_get_optimal_moe_config(
        w1.shape, w2.shape, topk_output.topk_ids.shape[1], dtype, m, block_shape=block_shape, return_down_config=True)
    down = up if down is None else down
    rows = (up, down)
    if any(row.get("num_stages") == {FAILING_STAGES} for row in rows):
        raise RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376")
    last_us = sum(40.0 if row.get("num_warps", 4) == {FAST_WARPS} else 50.0 for row in rows)
    if dtype is None:
        out = reference_moe(hidden, w1, w2, topk_output.topk_weights, topk_output.topk_ids)
    else:
        stored = Quantization(dtype, tuple(block_shape), zero_points=w1_zp is not None)
        first, second = Weights(stored, w1, w1_scale, w1_zp), Weights(stored, w2, w2_scale, w2_zp)
        rounded = lambda inner: inner.to(compute_dtype(stored)).float()
        out = reference_quantized_moe(
            hidden, first.expert, second.expert, rounded, topk_output.topk_weights, topk_output.topk_ids)
    out = out.to(hidden.dtype)
    return out * 1.5 if any(row["GROUP_SIZE_M"] == {WRONG_GROUP} for row in rows) else out
""",
}


def importable_copy(tree: Path, into: Path) -> Path:
    """Return a folder like site-packages with such a package; its config tree is empty."""
    package = into / "site-packages" / "sglang"
    for name in ("_version.py", KERNELS, f"{UTILS}/fused_moe_triton_config.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / "sglang" / name, package / name)
    (package / "__init__.py").write_text("")
    for name, text in _FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (package / UTILS / "configs").mkdir()
    return package.parent
