"""Checkpoints of llm-compressor: ``quant_method: compressed-tensors``.

The order of the questions is that of ``CompressedTensorsConfig.get_moe_scheme``, SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sm120tune.errors import UserError
from sm120tune.models.expert_format import FP4, MARLIN, ExpertFormat, block_shape_of, group_shape_of


def compressed_tensors_format(source: str, config: Mapping[str, Any], plain: str) -> ExpertFormat:
    """Return how the experts are stored; raises UserError where the scheme is not one that SGLang has for experts."""
    weights, inputs = _scheme(source, config)
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if kind == "float" and bits == 4:
        return ExpertFormat(plain, served_elsewhere=FP4)
    if inputs is None and kind == "int" and strategy in ("channel", "group"):
        return ExpertFormat(
            "int4_w4a16" if bits == 4 else "int8_w8a16",
            group_shape_of(source, weights.get("group_size")),
            zero_points=weights.get("symmetric") is False,
            served_elsewhere=f"{MARLIN} (on SM100 the Triton kernel, when groups are of 32 or 128)",
        )
    if inputs is not None and kind == "float" and bits == 8 and strategy in ("tensor", "channel", "block"):
        block = block_shape_of(source, weights.get("block_structure")) if strategy == "block" else None
        return ExpertFormat("fp8_w8a8", block, per_channel_quant=strategy == "channel")
    if inputs is not None and kind == "int" and bits == 4 and inputs.get("type") == "float":
        return ExpertFormat(plain, served_elsewhere="the CUTLASS W4A8 kernel")
    raise UserError(
        f"{source}: SGLang has no MoE kernel for compressed-tensors weights of {bits} bits {kind} by {strategy} with "
        f"{'no ' if inputs is None else ''}quantized activations on NVIDIA cards"
    )


def _scheme(source: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the weights and activations of the group that the experts belong to."""
    groups = config.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    schemes = [(group.get("weights"), group.get("input_activations")) for group in groups if _holds_experts(group)]
    if not schemes or not isinstance(schemes[0][0], dict):
        raise UserError(f"{source}: config_groups of compressed-tensors has no weights for Linear or for experts")
    if any(scheme != schemes[0] for scheme in schemes):
        raise UserError(
            f"{source}: config_groups of compressed-tensors gives experts several schemes; give the numbers of one "
            "with --experts, --inter and --dtype"
        )
    weights, inputs = schemes[0]
    return weights, inputs if isinstance(inputs, dict) else None


def _holds_experts(group: Mapping[str, Any]) -> bool:
    targets = group.get("targets")
    return isinstance(targets, list) and any(
        target == "Linear" or ("expert" in str(target) and "shared_expert" not in str(target)) for target in targets
    )
