"""From a checkpoint's ``quantization_config`` to the dtype of its experts, or to the kernels that serve them instead.

Read off ``sglang/srt/layers/quantization`` and ``sglang/srt/configs/model_config.py`` of SGLang 0.5.23: what
``--quantization`` and ``--moe-runner-backend`` do when nobody sets them, on NVIDIA cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sm120tune.errors import UserError
from sm120tune.models.compressed_tensors import compressed_tensors_format
from sm120tune.models.expert_format import FP4, MARLIN, ExpertFormat, block_shape_of, group_shape_of

_ELSEWHERE = {
    "auto-round": MARLIN,
    "awq": MARLIN,
    "awq_marlin": MARLIN,
    "gguf": "the GGUF MoE kernels",
    "gptq": MARLIN,
    "gptq_marlin": MARLIN,
    "modelopt_fp4": FP4,
    "mxfp4": "FlashInfer's MXFP4 kernels (SM120, SM100) or the triton_kernels package",
    "mxfp8": "FlashInfer's TRT-LLM MXFP8 kernel",
    "petit_nvfp4": "the Petit FP4 kernels",
    "w4afp8": "the CUTLASS W4A8 kernel",
}
"""Quantization methods whose experts SGLang's Triton kernel never sees."""

_CHANNEL_WISE = {"w8a8_fp8": "fp8_w8a8", "w8a8_int8": "int8_w8a8"}
_INTEGER_BITS = {"4": "int4_w4a16", "8": "int8_w8a16"}
KNOWN_METHODS = (
    *_ELSEWHERE, *_CHANNEL_WISE, "bitsandbytes", "blockwise_int8", "compressed-tensors", "fp8", "modelopt",
    "modelopt_fp8", "modelopt_mixed", "quark",
)  # fmt: skip


def expert_format(source: str, config: Mapping[str, Any], plain: str, *, fp4_experts: bool) -> ExpertFormat:
    """Return how the routed experts are stored; ``plain`` is the dtype of unquantized weights.

    ``fp4_experts`` says that the checkpoint declares FP4 experts outside of its quantization_config. Raises UserError
    for a method that is not known.
    """
    method = quantization_method(config)
    if str(config.get("moe_quant_algo", "")).upper() == "NVFP4":
        return ExpertFormat(plain, served_elsewhere=FP4)
    declared = str(config.get("routed_experts_quant_method") or config.get("store_dtype") or "").lower()
    if fp4_experts or declared == "mxfp4":
        return ExpertFormat(plain, served_elsewhere=_ELSEWHERE["mxfp4"])
    if method in _ELSEWHERE:
        # The dtype that --force tunes: that of the Triton kernel which --quantization moe_wna16 asks for.
        integer = method in ("auto-round", "awq", "awq_marlin", "gptq", "gptq_marlin")
        bits = config.get("bits", 4)
        # Bits that no kernel of SGLang's takes stay visible: they are not the plain dtype.
        other = f"int{bits}_w{bits}a16" if type(bits) is int else plain
        dtype = _INTEGER_BITS.get(str(bits), other) if integer else plain
        if dtype not in _INTEGER_BITS.values():
            return ExpertFormat(dtype, served_elsewhere=_ELSEWHERE[method])
        return ExpertFormat(
            dtype,
            group_shape_of(source, config.get("group_size")),
            zero_points=config.get("zero_point") is True or config.get("sym") is False,
            served_elsewhere=_ELSEWHERE[method],
        )
    if method in _CHANNEL_WISE:
        return ExpertFormat(_CHANNEL_WISE[method], per_channel_quant=True)
    if method == "fp8":
        return ExpertFormat("fp8_w8a8", block_shape_of(source, config.get("weight_block_size")))
    if method == "blockwise_int8":
        return ExpertFormat("int8_w8a8", block_shape_of(source, config.get("weight_block_size")))
    if method == "modelopt_fp8":
        return ExpertFormat("fp8_w8a8")
    if method == "modelopt_mixed":
        return _mixed(source, config, plain)
    if method == "compressed-tensors":
        return compressed_tensors_format(source, config, plain)
    if method == "quark":
        return _quark(source, config, plain)
    if method == "bitsandbytes":
        return ExpertFormat(plain, notes=("bitsandbytes experts are dequantized before every call of the kernel",))
    raise UserError(
        f"{source}: quantization method {method or 'without a name'} is unknown; known: {', '.join(KNOWN_METHODS)}"
    )


