"""How much memory a workload takes, and how many copies of the weights it can rotate; needs no torch."""

from __future__ import annotations

import math

from sm120tune.problem import Gemm, MoEProblem

COLD_FACTOR = 4
"""A rotation touches this many times the L2 before it comes back to the same bytes."""

USABLE_SHARE = 0.95
"""Of the free memory; the rest is for CUDA itself and the reference's chunks."""

_COPIES_SHARE = 0.8
"""Of the free memory, what copies of the weights may fill up."""

_MAX_COPIES = 32
"""More than a rotation's calls would never be touched."""


def weight_bytes(problem: MoEProblem) -> int:
    """Return the bytes of one copy of both weights with their scales: ``E * 3 * N * hidden`` elements."""
    return sum(problem.experts * expert_bytes(problem, gemm) for gemm in Gemm)


def expert_bytes(problem: MoEProblem, gemm: Gemm) -> int:
    """Return the bytes of one expert's weight and scales."""
    shape, quantization = problem.gemm(gemm), problem.quantization
    return shape.n * shape.k * quantization.weight_bits // 8 + quantization.scale_bytes(shape.n, shape.k)


def activation_bytes(problem: MoEProblem, max_m: int, max_block_m: int = 256) -> int:
    """Return the bytes of all activations of one call with M tokens, padding for sorted intermediates included."""
    rows = max_m * problem.topk
    padded = rows + min(rows, problem.experts + 1) * (max_block_m - 1)
    outputs = padded * (problem.gemm(Gemm.GATE_UP).n + problem.intermediate) + rows * problem.hidden
    tokens = max_m * problem.hidden
    # Quantized rows lie beside what they are made from.
    codes = tokens + padded * problem.intermediate if problem.quantization.operand_bytes == 1 else 0
    return (outputs + tokens) * problem.quantization.output_bytes + codes


def least_experts(problem: MoEProblem, l2_bytes: int) -> int:
    """Return how many experts' weights have to be held for a cold cache: each GEMM's outsize the L2, or all of them."""
    least = max(math.ceil(COLD_FACTOR * l2_bytes / expert_bytes(problem, gemm)) for gemm in Gemm)
    return min(problem.experts, max(1, least))


def resident_experts(problem: MoEProblem, l2_bytes: int, free_bytes: int, max_m: int) -> int:
    """Return how many experts' weights to hold: all, or as many as fit and at least :func:`least_experts`.

    The others then read the weights of ``expert % resident``: the same blocks, the same bytes from memory, since whole
    caches lie between two reads of one weight.
    """
    fitting = _room(problem, USABLE_SHARE * free_bytes, max_m) // sum(expert_bytes(problem, gemm) for gemm in Gemm)
    return min(problem.experts, max(least_experts(problem, l2_bytes), fitting))


def needed_bytes(problem: MoEProblem, l2_bytes: int, max_m: int) -> int:
    """Return the least memory with which M tokens can be timed."""
    least = least_experts(problem, l2_bytes)
    return least * sum(expert_bytes(problem, gemm) for gemm in Gemm) + activation_bytes(problem, max_m)


def weight_copies(problem: MoEProblem, l2_bytes: int, free_bytes: int, max_m: int) -> int:
    """Return how many copies of the weights to rotate so that they outsize the L2, memory allowing."""
    one = weight_bytes(problem)
    wanted = min(_MAX_COPIES, max(1, math.ceil(COLD_FACTOR * l2_bytes / one)))
    return max(1, min(wanted, _room(problem, _COPIES_SHARE * free_bytes, max_m) // one))


def _room(problem: MoEProblem, usable_bytes: float, max_m: int) -> int:
    return max(0, int(usable_bytes) - activation_bytes(problem, max_m))
