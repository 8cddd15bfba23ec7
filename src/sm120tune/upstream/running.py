"""SGLang's own ``fused_moe``, imported and called as its server calls it. For child processes only."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from sm120tune.problem import MoEProblem
from sm120tune.quantization import Quantization
from sm120tune.upstream.errors import UpstreamError
from sm120tune.upstream.locate import SGLangTree
from sm120tune.upstream.lookup import config_dtype

FusedMoE = Callable[..., torch.Tensor]


class StoredWeights(Protocol):
    """One GEMM's weight of all experts, as SGLang's layers hold it."""

    @property
    def codes(self) -> torch.Tensor:
        """``[E, N, K]``, int4 two to a byte along K."""

    @property
    def scales(self) -> torch.Tensor | None:
        """``[E]``, ``[E, N, 1]`` or one for each block or group; None where nothing is quantized."""

    @property
    def zeros(self) -> torch.Tensor | None:
        """Zero points of groups, one byte each, int4 two to a byte along N."""


def import_fused_moe(tree: SGLangTree, preload: Path | None = None) -> FusedMoE:
    """Return SGLang's ``fused_moe``, ready to be called outside a server.

    ``preload`` is a Python file whose ``load()`` makes the import work and returns ``(fused_moe, ...)``: for an
    environment without all of SGLang's dependencies. Raises UpstreamError with the reason of a failed import.
    """
    try:
        if preload is not None:
            return _load(preload)
        module: Any = importlib.import_module(tree.module_of(tree.fused_moe_file))
        _stand_in_for_the_server(module)
        return module.fused_moe  # type: ignore[no-any-return]
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UpstreamError(
            f"SGLang {tree.version}'s fused_moe does not import in {sys.executable}: {reason}; run this in the "
            "environment that serves, or give a Python file that makes it import with --preload"
        ) from error


def _load(preload: Path) -> FusedMoE:
    spec = importlib.util.spec_from_file_location("sm120tune_preload", preload)
    if spec is None or spec.loader is None or not preload.is_file():
        raise FileNotFoundError(f"--preload {preload}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.load()[0]  # type: ignore[no-any-return]


def _stand_in_for_the_server(module: Any) -> None:
    """Give the call what a server has set before the first one: arguments, and a tensor-parallel group of one."""
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    server_args.set_global_server_args_for_scheduler(server_args.ServerArgs(model_path="dummy"))
    # Since 0.5.18 the call asks for the group that its result would be reduced over.
    if not any(hasattr(module, name) for name in ("get_tp_group", "get_parallel")):
        return
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="nccl"
    )
    state.initialize_model_parallel()


class RunningSGLang:
    """SGLang's call for one problem, over whichever folder of configs it is told to read."""

    def __init__(self, tree: SGLangTree, problem: MoEProblem, fused_moe: FusedMoE) -> None:
        runner: Any = importlib.import_module("sglang.srt.layers.moe.moe_runner")
        topk: Any = importlib.import_module("sglang.srt.layers.moe.topk")
        self._lookup: Any = importlib.import_module(tree.module_of(tree.config_file))
        imported = str(self._lookup.__file__)
        if Path(imported).resolve() != tree.config_file.resolve():
            raise UpstreamError(f"Python imports {imported}, not {tree.config_file}; name the right tree with --sglang")
        self._version = tree.version
        self._problem = problem
        self._fused_moe = fused_moe
        self._takes = _parameters(fused_moe)
        self._topk_output = topk.StandardTopKOutput
        self._config = runner.MoeRunnerConfig(
            num_experts=problem.router_experts + problem.shared_experts,
            num_local_experts=problem.experts,
            inplace=False,
            **({} if problem.gated else {"activation": "relu2", "is_gated": False}),
        )
        self._log = _Log()
        self._lookup.logger.addHandler(self._log)
        self._lookup.logger.setLevel(logging.INFO)

    def use(self, config_dir: str | None) -> None:
        """Make the next call look its configs up anew: in a folder, or with None in SGLang's own tree."""
        self._lookup.get_moe_configs.cache_clear()
        self._log.lines.clear()
        os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)
        if config_dir is not None:
            os.environ["SGLANG_MOE_CONFIG_DIR"] = config_dir

    @property
    def said(self) -> list[str]:
        """What the lookup has logged since :meth:`use`."""
        return list(self._log.lines)

    def rows(self, *, down: bool) -> dict[int, dict[str, Any]] | None:
        """Return the rows that the lookup holds now, or None for the built-in default."""
        problem = self._problem
        block = problem.block_shape or (0, 0)
        rows: dict[int, dict[str, Any]] | None = self._lookup.get_moe_configs(
            problem.experts,
            problem.key_n,
            config_dtype(problem),
            *block,
            per_channel_quant=problem.per_channel_quant,
            down_moe=down,
        )
        return rows

    def call(
        self,
        tokens: torch.Tensor,
        w1: StoredWeights,
        w2: StoredWeights,
        weights: torch.Tensor,
        ids: torch.Tensor,
        input_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer once on ``[M, hidden]`` tokens in bf16 or fp16, which SGLang quantizes itself.

        ``input_scale`` is the checkpoint's static scale of activations, float32 ``[1]``; without one SGLang makes its
        own. Raises UpstreamError where this release's call lacks what the layer needs.
        """
        how = _quantization(self._problem.quantization, w1, w2, input_scale)
        missing = [] if self._takes is None else sorted(how.keys() - self._takes)
        if missing:
            raise UpstreamError(
                f"{self._problem.dtype} cannot be verified with SGLang {self._version}: its fused_moe does not take "
                + ", ".join(missing)
            )
        logits = torch.empty((tokens.shape[0], 1), dtype=torch.float32, device=tokens.device)
        topk_output = self._topk_output(weights, ids, logits)
        return self._fused_moe(tokens, w1.codes, w2.codes, topk_output, self._config, **how)


def _parameters(function: FusedMoE) -> frozenset[str] | None:
    """Return the names of what a function takes; None where it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


def _quantization(
    stored: Quantization, w1: StoredWeights, w2: StoredWeights, input_scale: torch.Tensor | None
) -> dict[str, Any]:
    """Return the keywords that SGLang's quantization methods pass for such a layer.

    As their ``TritonMoeQuantInfo`` has them (``fp8.py``, ``w8a8_int8.py``, ``blockwise_int8.py``, ``moe_wna16.py`` and
    ``compressed_tensors`` in ``sglang/srt/layers/quantization``, 0.5.8 to 0.5.23); what they leave alone is left out.
    """
    if not stored.quantized:
        return {}
    how: dict[str, Any] = {
        "w1_scale": w1.scales,
        "w2_scale": w2.scales,
        "w1_zp": w1.zeros,
        "w2_zp": w2.zeros,
        "a1_scale": input_scale,
        "a2_scale": input_scale,
        "block_shape": list(stored.block_shape) if stored.block_shape is not None else None,
    }
    flags = {f"use_{stored.dtype}": True, "per_channel_quant": stored.per_channel_quant}
    return {name: value for name, value in (flags | how).items() if value is not None and value is not False}


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
