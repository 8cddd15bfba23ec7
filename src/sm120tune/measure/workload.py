"""One problem's tensors on one GPU, allocated once, and the launches over them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from sm120tune.measure.align import Alignment, align
from sm120tune.measure.memory import COLD_FACTOR
from sm120tune.measure.routing import Routing, topk_ids, topk_weights
from sm120tune.measure.stored import (
    Activations,
    Weights,
    compute_dtype,
    empty_activations,
    quantize_rows,
    random_weights,
)
from sm120tune.problem import Gemm, MoEProblem

_MAX_ROTATION = 32
_MIN_ROTATION_SMALL_M = 8
_SMALL_M = 64
_MIN_ROTATION = 2
_QUANTIZE_ROWS = 2**16
"""At a time, since quantizing makes copies in fp32."""


@dataclass(frozen=True)
class Route:
    """One routing of M tokens: int32 ids and float32 weights, both ``[M, topk]``."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Operands:
    """The tensors of one call: inputs, weights and the three intermediates, cut to this call's rows."""

    tokens: torch.Tensor
    """What the layer receives: bf16 or fp16."""
    hidden: Activations
    """A of the gate_up GEMM: ``tokens`` itself, or what it is quantized to."""
    w1: Weights
    w2: Weights
    gate_up_out: torch.Tensor
    activated: torch.Tensor
    """What the activation writes: bf16 or fp16."""
    down_in: Activations
    """A of the down GEMM: ``activated`` itself, or where it is quantized to."""
    down_out: torch.Tensor
    route: Route


class Workload:
    """Weights, activations and routings of one problem, for every M up to ``max_m``.

    Raises ``torch.cuda.OutOfMemoryError`` when they do not fit.
    """

    def __init__(
        self,
        problem: MoEProblem,
        routing: Routing,
        *,
        max_m: int,
        copies: int,
        seed: int,
        device: torch.device,
        resident: int | None = None,
    ) -> None:
        """Allocate; where fewer experts are ``resident``, expert e reads the weights of ``e % resident``."""
        self.problem = problem
        self.device = device
        self.routing = routing
        self.seed = seed
        self.copies = copies
        self.resident = problem.experts if resident is None else resident
        self.stored = stored = problem.quantization
        self._dtype = compute_dtype(stored)
        generator = torch.Generator(device=device).manual_seed(seed)
        e, n, k, wide = problem.experts, problem.intermediate, problem.hidden, problem.gemm(Gemm.GATE_UP).n
        self._w1 = [random_weights(stored, self.resident, wide, k, generator) for _ in range(copies)]
        self._w2 = [random_weights(stored, self.resident, k, n, generator) for _ in range(copies)]
        rows = max_m * problem.topk
        padded = rows + min(rows, e + 1) * 255
        self._tokens = self._random((max_m, k), generator)
        self._hidden = quantize_rows(self._tokens, stored)
        self._gate_up_out = torch.zeros((padded, wide), dtype=self._dtype, device=device)
        self._activated = self._random((padded, n), generator)
        self._down_in = Activations(self._activated)
        if stored.operand_bytes == 1:
            self._down_in = empty_activations(padded, n, stored, device)
            self._fill_down_in()
        self._down_out = torch.zeros((rows, k), dtype=self._dtype, device=device)
        self._routes: dict[tuple[int, int], Route] = {}
        self._alignments: dict[tuple[int, int, int], Alignment] = {}

    def rotation(self, m: int, l2_bytes: int, bytes_per_call: float) -> int:
        """Return how many different calls one graph holds, so that its bytes outsize the L2."""
        least = max(_MIN_ROTATION_SMALL_M if m <= _SMALL_M else _MIN_ROTATION, self.copies)
        wanted = math.ceil(COLD_FACTOR * l2_bytes / max(bytes_per_call, 1.0))
        return min(_MAX_ROTATION, max(least, wanted))

    def operands(self, m: int, index: int, rows: int) -> Operands:
        """Return the tensors of the ``index``-th call of a rotation; ``rows`` is the intermediate's row count."""
        copy = index % self.copies
        return Operands(
            tokens=self._tokens[:m],
            hidden=self._hidden.first(m),
            w1=self._w1[copy],
            w2=self._w2[copy],
            gate_up_out=self._gate_up_out[:rows],
            activated=self._activated[:rows],
            down_in=self._down_in.first(rows),
            down_out=self._down_out[: m * self.problem.topk],
            route=self._route(m, index),
        )

    def alignment(self, m: int, index: int, block_size_m: int) -> Alignment:
        """Return the row order of the ``index``-th routing, made once per M and BLOCK_SIZE_M."""
        key = (m, index, block_size_m)
        if key not in self._alignments:
            self._alignments[key] = self.align(self._route(m, index).ids, block_size_m)
        return self._alignments[key]

    def align(self, ids: torch.Tensor, block_size_m: int) -> Alignment:
        """Return the row order of any routing, its blocks sent to the experts whose weights are there."""
        order = align(ids, block_size_m, self.problem.experts)
        return replace(order, expert_ids=self.held(order.expert_ids))

    def held(self, experts: torch.Tensor) -> torch.Tensor:
        """Return whose weights are read for each expert; -1 stays."""
        if self.resident == self.problem.experts:
            return experts
        return torch.where(experts < 0, experts, experts % self.resident)

    def fresh(self, m: int, rows: int, seed: int) -> Operands:
        """Return a call on new random tokens and a new routing, every output filled with NaN."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        operands = self.operands(m, 0, rows)
        for output in (operands.gate_up_out, operands.activated, operands.down_out):
            output.fill_(math.nan)
        tokens = self._random((m, self.problem.hidden), generator)
        hidden = quantize_rows(tokens, self.stored)
        return replace(operands, tokens=tokens, hidden=hidden, route=self._make_route(m, seed))

    def refill(self) -> None:
        """Replace the NaN that :meth:`fresh` left: down alone is timed on ordinary numbers."""
        self._gate_up_out.zero_()
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        self._activated.normal_(generator=generator)
        if self.stored.operand_bytes == 1:
            self._fill_down_in()

    def _fill_down_in(self) -> None:
        for begin in range(0, self._activated.shape[0], _QUANTIZE_ROWS):
            rows = slice(begin, begin + _QUANTIZE_ROWS)
            made = quantize_rows(self._activated[rows], self.stored)
            self._down_in.codes[rows] = made.codes
            if made.scales is not None and self._down_in.scales is not None and made.scales.dim() == 2:
                self._down_in.scales[rows] = made.scales

    def _route(self, m: int, index: int) -> Route:
        key = (m, index)
        if key not in self._routes:
            self._routes[key] = self._make_route(m, self.seed * 1009 + index)
        return self._routes[key]

    def _make_route(self, m: int, seed: int) -> Route:
        return Route(
            torch.from_numpy(topk_ids(self.problem, m, self.routing, seed)).to(self.device),
            torch.from_numpy(topk_weights(self.problem, m, self.routing, seed)).to(self.device),
        )

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self.device).normal_(generator=generator)