def quantization_method(config: Mapping[str, Any]) -> str:
    """Return SGLang's name of the method; ModelOpt's checkpoints name an algorithm instead."""
    method = str(config.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    if method not in ("", "modelopt"):
        return method
    inner = modelopt_fields(config)
    algorithm = str(inner.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION":
        nvfp4 = any("NVFP4" in algo for algo in _algorithms(inner.get("quantized_layers")))
        return "modelopt_mixed" if nvfp4 else "w4afp8"
    if "FP4" in algorithm:
        return "modelopt_fp4"
    return {"FP8": "modelopt_fp8", "MXFP8": "mxfp8"}.get(algorithm, method)


def experts_left_out(config: Mapping[str, Any]) -> str | None:
    """Return a module of routed experts that the quantization leaves out, or None."""
    inner = modelopt_fields(config)
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"):
        names = inner.get(key)
        for name in names if isinstance(names, list) else ():
            if ".experts" in str(name) and "shared_expert" not in str(name):
                return str(name)
    return None


def keeps_shared_experts_apart(config: Mapping[str, Any]) -> bool:
    """Whether shared experts are stored at another precision, so that SGLang cannot fuse them.

    ``can_fuse_shared_expert`` of ModelOpt FP4 and Quark looks for them among the modules left out.
    """
    if quantization_method(config) not in ("modelopt_fp4", "quark"):
        return False
    inner = modelopt_fields(config)
    left_out = inner.get("exclude_modules") or inner.get("ignore") or inner.get("exclude")
    return isinstance(left_out, list) and any(
        "shared_expert" in str(name) and "shared_expert_gate" not in str(name) for name in left_out
    )


def modelopt_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object that holds ModelOpt's fields: ``hf_quant_config.json`` nests it."""
    inner = config.get("quantization")
    return inner if isinstance(inner, dict) else config


def _algorithms(layers: object, part: str = "") -> set[str]:
    """Return the algorithms of ModelOpt's quantized layers, or of those whose name has ``part``."""
    if not isinstance(layers, dict):
        return set()
    return {
        str(info.get("quant_algo")).upper()
        for name, info in layers.items()
        if part in name and "shared_expert" not in name and isinstance(info, dict)
    }


def _mixed(source: str, config: Mapping[str, Any], plain: str) -> ExpertFormat:
    found = _algorithms(modelopt_fields(config).get("quantized_layers"), ".experts")
    if not found:
        return ExpertFormat(plain)
    if found == {"FP8"}:
        return ExpertFormat("fp8_w8a8")
    if found <= {"NVFP4", "W4A16_NVFP4"}:
        return ExpertFormat(plain, served_elsewhere=FP4)
    if found == {"MXFP8"}:
        return ExpertFormat(plain, served_elsewhere=_ELSEWHERE["mxfp8"])
    raise UserError(
        f"{source}: experts quantized as {', '.join(sorted(found))} are not known here; give the numbers of the layers "
        "that SGLang's Triton kernel serves with --experts, --inter and --dtype"
    )


def _quark(source: str, config: Mapping[str, Any], plain: str) -> ExpertFormat:
    whole = config.get("global_quant_config")
    weight = whole.get("weight") if isinstance(whole, dict) else None
    if "fp4" in str(weight):
        return ExpertFormat(plain, served_elsewhere="the MXFP4 kernels of Quark")
    if isinstance(weight, dict) and "fp8" in str(weight.get("dtype")):
        blocks = weight.get("qscheme") == "per_block"
        return ExpertFormat(
            "fp8_w8a8",
            block_shape_of(source, weight.get("block_size")) if blocks else None,
            per_channel_quant=weight.get("qscheme") == "per_channel",
        )
    raise UserError(f"{source}: SGLang has no MoE kernel for quark weights of {weight!r:.80}")
