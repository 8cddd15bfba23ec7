"""How much memory a workload takes, and how many copies of the weights it can rotate; needs no torch."""

from __future__ import annotations

import math

from sm120tune.problem import MoEProblem

COLD_FACTOR = 4
"""A rotation touches this many times the L2 before it comes back to the same bytes."""

_MAX_COPIES = 32
"""More than a rotation's calls would never be touched."""


def weight_bytes(problem: MoEProblem) -> int:
    """Return the bytes of one copy of both weights: ``E * 3 * N * hidden`` elements."""
    return problem.experts * 3 * problem.intermediate * problem.hidden * problem.element_bytes


def activation_bytes(problem: MoEProblem, max_m: int, max_block_m: int = 256) -> int:
    """Return the bytes of all activations of one call with M tokens, padding for sorted intermediates included."""
    rows = max_m * problem.topk
    padded = rows + min(rows, problem.experts + 1) * (max_block_m - 1)
    per_row = 3 * problem.intermediate
    elements = max_m * problem.hidden + padded * per_row + rows * problem.hidden
    return elements * problem.element_bytes


def weight_copies(problem: MoEProblem, l2_bytes: int, free_bytes: int, max_m: int) -> int:
    """Return how many copies of the weights to rotate so that they outsize the L2, memory allowing."""
    one = weight_bytes(problem)
    wanted = min(_MAX_COPIES, max(1, math.ceil(COLD_FACTOR * l2_bytes / one)))
    room = int(0.8 * free_bytes) - activation_bytes(problem, max_m)
    return max(1, min(wanted, room // one))
