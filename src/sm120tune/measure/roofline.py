"""The least bytes and operations that an MoE layer's GEMMs need, and the time below which no kernel can finish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sm120tune.measure.memory import expert_bytes
from sm120tune.measure.routing import Routing, tokens_per_expert
from sm120tune.problem import Gemm, MoEProblem


@dataclass(frozen=True)
class Work:
    """What must be moved (bytes) and computed (floating-point operations, two per multiply-add)."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def gemm_work(problem: MoEProblem, gemm: Gemm, m: int, routing: Routing, seed: int = 0) -> Work:
    """Return one GEMM's minimum for M tokens: every operand once, no padding.

    Bytes: the matrices of the experts that got a row, the rows of A that this GPU's choices need (gate_up shares
    one row among a token's choices, down has one per choice) and all M * topk output rows, since those of other
    ranks' choices are written as zeros. Flops: ``2 * n * k`` per local row.
    """
    shape = problem.gemm(gemm)
    tokens = tokens_per_expert(problem, m, routing, seed)
    touched, local_rows = int(np.count_nonzero(tokens)), int(tokens.sum())
    rows_of_a = min(m, local_rows) if gemm is Gemm.GATE_UP else local_rows
    stored = problem.quantization
    read = touched * expert_bytes(problem, gemm) + rows_of_a * shape.k * stored.operand_bytes
    written = m * problem.topk * shape.n * stored.output_bytes
    return Work(float(read + written), 2.0 * local_rows * shape.n * shape.k)


def activation_work(problem: MoEProblem, m: int) -> Work:
    """Return the activation's traffic: M * topk rows of 2N read and of N written; its flops are not counted.

    Without a gate N are read. Where A is quantized, its rows are read once more and written in their own size.
    """
    stored = problem.quantization
    per_column = (3 if problem.gated else 2) * stored.output_bytes
    if stored.operand_bytes == 1:
        per_column += stored.output_bytes + stored.operand_bytes
    return Work(float(m * problem.topk * problem.intermediate * per_column), 0.0)


def chain_work(problem: MoEProblem, m: int, routing: Routing, seed: int = 0) -> Work:
    """Return the minimum of gate_up, activation and down run one after the other, each through memory."""
    gate_up = gemm_work(problem, Gemm.GATE_UP, m, routing, seed)
    return gate_up + activation_work(problem, m) + gemm_work(problem, Gemm.DOWN, m, routing, seed)


def floor_us(work: Work, bandwidth: float, flops_rate: float) -> tuple[float, Literal["bandwidth", "compute"]]:
    """Return the time in µs that the work takes at the card's limits, and which of them sets it.

    ``bandwidth`` in bytes/s, ``flops_rate`` in flop/s. Raises ValueError where either is not positive.
    """
    if not (bandwidth > 0 and flops_rate > 0):
        raise ValueError(f"bandwidth and flops_rate must be positive, not {bandwidth} and {flops_rate}")
    memory, compute = work.bytes / bandwidth * 1e6, work.flops / flops_rate * 1e6
    return (memory, "bandwidth") if memory >= compute else (compute, "compute")
