"""What a release's fused_moe imports from the rest of SGLang, in torch on a CPU: only its own files are the real ones.

The quantizers do what SGLang's CUDA ones do: per-token int8 is rounded, groups of int8 are cut off.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sm120tune.measure.align import align

_FP8 = torch.float8_e4m3fn


class _TopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


def install(site: Path, card: str) -> None:
    """Make ``fused_moe`` of the release under ``site`` importable in this process, on a card of that name."""
    package = site / "sglang"
    folders = [path for path in package.rglob("*") if path.is_dir() and "configs" not in path.parts]
    for folder in [package, *folders]:
        _module(".".join(folder.relative_to(site).parts)).__path__ = [str(folder)]
    for name, content in _stand_ins(package, card).items():
        _module(name).__dict__.update(content)


def _module(name: str) -> types.ModuleType:
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, sys.modules[name])
    return sys.modules[name]


def _stand_ins(package: Path, card: str) -> dict[str, dict[str, Any]]:
    server_args = types.SimpleNamespace(enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False)
    execution = types.SimpleNamespace(deterministic=server_args, moe=server_args)
    no = dict.fromkeys(
        (
            "cpu_has_amx_support", "get_bool_env_var", "is_cpu", "is_hip", "is_musa", "is_xpu", "is_sm90_supported",
            "use_intel_xpu_backend",
        ),
        _never,
    )  # fmt: skip
    activations = {"silu_and_mul": _silu_and_mul, "gelu_and_mul": _never, "gelu_tanh_and_mul": _never}
    quantizers = {
        "per_token_group_quant_fp8": _never,
        "per_token_group_quant_int8": _never,
        "scaled_fp8_quant": _scaled_fp8_quant,
        "sglang_per_token_group_quant_fp8": lambda x, group: _by_groups(x, group, _FP8, 448.0),
        "per_token_quant_int8": lambda x: _by_groups(x, x.shape[1], torch.int8, 127.0, rounded=True),
        "sglang_per_token_group_quant_int8": lambda x, group: _by_groups(x, group, torch.int8, 127.0),
    }
    triton_utils = {"get_config": lambda: None}
    sorting = {"moe_align_block_size": _moe_align_block_size}
    stand_ins: dict[str, dict[str, Any]] = {
        "sgl_kernel": {**activations, "moe_sum_reduce": _moe_sum_reduce},
        "sglang.jit_kernel.activation": activations,
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": _never},
        "sglang.kernels.ops.activation.activation": {**activations, "silu_and_mul_with_activation_rounding": _never},
        "sglang.kernels.ops.quantization.per_token_group_quant": {"per_token_group_quant": _never},
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": _never},
        "sglang.srt.distributed.device_communicators.pynccl_allocator": {"use_symmetric_memory": _no_pool},
        "sglang.srt.distributed": {"get_tp_group": lambda: _Group.of_one},
        "sglang.srt.distributed.parallel_state": {
            "init_distributed_environment": _nothing,
            "initialize_model_parallel": _Group.make,
        },
        "sglang.srt.environ": {"envs": _Off()},
        "sglang.srt.layers.dp_attention": {"is_allocation_symmetric": _never},
        "sglang.srt.layers.moe.moe_runner": {"MoeRunnerConfig": _runner_config(package)},
        "sglang.srt.layers.moe.topk": {"StandardTopKOutput": _TopKOutput},
        "sglang.srt.layers.moe.utils": {"get_moe_padding_size": lambda _aiter: 0, "get_moe_runner_backend": _never},
        "sglang.srt.runtime_context": {
            "get_exec": lambda: execution,
            "get_parallel": lambda: types.SimpleNamespace(tp_group=_Group.of_one),
        },
        "sglang.srt.server_args": {
            "ServerArgs": lambda model_path: server_args,
            "set_global_server_args_for_scheduler": _nothing,
            "get_global_server_args": lambda: server_args,
        },
        "sglang.srt.utils": {**no, "is_cuda": lambda: True, "get_device_name": lambda *_args: card},
        "sglang.srt.utils.custom_op": {"register_custom_op": lambda **_how: lambda function: function},
    }
    for folder in ("srt.layers.moe.fused_moe_triton", "srt.layers.moe.moe_runner.triton_utils"):
        stand_ins[f"sglang.{folder}"] = triton_utils
        stand_ins[f"sglang.{folder}.moe_align_block_size"] = sorting
    for folder in ("srt.layers.quantization", "kernels.ops.quantization"):
        for name in ("fp8_kernel", "int8_kernel"):
            stand_ins[f"sglang.{folder}.{name}"] = quantizers
    return stand_ins


class _Group:
    """The tensor-parallel group, which the server makes before the first call."""

    of_one: _Group | None = None

    @classmethod
    def make(cls) -> None:
        cls.of_one = cls()


class _Off:
    """Environment variables, none of which is set."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=_never)


def _never(*_args: Any, **_kwargs: Any) -> bool:
    return False


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _no_pool(group: _Group | None, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
    assert group is not None
    return contextlib.nullcontext()


def _runner_config(package: Path) -> Callable[..., Any]:
    """Return the release's own MoeRunnerConfig, from a file that imports too much."""
    file = package / "srt/layers/moe/moe_runner/base.py"
    kept: list[ast.stmt] = [
        node for node in ast.parse(file.read_text()).body
        if (isinstance(node, ast.ClassDef) and node.name == "MoeRunnerConfig")
        or (isinstance(node, ast.ImportFrom) and node.module in {"__future__", "dataclasses", "typing"})
    ]  # fmt: skip
    namespace: dict[str, Any] = {"__name__": "moe_runner_base"}
    sys.modules["moe_runner_base"] = types.ModuleType("moe_runner_base")
    exec(compile(ast.Module(body=kept, type_ignores=[]), str(file), "exec"), namespace)
    return namespace["MoeRunnerConfig"]  # type: ignore[no-any-return]


def _silu_and_mul(x: torch.Tensor, out: torch.Tensor, **_filter: Any) -> None:
    gate, up = x.float().chunk(2, dim=1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _moe_sum_reduce(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    out.copy_(x.float().sum(dim=1) * factor)


def _moe_align_block_size(ids: torch.Tensor, block_size: int, experts: int) -> tuple[torch.Tensor, ...]:
    order = align(ids, block_size, experts)
    return order.sorted_token_ids, order.expert_ids, order.num_tokens_post_padded


def _by_groups(
    x: torch.Tensor, group: int, dtype: torch.dtype, largest: float, *, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.is_contiguous()
    assert x.shape[1] % group == 0
    groups = x.float().unflatten(1, (-1, group))
    absmax = groups.abs().amax(dim=2).clamp_min(1e-10)
    codes = (groups * (largest / absmax)[..., None]).flatten(1)
    return (codes.round() if rounded else codes).to(dtype), absmax / largest


def _scaled_fp8_quant(
    x: torch.Tensor, scale: torch.Tensor | None, use_per_token_if_dynamic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None and use_per_token_if_dynamic:
        return _by_groups(x, x.shape[1], _FP8, 448.0)
    scale = (x.abs().max().float() / 448).reshape(1) if scale is None else scale
    assert scale.numel() == 1
    assert scale.dtype == torch.float32
    return (x.float() / scale).clamp(-448, 448).to(_FP8), scale
