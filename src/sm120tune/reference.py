"""A plain torch MoE layer to compare kernels with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sm120tune.accuracy import ErrorMeasure

_CHUNK_BYTES = 128 * 2**20
"""Per kind of temporary (weights, rows, float64 differences); a handful of them live at once."""

_SMALL_ROW = 1e-2
"""A reference row below this share of the rms row is compared with the rms row, not with itself."""


def reference_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the MoE layer's output ``[M, hidden]`` in ``compute_dtype``.

    The sum over a token's choices of ``weight * (silu(x @ gate.T) * (x @ up.T)) @ w2[e].T`` with gate the first and
    up the last N rows of ``w1[e]`` (SwiGLU as in Mixtral's experts). Where ``w1`` has N rows only, the inner part is
    ``relu(x @ up.T) ** 2`` (Nemotron-H's experts, which have no gate). ``hidden_states`` is ``[M, hidden]``, ``w1``
    ``[E, 2N, hidden]`` or ``[E, N, hidden]``, ``w2`` ``[E, hidden, N]``, ``topk_weights`` and ``topk_ids``
    ``[M, topk]``; a choice of -1 adds nothing. All on one device; temporaries beside the output stay below 1 GiB.
    Raises ValueError where the shapes do not fit or an id is E or more.
    """
    _check_shapes(hidden_states, w1, w2, topk_weights, topk_ids)
    (m, hidden), experts, inter, topk = hidden_states.shape, w1.shape[0], w2.shape[2], topk_ids.shape[1]
    out = torch.zeros(m, hidden, dtype=compute_dtype, device=hidden_states.device)
    flat_weights = topk_weights.flatten().to(compute_dtype)
    rows_of = _rows_by_expert(topk_ids)
    if len(rows_of) > experts:
        raise ValueError(f"topk_ids holds {len(rows_of) - 1}, but there are only {experts} experts")

    width = torch.empty((), dtype=compute_dtype).element_size()
    slice_n = max(1, _CHUNK_BYTES // (3 * hidden * width))
    slice_rows = max(1, _CHUNK_BYTES // ((2 * hidden + 4 * min(slice_n, inter)) * width))
    with _full_precision():
        for expert, rows in enumerate(rows_of):
            # Without rows nothing of the expert is read: its weights would cost the most.
            for n in range(0, inter if len(rows) else 0, slice_n):
                part = slice(n, n + slice_n)
                projections = [w[part].to(compute_dtype) for w in w1[expert].split(inter)]
                down = w2[expert, :, part].to(compute_dtype)
                for chunk in torch.split(rows, slice_rows):
                    tokens = chunk // topk
                    x = hidden_states[tokens].to(compute_dtype)
                    inner = _activated(x, projections)
                    out.index_add_(0, tokens, (inner @ down.T) * flat_weights[chunk, None])
    return out


def _activated(x: torch.Tensor, projections: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what lies between the GEMMs: SwiGLU of gate and up, or squared ReLU of up alone."""
    if len(projections) == 1:
        return torch.nn.functional.relu(x @ projections[0].T).square()
    gate, up = projections
    return torch.nn.functional.silu(x @ gate.T) * (x @ up.T)


def reference_quantized_moe(
    hidden_states: torch.Tensor,
    w1: Callable[[int], torch.Tensor],
    w2: Callable[[int], torch.Tensor],
    requantize: Callable[[torch.Tensor], torch.Tensor],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Return the output ``[M, hidden]`` in float32 of a layer whose weights are dequantized one expert at a time.

    ``w1(e)`` is float32 ``[2N, hidden]`` or ``[N, hidden]``, ``w2(e)`` ``[hidden, N]``. ``requantize`` gives back the
    ``[rows, N]`` between the GEMMs as the down GEMM sees it: rounded and quantized. The rest is as in
    :func:`reference_moe`.
    """
    (m, hidden), topk = hidden_states.shape, topk_ids.shape[1]
    out = torch.zeros(m, hidden, dtype=torch.float32, device=hidden_states.device)
    flat_weights = topk_weights.flatten().float()
    with _full_precision():
        for expert, rows in enumerate(_rows_by_expert(topk_ids)):
            if not len(rows):
                continue
            down = w2(expert)
            projections = w1(expert).split(down.shape[1])
            for chunk in torch.split(rows, max(1, _CHUNK_BYTES // (4 * (2 * hidden + 4 * down.shape[1])))):
                tokens = chunk // topk
                x = hidden_states[tokens].float()
                inner = requantize(_activated(x, projections))
                out.index_add_(0, tokens, (inner @ down.T) * flat_weights[chunk, None])
    return out


def _rows_by_expert(topk_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the routed rows of every expert up to the largest id; those of id -1 are left out."""
    flat_ids = topk_ids.flatten().long()
    order = torch.argsort(flat_ids, stable=True)
    rows: tuple[torch.Tensor, ...] = order.split(torch.bincount(flat_ids + 1).tolist())
    return rows[1:]


def measure_error(out: torch.Tensor, ref: torch.Tensor) -> ErrorMeasure:
    """Compare an output with its reference, both ``[M, columns]``, in float64.

    A row whose reference is next to nothing (a token without a local expert) is compared with the rms row of the
    whole reference instead of with itself. Raises ValueError for different shapes or a reference that is not
    finite, with which nothing can be compared.
    """
    if out.shape != ref.shape or out.dim() != 2 or out.numel() == 0:
        raise ValueError(f"need two equal [M, columns] shapes, not {list(out.shape)} and {list(ref.shape)}")
    slice_rows = max(1, _CHUNK_BYTES // (8 * out.shape[1]))
    error_parts, norm_parts, broken_parts = [], [], []
    for a, b in zip(torch.split(out, slice_rows), torch.split(ref, slice_rows), strict=True):
        wide = b.double()
        norm_parts.append(wide.square().sum(dim=1))
        error_parts.append((a.double() - wide).square().sum(dim=1))
        broken_parts.append(~torch.isfinite(a).all(dim=1))
    error2, norm2, broken = torch.cat(error_parts), torch.cat(norm_parts), torch.cat(broken_parts)
    if not bool(torch.isfinite(norm2).all()):
        raise ValueError("the reference is not finite: use smaller inputs")
    nan_rows = int(broken.sum())
    if nan_rows:
        return ErrorMeasure(math.inf, math.inf, nan_rows)
    rms2 = norm2.mean()
    scale2 = torch.where(norm2 > _SMALL_ROW**2 * rms2, norm2, rms2)
    # 0 / 0 is a right answer (all zeros expected and found), x / 0 is infinitely wrong.
    rows2 = torch.where(error2 > 0, error2 / scale2, torch.zeros_like(error2))
    total2 = torch.where(error2.sum() > 0, error2.sum() / norm2.sum(), torch.zeros_like(rms2))
    return ErrorMeasure(float(total2.sqrt()), float(rows2.max().sqrt()), 0)


def _check_shapes(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> None:
    """Raise ValueError unless the shapes are those of one MoE layer."""
    if x.dim() == 2 and w1.dim() == 3 and w2.dim() == 3 and ids.dim() == 2:
        experts, hidden, inter = w2.shape
        if (
            x.shape[1] == hidden
            and w1.shape in ((experts, 2 * inter, hidden), (experts, inter, hidden))
            and ids.shape == weights.shape
            and ids.shape[0] == x.shape[0]
        ):
            return
    raise ValueError(
        f"shapes do not fit: hidden_states {list(x.shape)}, w1 {list(w1.shape)}, w2 {list(w2.shape)}, "
        f"topk_weights {list(weights.shape)}, topk_ids {list(ids.shape)}"
    )


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Keep CUDA's fp32 matmuls from rounding their operands to TF32 (10 bits) meanwhile."""
    # torch 2.9 added a switch per backend; the old one, kept in step, cannot be read where the two disagree.
    backends: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    switches = [(backend, backend.fp32_precision) for backend in backends if hasattr(backend, "fp32_precision")]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for backend, value in switches:
            backend.fp32_precision = value
