from __future__ import annotations

import numpy as np
import pytest

from sm120tune.errors import UserError
from sm120tune.measure.routing import (
    BALANCED,
    UNIFORM,
    Routing,
    parse_routing,
    tokens_per_expert,
    topk_ids,
    topk_weights,
)
from sm120tune.problem import MoEProblem

PLAIN = MoEProblem(experts=64, intermediate=32, hidden=64, topk=6, router_experts=64)
SHARED = MoEProblem(experts=65, intermediate=32, hidden=64, topk=7, router_experts=64, shared_experts=1)
PARALLEL = MoEProblem(experts=16, intermediate=32, hidden=64, topk=6, router_experts=64)
POWER = Routing("power", 1.2)
ROUTINGS = (UNIFORM, BALANCED, POWER)
PROBLEMS = (PLAIN, SHARED, PARALLEL)


@pytest.mark.parametrize("text", ["uniform", "balanced", "power:1.2", "power:1", "power:0.123456789"])
def test_text_survives_a_round_trip(text: str) -> None:
    assert str(parse_routing(text)) == text
    assert parse_routing(str(parse_routing(text))) == parse_routing(text)


@pytest.mark.parametrize("text", ["", "zipf", "Uniform", "uniform:2", "powerful", "balanced "])
def test_unknown_routing_lists_the_choices(text: str) -> None:
    with pytest.raises(UserError, match=r"uniform, balanced, power:ALPHA .* or file:PATH") as caught:
        parse_routing(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["power", "power:", "power:x", "power:0", "power:-1", "power:nan", "power:inf"])
def test_bad_alpha_is_named(text: str) -> None:
    with pytest.raises(UserError, match="ALPHA"):
        parse_routing(text)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("m", [1, 3, 200])
def test_ids_are_int32_distinct_and_in_range(problem: MoEProblem, routing: Routing, m: int) -> None:
    ids = topk_ids(problem, m, routing, seed=5)
    assert ids.dtype == np.int32
    assert ids.shape == (m, problem.topk)
    assert int(ids.min()) >= -1
    assert int(ids.max()) < problem.experts
    for row in ids.tolist():
        local = [i for i in row if i >= 0]
        assert len(set(local)) == len(local)
    assert problem.expert_parallel or int(ids.min()) >= 0


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_same_seed_same_ids_and_other_seed_or_m_others(routing: Routing) -> None:
    first = topk_ids(PLAIN, 50, routing, seed=1)
    assert np.array_equal(first, topk_ids(PLAIN, 50, routing, seed=1))
    assert not np.array_equal(first, topk_ids(PLAIN, 50, routing, seed=2))
    assert not np.array_equal(first, topk_ids(PLAIN, 51, routing, seed=1)[:50])


def test_global_generator_is_left_alone() -> None:
    np.random.seed(3)
    expected = np.random.rand(4)
    np.random.seed(3)
    topk_ids(PLAIN, 8, POWER, seed=0)
    topk_weights(PLAIN, 8, POWER, seed=0)
    assert np.array_equal(np.random.rand(4), expected)


def test_shared_expert_is_the_last_choice_of_every_token() -> None:
    two = MoEProblem(experts=66, intermediate=32, hidden=64, topk=8, router_experts=64, shared_experts=2)
    ids = topk_ids(two, 9, UNIFORM, seed=0)
    assert ids[:, -2:].tolist() == [[64, 65]] * 9
    assert int(ids[:, :-2].max()) < 64


def test_expert_parallel_keeps_a_share_and_hides_the_rest() -> None:
    ids = topk_ids(PARALLEL, 2000, UNIFORM, seed=0)
    assert float((ids >= 0).mean()) == pytest.approx(16 / 64, rel=0.05)
    assert set(ids.flatten().tolist()) == {-1, *range(16)}


@pytest.mark.parametrize("m", [1, 5, 10, 11, 300])
def test_balanced_touches_as_many_as_it_can_evenly(m: int) -> None:
    counts = tokens_per_expert(PLAIN, m, BALANCED)
    assert np.count_nonzero(counts) == min(6 * m, 64)
    assert counts.max() - counts[counts > 0].min() <= 1
    assert counts.sum() == 6 * m


