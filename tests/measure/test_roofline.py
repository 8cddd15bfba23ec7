from __future__ import annotations

import pytest

from sm120tune.measure.roofline import Work, activation_work, chain_work, floor_us, gemm_work
from sm120tune.measure.routing import BALANCED, UNIFORM, tokens_per_expert
from sm120tune.problem import Gemm, MoEProblem

PLAIN = MoEProblem(experts=8, intermediate=16, hidden=64, topk=2, router_experts=8)


def test_gate_up_by_hand() -> None:
    # Balanced, M=3: 6 experts of [32, 64] elements, 3 rows of 64 in, 6 rows of 32 out, 2 bytes each.
    work = gemm_work(PLAIN, Gemm.GATE_UP, 3, BALANCED)
    assert work.bytes == 2 * (6 * 32 * 64 + 3 * 64 + 6 * 32)
    assert work.flops == 2 * 6 * 32 * 64


def test_down_by_hand() -> None:
    work = gemm_work(PLAIN, Gemm.DOWN, 3, BALANCED)
    assert work.bytes == 2 * (6 * 64 * 16 + 6 * 16 + 6 * 64)
    assert work.flops == 2 * 6 * 64 * 16


def test_weights_are_counted_once_when_every_expert_is_touched() -> None:
    small, large = (gemm_work(PLAIN, Gemm.DOWN, m, BALANCED) for m in (4, 8))
    assert large.bytes - small.bytes == 2 * 8 * (16 + 64)
    assert large.flops == 2 * small.flops


def test_expert_parallel_counts_local_rows_but_writes_all() -> None:
    problem = MoEProblem(experts=2, intermediate=16, hidden=64, topk=2, router_experts=8)
    rows = int(tokens_per_expert(problem, 16, BALANCED).sum())
    assert rows == 8
    gate_up, down = (gemm_work(problem, gemm, 16, BALANCED) for gemm in Gemm)
    assert gate_up.flops == 2 * rows * 32 * 64
    assert gate_up.bytes == 2 * (2 * 32 * 64 + rows * 64 + 32 * 32)
    assert down.bytes == 2 * (2 * 64 * 16 + rows * 16 + 32 * 64)


def test_a_rank_without_rows_has_no_flops() -> None:
    problem = MoEProblem(experts=1, intermediate=16, hidden=64, topk=1, router_experts=1000)
    work = gemm_work(problem, Gemm.GATE_UP, 1, UNIFORM)
    assert tokens_per_expert(problem, 1, UNIFORM).sum() == 0
    assert work == Work(bytes=2.0 * 32, flops=0.0)


def test_shared_expert_adds_a_row_a_token() -> None:
    shared = MoEProblem(experts=9, intermediate=16, hidden=64, topk=3, router_experts=8, shared_experts=1)
    extra = gemm_work(shared, Gemm.DOWN, 5, BALANCED).flops - gemm_work(PLAIN, Gemm.DOWN, 5, BALANCED).flops
    assert extra == 2 * 5 * 64 * 16


def test_chain_is_both_gemms_and_the_activation() -> None:
    gate_up, down = (gemm_work(PLAIN, gemm, 5, UNIFORM, seed=3) for gemm in Gemm)
    activation = activation_work(PLAIN, 5)
    assert activation == Work(bytes=5 * 2 * (32 + 16) * 2.0, flops=0.0)
    chain = chain_work(PLAIN, 5, UNIFORM, seed=3)
    assert chain.bytes == gate_up.bytes + activation.bytes + down.bytes
    assert chain.flops == gate_up.flops + down.flops


def test_floor_names_the_limit() -> None:
    work = Work(bytes=2e6, flops=3e6)
    for rate, expected, limit in ((1e13, 2.0, "bandwidth"), (1e12, 3.0, "compute")):
        us, bound = floor_us(work, 1e12, rate)
        assert us == pytest.approx(expected)
        assert bound == limit


@pytest.mark.parametrize(("bandwidth", "rate"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_floor_refuses_impossible_cards(bandwidth: float, rate: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        floor_us(Work(1, 1), bandwidth, rate)
