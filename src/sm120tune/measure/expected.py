"""What one call should give: the float32 reference over the very codes, scales and zero points that it reads."""

from __future__ import annotations

import torch

from sm120tune.measure.stored import compute_dtype, quantize_rows
from sm120tune.measure.workload import Operands
from sm120tune.reference import reference_moe, reference_quantized_moe


def expected_output(operands: Operands, ids: torch.Tensor, *, as_call: bool = False) -> torch.Tensor:
    """Return the layer's output ``[M, hidden]`` in float32, with A quantized where SGLang quantizes it.

    ``ids`` are the experts whose weights are read, ``[M, topk]``. ``as_call`` is for SGLang's own fused_moe, whose
    quantizers are not all those of the tuner's chain (:func:`sm120tune.measure.stored.quantize_rows`).
    """
    weights, stored = operands.route.weights, operands.w1.stored
    if not stored.quantized:
        return reference_moe(operands.tokens, operands.w1.codes, operands.w2.codes, weights, ids)

    def requantize(inner: torch.Tensor) -> torch.Tensor:
        return quantize_rows(inner.to(compute_dtype(stored)), stored, as_call=as_call).values()

    hidden = quantize_rows(operands.tokens, stored, as_call=True) if as_call else operands.hidden
    return reference_quantized_moe(hidden.values(), operands.w1.expert, operands.w2.expert, requantize, weights, ids)