@pytest.mark.parametrize("m", [1, 2, 7, 100])
def test_balanced_gives_every_rank_its_share(m: int) -> None:
    counts = tokens_per_expert(PARALLEL, m, BALANCED)
    assert abs(counts.sum() - 6 * m / 4) < 1
    assert counts.sum() >= 1
    assert counts.max() - counts.min() <= 1


def test_balanced_gives_this_rank_the_first_row() -> None:
    lonely = MoEProblem(experts=1, intermediate=32, hidden=64, topk=1, router_experts=64)
    assert tokens_per_expert(lonely, 1, BALANCED).tolist() == [1]
    assert tokens_per_expert(lonely, 64, BALANCED).tolist() == [1]
    assert tokens_per_expert(lonely, 65, BALANCED).tolist() == [2]


def test_power_is_skewed_by_alpha_and_keeps_its_favourites() -> None:
    mild, steep = (tokens_per_expert(PLAIN, 2000, Routing("power", a)) for a in (0.3, 1.5))
    uniform = tokens_per_expert(PLAIN, 2000, UNIFORM)
    assert uniform.max() < mild.max() < steep.max()
    assert uniform.min() > mild.min() > steep.min()
    other_m = tokens_per_expert(PLAIN, 1500, Routing("power", 1.5))
    assert set(np.argsort(steep)[-3:]) == set(np.argsort(other_m)[-3:])
    other_seed = tokens_per_expert(PLAIN, 2000, Routing("power", 1.5), 1)
    assert set(np.argsort(steep)[-3:]) != set(np.argsort(other_seed)[-3:])


def test_first_choice_follows_the_power_law() -> None:
    one = MoEProblem(experts=16, intermediate=32, hidden=64, topk=1, router_experts=16)
    counts = np.sort(tokens_per_expert(one, 20000, Routing("power", 1.0)))[::-1]
    law = 1 / np.arange(1, 17)
    np.testing.assert_allclose(counts[:8] / counts.sum(), (law / law.sum())[:8], rtol=0.08)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_weights_are_positive_and_sum_to_one_over_the_router(problem: MoEProblem, routing: Routing) -> None:
    weights = topk_weights(problem, 33, routing, seed=4)
    assert weights.dtype == np.float32
    assert weights.shape == (33, problem.topk)
    assert float(weights.min()) > 0
    np.testing.assert_allclose(weights[:, : problem.routed_topk].sum(axis=1), 1, rtol=1e-6)
    assert weights[:, problem.routed_topk :].tolist() == [[1.0] * problem.shared_experts] * 33
    assert not np.array_equal(weights, topk_weights(problem, 33, routing, seed=5))


def test_counts_are_those_of_the_ids_and_read_only() -> None:
    counts = tokens_per_expert(PARALLEL, 77, POWER, 3)
    ids = topk_ids(PARALLEL, 77, POWER, 3)
    assert counts.shape == (16,)
    assert [int((ids == e).sum()) for e in range(16)] == counts.tolist()
    with pytest.raises(ValueError, match="read-only"):
        counts[0] = 1


def test_impossible_draws_are_user_errors() -> None:
    with pytest.raises(UserError, match="at least 1, not 0"):
        topk_ids(PLAIN, 0, UNIFORM, seed=0)
    with pytest.raises(UserError, match="M=1048576 tokens over 1048576 experts"):
        topk_ids(MoEProblem(2**20, 32, 64, topk=2, router_experts=2**20), 2**20, UNIFORM, seed=0)
    greedy = MoEProblem(experts=4, intermediate=32, hidden=64, topk=5, router_experts=4)
    with pytest.raises(UserError, match="cannot choose 5 of 4"):
        topk_ids(greedy, 1, UNIFORM, seed=0)


# What a routing is made of


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_ids_and_weights_are_arrays_of_numpy(problem: MoEProblem, routing: Routing) -> None:
    ids, weights = topk_ids(problem, 9, routing, 0), topk_weights(problem, 9, routing, 0)
    assert type(ids) is type(weights) is np.ndarray
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    assert ids.shape == weights.shape == (9, problem.topk)
    # A GPU's worker makes tensors of them without a copy.
    assert ids.flags.c_contiguous
    assert weights.flags.c_contiguous
