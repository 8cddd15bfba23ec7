"""Reads a checkpoint's description into the MoE layer that SGLang makes of it, and guesses nothing."""

from __future__ import annotations

from sm120tune.errors import UserError
from sm120tune.models.architectures import ARCHITECTURES, VALIDATED_CLASSES, Architecture, Fusion, Names, all_fields
from sm120tune.models.expert_format import ExpertFormat
from sm120tune.models.model import MoEModel
from sm120tune.models.quantization import (
    expert_format,
    experts_left_out,
    keeps_shared_experts_apart,
    quantization_method,
)
from sm120tune.models.reading import Checkpoint, read_checkpoint

_NUMBERS = "give --experts, --inter, --hidden and --topk instead of --model"


def load_model(source: str) -> MoEModel:
    """Read a ``config.json``, a folder that holds one, or a preset.

    Raises UserError for a damaged file, an architecture that is not known, a field that is missing or has no usable
    value, and a quantization that is not known.
    """
    checkpoint = read_checkpoint(source)
    name = checkpoint.architectures[0]
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise UserError(_unknown(checkpoint, name))
    if architecture.switch is not None and not checkpoint.text.get(architecture.switch):
        raise UserError(f"{checkpoint.source}: {architecture.switch} is not true, so {name} has no experts to tune")
    experts = _number(checkpoint, architecture.experts)
    stored, notes = _format(checkpoint)
    elsewhere = stored.served_elsewhere or _unquantized_elsewhere(checkpoint, architecture)
    return MoEModel(
        name=checkpoint.name,
        architecture=name,
        experts=experts,
        inter=_number(checkpoint, architecture.inter),
        hidden=_number(checkpoint, architecture.hidden),
        topk=_number(checkpoint, architecture.topk),
        fused_shared_experts=_fused(checkpoint, architecture, experts),
        dtype=stored.dtype,
        block_shape=stored.block_shape,
        per_channel_quant=stored.per_channel_quant,
        zero_points=stored.zero_points,
        gated=architecture.gated,
        activation=architecture.activation,
        served_elsewhere=elsewhere,
        notes=notes + (() if elsewhere else architecture.notes),
        fused_under_ep=architecture.fusion is Fusion.SAME_WIDTH,
    )


def _unknown(checkpoint: Checkpoint, name: str) -> str:
    looked_for = all_fields()
    there = [f"{field}={checkpoint.text[field]!r:.20}" for field in looked_for if field in checkpoint.text]
    return (
        f"{checkpoint.source}: architecture {name} is unknown, and what its fields mean would be a guess; looked for "
        f"{', '.join(looked_for)}, found {', '.join(there) or 'none of them'}; {_NUMBERS}"
    )


def _number(checkpoint: Checkpoint, names: Names) -> int:
    """Return the first field that has a value; a list, one entry a layer, must say the same everywhere."""
    for name in names:
        value = checkpoint.text.get(name)
        if value is None:
            continue
        values = value if isinstance(value, list) and value else [value]
        if any(type(each) is not int or each < 1 for each in values):
            raise UserError(
                f"{checkpoint.source}: {name} is {value!r:.60}, not a positive integer; a model without experts has "
                "nothing to tune"
            )
        if len(set(values)) > 1:
            raise UserError(f"{checkpoint.source}: {name} differs between layers ({value!r:.60}); {_NUMBERS}")
        return int(values[0])
    raise UserError(f"{checkpoint.source} has no {' or '.join(names)}; {_NUMBERS}")


def _format(checkpoint: Checkpoint) -> tuple[ExpertFormat, tuple[str, ...]]:
    plain, notes = _plain_dtype(checkpoint)
    # DeepSeek-V4's configs say it here; SGLang looks into the weights themselves.
    fp4 = str(checkpoint.text.get("expert_dtype", "")).lower() == "fp4"
    quantization = checkpoint.quantization
    if quantization is None and not fp4:
        return ExpertFormat(plain), notes
    stored = expert_format(checkpoint.source, quantization or {}, plain, fp4_experts=fp4)
    left_out = experts_left_out(quantization or {})
    if left_out is not None:
        notes = (f"{left_out} is not quantized: layers like it ask for the file without dtype",)
    elif stored.served_elsewhere is not None or stored.dtype != plain:
        notes = ()
    return stored, stored.notes + notes


def _plain_dtype(checkpoint: Checkpoint) -> tuple[str, tuple[str, ...]]:
    """Return what SGLang serves unquantized weights as, with ``--dtype auto``."""
    value = checkpoint.dtype()
    if value in ("bfloat16", "bf16"):
        return "bf16", ()
    if value in ("float16", "half"):
        return "fp16", ()
    if value not in (None, "float32", "float"):
        raise UserError(f"{checkpoint.source}: dtype {value} is unknown; known: bfloat16, float16, float32")
    gemma = str(checkpoint.text.get("model_type", "")).startswith("gemma")
    served = "bf16" if gemma else "fp16"
    return served, (f"the config says dtype {value}: SGLang serves it as {served} unless --dtype says otherwise",)


def _unquantized_elsewhere(checkpoint: Checkpoint, architecture: Architecture) -> str | None:
    quantization = checkpoint.quantization
    if quantization is None or quantization_method(quantization).startswith("modelopt"):
        return architecture.unquantized_elsewhere
    return None


def _fused(checkpoint: Checkpoint, architecture: Architecture, experts: int) -> int:
    """Return how many shared experts SGLang fuses under plain tensor parallelism."""
    text, fusion = checkpoint.text, architecture.fusion
    quantization = checkpoint.quantization or {}
    method = quantization_method(quantization) if quantization else ""
    if fusion is Fusion.SAME_WIDTH:
        width = text.get("shared_expert_intermediate_size")
        same = type(width) is int and width > 0 and width == text.get("moe_intermediate_size")
        return int(same and not keeps_shared_experts_apart(quantization))
    shared = text.get("n_shared_experts") or 0
    if type(shared) is not int:
        raise UserError(f"{checkpoint.source}: n_shared_experts is {shared!r:.60}, not a number")
    fuses = {
        Fusion.NEVER: False,
        Fusion.ALL: method != "w4afp8",
        Fusion.SINGLE: shared == 1,
        Fusion.VALIDATED: shared == 1
        and (experts == 256 or (experts == 384 and method == "quark"))
        and checkpoint.text_architecture in VALIDATED_CLASSES
        and not keeps_shared_experts_apart(quantization),
    }[fusion]
    return shared if fuses else 0
