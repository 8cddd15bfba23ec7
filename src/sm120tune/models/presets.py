"""Models that people serve, by name: the fields of their ``config.json`` that matter here, each with its source.

Nothing in here is from memory; a model without a source that can be cited is not in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COLLECTED = "ai-dynamo/aiconfigurator@095f58a5:aic-core/src/aiconfigurator_core/model_configs/"
"""Unchanged ``config.json`` files of Hugging Face checkpoints, collected under Apache-2.0."""

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class Preset:
    """One model: what its ``config.json`` says, and where that was read."""

    config: Mapping[str, Any]
    source: str


def _preset(architecture: str, source: str, fp8: bool = False, **fields: Any) -> Preset:
    quantized = {"quantization_config": _FP8} if fp8 else {}
    return Preset({"architectures": [architecture], "dtype": "bfloat16", **quantized, **fields}, source)


def _collected(architecture: str, checkpoint: str, fp8: bool = False, **fields: Any) -> Preset:
    return _preset(architecture, f"{_COLLECTED}{checkpoint.replace('/', '--')}_config.json", fp8, **fields)


def _deepseek(architecture: str, checkpoint: str, experts: int = 256) -> Preset:
    return _collected(
        architecture, checkpoint, fp8=True, hidden_size=7168, moe_intermediate_size=2048, n_routed_experts=experts,
        n_shared_experts=1, num_experts_per_tok=8,
    )  # fmt: skip


def _glm5(checkpoint: str, fp8: bool = False) -> Preset:
    return _collected(
        "GlmMoeDsaForCausalLM", checkpoint, fp8, hidden_size=6144, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8,
    )  # fmt: skip


def _glm45(source: str, hidden: int, inter: int, experts: int) -> Preset:
    return _preset(
        "Glm4MoeForCausalLM", source, hidden_size=hidden, moe_intermediate_size=inter, n_routed_experts=experts,
        n_shared_experts=1, num_experts_per_tok=8,
    )  # fmt: skip


def _qwen3(checkpoint: str, hidden: int, inter: int, experts: int = 128, fp8: bool = False) -> Preset:
    return _collected(
        "Qwen3MoeForCausalLM", checkpoint, fp8, hidden_size=hidden, moe_intermediate_size=inter, num_experts=experts,
        num_experts_per_tok=8,
    )  # fmt: skip


def _qwen35(checkpoint: str, hidden: int, inter: int, experts: int, topk: int) -> Preset:
    fields = {
        "dtype": "bfloat16", "hidden_size": hidden, "moe_intermediate_size": inter, "num_experts": experts,
        "num_experts_per_tok": topk, "shared_expert_intermediate_size": inter,
    }  # fmt: skip
    return _collected("Qwen3_5MoeForConditionalGeneration", checkpoint, text_config=fields)


def _local(architecture: str, checkpoint: str, hidden: int, inter: int, experts: int, topk: int, **more: Any) -> Preset:
    return _collected(
        architecture, checkpoint, hidden_size=hidden, intermediate_size=inter, num_local_experts=experts,
        num_experts_per_tok=topk, **more,
    )  # fmt: skip


_MXFP4 = {"quant_method": "mxfp4"}

PRESETS: dict[str, Preset] = {
    "DeepSeek-V3": _deepseek("DeepseekV3ForCausalLM", "deepseek-ai/DeepSeek-V3"),
    "DeepSeek-R1": _deepseek("DeepseekV3ForCausalLM", "deepseek-ai/DeepSeek-R1"),
    "DeepSeek-V3.2": _deepseek("DeepseekV32ForCausalLM", "deepseek-ai/DeepSeek-V3.2"),
    # Megatron arguments of the same checkpoints: --hidden-size, --moe-ffn-hidden-size, --num-experts.
    "GLM-4.5": _glm45("zyzshishui/slime@ffec5340:scripts/models/glm4.5-355B-A32B.sh", 5120, 1536, 160),
    "GLM-4.5-Air": _glm45("vllm-project/vime@b332ffc2:scripts/models/glm4.5-106B-A12B.sh", 4096, 1408, 128),
    "GLM-5": _glm5("zai-org/GLM-5"),
    "GLM-5-FP8": _glm5("zai-org/GLM-5-FP8", fp8=True),
    "GLM-5.1": _glm5("zai-org/GLM-5.1"),
    "GLM-5.1-FP8": _glm5("zai-org/GLM-5.1-FP8", fp8=True),
    "GLM-5.2": _glm5("zai-org/GLM-5.2"),
    "GLM-5.2-FP8": _glm5("zai-org/GLM-5.2-FP8", fp8=True),
    "Kimi-K2-Instruct": _deepseek("DeepseekV3ForCausalLM", "moonshotai/Kimi-K2-Instruct", 384),
    "MiniMax-M2.5": _local("MiniMaxM2ForCausalLM", "MiniMaxAI/MiniMax-M2.5", 3072, 1536, 256, 8, fp8=True),
    "MiniMax-M2.7": _local("MiniMaxM2ForCausalLM", "MiniMaxAI/MiniMax-M2.7", 3072, 1536, 256, 8, fp8=True),
    "Mixtral-8x22B": _local("MixtralForCausalLM", "mistralai/Mixtral-8x22B-v0.1", 6144, 16384, 8, 2),
    "Mixtral-8x7B": _local("MixtralForCausalLM", "mistralai/Mixtral-8x7B-v0.1", 4096, 14336, 8, 2),
    "Qwen3-235B-A22B": _qwen3("Qwen/Qwen3-235B-A22B", 4096, 1536),
    "Qwen3-235B-A22B-FP8": _qwen3("Qwen/Qwen3-235B-A22B-FP8", 4096, 1536, fp8=True),
    "Qwen3-30B-A3B": _qwen3("Qwen/Qwen3-30B-A3B", 2048, 768),
    "Qwen3-30B-A3B-FP8": _qwen3("Qwen/Qwen3-30B-A3B-FP8", 2048, 768, fp8=True),
    "Qwen3-Coder-480B-A35B": _qwen3("Qwen/Qwen3-Coder-480B-A35B-Instruct", 6144, 2560, 160),
    "Qwen3.5-122B-A10B": _qwen35("Qwen/Qwen3.5-122B-A10B", 3072, 1024, 256, 8),
    "Qwen3.5-35B-A3B": _qwen35("Qwen/Qwen3.5-35B-A3B", 2048, 512, 256, 8),
    "Qwen3.5-397B-A17B": _qwen35("Qwen/Qwen3.5-397B-A17B", 4096, 1024, 512, 10),
    "gpt-oss-120b": _local("GptOssForCausalLM", "openai/gpt-oss-120b", 2880, 2880, 128, 4, quantization_config=_MXFP4),
    "gpt-oss-20b": _local("GptOssForCausalLM", "openai/gpt-oss-20b", 2880, 2880, 32, 4, quantization_config=_MXFP4),
}


def find_preset(name: str) -> str | None:
    """Return the preset's own spelling; upper and lower case and an owner before a slash do not count."""
    wanted = name.rsplit("/", 1)[-1].lower()
    return next((preset for preset in PRESETS if preset.lower() == wanted), None)
