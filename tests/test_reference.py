from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sm120tune import reference
from sm120tune.accuracy import ErrorMeasure, error_bound, is_correct
from sm120tune.errors import UserError
from sm120tune.measure.routing import UNIFORM, Routing, topk_ids, topk_weights
from sm120tune.problem import MoEProblem
from sm120tune.reference import measure_error, reference_moe

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def layer(problem: MoEProblem, m: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, generator=generator)
        return (values / float(shape[-1] ** 0.5)).to(dtype)

    e, n, hidden = problem.experts, problem.intermediate, problem.hidden
    x = torch.randn(m, hidden, generator=generator).to(dtype)
    weights = torch.from_numpy(topk_weights(problem, m, UNIFORM, seed))
    return (
        x,
        normal(e, 2 * n if problem.gated else n, hidden),
        normal(e, hidden, n),
        weights,
        torch.from_numpy(topk_ids(problem, m, UNIFORM, seed)),
    )


def dense(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    """Every expert for every token in float64, then the choices picked out by a one-hot matrix."""
    n = w2.shape[2]
    both = torch.einsum("mh,enh->emn", x.double(), w1.double())
    gate, up = both[..., :n], both[..., n:]
    inner = gate / (1 + torch.exp(-gate)) * up if up.numel() else torch.where(gate > 0, gate * gate, 0.0)
    every = torch.einsum("emn,ehn->emh", inner, w2.double())
    share = torch.zeros(x.shape[0], w1.shape[0] + 1, dtype=torch.float64)
    share.scatter_add_(1, torch.where(ids < 0, w1.shape[0], ids).long(), weights.double())
    return torch.einsum("me,emh->mh", share[:, :-1], every)


def rounded(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    """Each choice by itself with every intermediate rounded to the operands' dtype, as a real layer does it."""
    dtype, n = x.dtype, w2.shape[2]
    outs = []
    for choice in range(ids.shape[1]):
        rows = []
        for token, expert in enumerate(ids[:, choice].tolist()):
            both = (w1[expert].float() @ x[token].float()).to(dtype)
            inner = (torch.nn.functional.silu(both[:n].float()) * both[n:].float()).to(dtype)
            rows.append((w2[expert].float() @ inner.float() * weights[token, choice]).to(dtype))
        outs.append(torch.stack(rows))
    return torch.stack(outs).float().sum(dim=0).to(dtype)


PROBLEMS = [
    MoEProblem(experts=8, intermediate=24, hidden=40, topk=3, router_experts=8),
    MoEProblem(experts=9, intermediate=24, hidden=40, topk=4, router_experts=8, shared_experts=1),
    MoEProblem(experts=4, intermediate=24, hidden=40, topk=3, router_experts=16),
    MoEProblem(experts=8, intermediate=24, hidden=40, topk=3, router_experts=8, gated=False),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("m", [1, 37])
def test_matches_dense_float64(problem: MoEProblem, m: int) -> None:
    operands = layer(problem, m)
    out = reference_moe(*operands)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), dense(*operands), rtol=1e-4, atol=1e-5)
    exact = reference_moe(*operands, compute_dtype=torch.float64)
    torch.testing.assert_close(exact, dense(*operands), rtol=1e-10, atol=1e-10)


def test_small_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = layer(PROBLEMS[0], 50)
    whole = reference_moe(*operands)
    # Five columns of N and a row or two at a time.
    monkeypatch.setattr(reference, "_CHUNK_BYTES", 3 * 40 * 4 * 5)
    torch.testing.assert_close(reference_moe(*operands), whole, rtol=1e-4, atol=1e-5)
    out = whole.bfloat16()
    pieces = measure_error(out, whole)
    monkeypatch.undo()
    assert pieces == measure_error(out, whole)


def test_tokens_without_a_local_expert_are_zero() -> None:
    x, w1, w2, weights, ids = layer(PROBLEMS[0], 6)
    ids[2] = -1
    out = reference_moe(x, w1, w2, weights, ids)
    assert not out[2].any()
    assert bool(out[[0, 1, 3, 4, 5]].any(dim=1).all())


def test_an_expert_chosen_twice_counts_twice() -> None:
    x, w1, w2, _, _ = layer(PROBLEMS[0], 1)
    twice = reference_moe(x, w1, w2, torch.tensor([[0.25, 0.5]]), torch.tensor([[3, 3]]))
    once = reference_moe(x, w1, w2, torch.tensor([[0.75]]), torch.tensor([[3]]))
    torch.testing.assert_close(twice, once)


def test_matmul_precision_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        reference_moe(*layer(PROBLEMS[0], 2))
        assert torch.get_float32_matmul_precision() == "high"
        with reference._full_precision():
            assert torch.backends.cuda.matmul.allow_tf32 is False
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("position", range(5))
def test_shapes_that_do_not_fit_are_refused(position: int) -> None:
    operands = list(layer(PROBLEMS[0], 3))
    operands[position] = operands[position][:, :-1]
    with pytest.raises(ValueError, match="shapes do not fit"):
        reference_moe(*operands)


def test_an_expert_that_is_not_there_is_refused() -> None:
    x, w1, w2, weights, ids = layer(PROBLEMS[0], 3)
    ids[1, 1] = 8
    with pytest.raises(ValueError, match="topk_ids holds 8"):
        reference_moe(x, w1, w2, weights, ids)


SMALL = MoEProblem(experts=8, intermediate=128, hidden=256, topk=4, router_experts=8)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounding_every_intermediate_is_correct(name: str, dtype: torch.dtype) -> None:
    operands = layer(SMALL, 200, seed=1, dtype=dtype)
    error = measure_error(rounded(*operands), reference_moe(*operands))
    relative, worst_row = error_bound(name)
    assert is_correct(error, name)
    # The bounds keep a distance, and are not so wide that they mean nothing.
    assert relative / 8 < error.relative < relative / 2
    assert error.worst_row < worst_row / 2


def test_bf16_results_are_not_correct_fp16() -> None:
    operands = layer(SMALL, 50, dtype=torch.bfloat16)
    assert not is_correct(measure_error(rounded(*operands), reference_moe(*operands)), "fp16")


MANY = MoEProblem(experts=32, intermediate=32, hidden=64, topk=8, router_experts=32)


@pytest.fixture(scope="module")
def many() -> tuple[Layer, torch.Tensor, torch.Tensor]:
    """4096 tokens, their reference, and an output that is right but for bf16's rounding."""
    operands = layer(MANY, 4096, dtype=torch.bfloat16)
    ref = reference_moe(*operands)
    return operands, ref, ref.bfloat16()


def test_undamaged_output_is_correct(many: tuple[Layer, torch.Tensor, torch.Tensor]) -> None:
    _, ref, out = many
    assert is_correct(measure_error(out, ref), "bf16")


def test_one_corrupted_row_is_found(many: tuple[Layer, torch.Tensor, torch.Tensor]) -> None:
    _, ref, out = many
    bad = out.clone()
    bad[1234] = bad[1233]
    error = measure_error(bad, ref)
    assert not is_correct(error, "bf16")
    assert error.worst_row > 0.5


def test_a_block_of_stale_zeros_is_found(many: tuple[Layer, torch.Tensor, torch.Tensor]) -> None:
    _, ref, out = many
    bad = out.clone()
    bad[512:528, 32:48] = 0
    assert not is_correct(measure_error(bad, ref), "bf16")


@pytest.mark.parametrize("wrong", ["stale", "swapped"])
def test_one_wrong_block_of_one_expert_is_found(many: tuple[Layer, torch.Tensor, torch.Tensor], wrong: str) -> None:
    (x, w1, w2, weights, ids), ref, out = many
    tokens, columns = torch.nonzero(ids == 5, as_tuple=True)
    tokens, columns = tokens[:16], columns[:16]
    changed = ids.clone()
    changed[tokens, columns] = 6 if wrong == "swapped" else -1
    delta = reference_moe(x[tokens], w1, w2, weights[tokens], changed[tokens]) - ref[tokens]
    bad = out.clone()
    bad[tokens] = (ref[tokens] + delta).bfloat16()
    error = measure_error(bad, ref)
    # The more tokens there are, the less of it is left in the whole; a row shows all of it.
    assert error.worst_row > 10 * error.relative
    assert error.worst_row > 10 * error_bound("bf16")[1]
    assert not is_correct(error, "bf16")


@pytest.mark.parametrize("routing", [UNIFORM, Routing("power", 1.2)], ids=str)
@pytest.mark.parametrize(("experts", "topk"), [(256, 8), (512, 10), (32, 4)])
def test_any_one_choice_outweighs_the_row_bound(routing: Routing, experts: int, topk: int) -> None:
    problem = MoEProblem(experts=experts, intermediate=8, hidden=8, topk=topk, router_experts=experts)
    weights = torch.from_numpy(topk_weights(problem, 1000, routing, seed=0))
    least = weights.min(dim=1).values / weights.norm(dim=1)
    # Of 16 rows in a block the worst one decides; half of all tokens are far above the bound.
    assert float(least.median()) > 2 * error_bound("bf16")[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_counted(value: float) -> None:
    ref = torch.ones(5, 3)
    out = ref.clone()
    out[1, 2] = value
    out[4, 0] = value
    out[4, 1] = value
    error = measure_error(out, ref)
    assert error == ErrorMeasure(math.inf, math.inf, 2)
    assert not is_correct(error, "bf16")
    assert not is_correct(ErrorMeasure(0.0, 0.0, 1), "bf16")


def test_errors_by_hand() -> None:
    ref = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    out = ref + torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    error = measure_error(out, ref)
    assert error.relative == pytest.approx(1 / 125**0.5)
    assert error.worst_row == pytest.approx(1 / 5)


@pytest.mark.parametrize("nothing", [0.0, 1e-6])
def test_zero_rows_are_compared_with_the_rms_row(nothing: float) -> None:
    ref = torch.tensor([[2.0, 0.0], [nothing, 0.0], [0.0, 2.0], [2.0, 0.0]])
    assert measure_error(ref, ref) == ErrorMeasure(0.0, 0.0, 0)
    out = ref.clone()
    out[1, 0] = 0.3
    assert measure_error(out, ref).worst_row == pytest.approx(0.3 / 3**0.5, rel=1e-4)


def test_all_zero_reference() -> None:
    zeros = torch.zeros(3, 2)
    assert measure_error(zeros, zeros) == ErrorMeasure(0.0, 0.0, 0)
    assert measure_error(zeros + 1e-3, zeros) == ErrorMeasure(math.inf, math.inf, 0)


def test_huge_values_do_not_overflow_the_sums() -> None:
    ref = torch.full((4, 8), 1e30)
    assert measure_error(ref * 1.001, ref).relative == pytest.approx(1e-3, rel=1e-2)


def test_measure_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="shapes"):
        measure_error(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="reference is not finite"):
        measure_error(torch.zeros(1, 2), torch.tensor([[math.nan, 0.0]]))


def test_unknown_dtype_has_no_bound() -> None:
    with pytest.raises(UserError, match="bf16, fp16"):
        error_bound("fp4_w4a4")


@pytest.mark.parametrize(
    ("error", "right"),
    [
        (ErrorMeasure(0.0038, 0.006, 0), True),
        (ErrorMeasure(0.0101, 0.006, 0), False),
        (ErrorMeasure(0.0038, 0.031, 0), False),
        (ErrorMeasure(math.nan, 0.0, 0), False),
    ],
)
def test_both_bounds_count(error: ErrorMeasure, right: bool) -> None:
    assert is_correct(error, "bf16") is right
