from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from sm120tune.accuracy import is_correct
from sm120tune.devices import known_devices
from sm120tune.measure.align import align
from sm120tune.measure.memory import (
    COLD_FACTOR,
    USABLE_SHARE,
    activation_bytes,
    expert_bytes,
    least_experts,
    needed_bytes,
    resident_experts,
    weight_bytes,
    weight_copies,
)  # fmt: skip
from sm120tune.measure.routing import BALANCED, UNIFORM, parse_routing, topk_ids, topk_weights
from sm120tune.measure.workload import Workload
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.reference import measure_error, reference_moe
from sm120tune.search_space import VALUES
from sm120tune.upstream.arguments import intermediate_rows

CPU = torch.device("cpu")
SMALL = MoEProblem(experts=8, intermediate=32, hidden=64, topk=2, router_experts=8)
SHARED = MoEProblem(experts=9, intermediate=32, hidden=64, topk=3, router_experts=8, shared_experts=1)
PARALLEL = MoEProblem(experts=4, intermediate=32, hidden=64, topk=2, router_experts=8)
PROBLEMS = {"small": SMALL, "shared": SHARED, "parallel": PARALLEL, "fp16": replace(SMALL, dtype="fp16")}
MAX_M = 40


def make(
    problem: MoEProblem = SMALL, *, max_m: int = MAX_M, copies: int = 2, seed: int = 3, resident: int | None = None
) -> Workload:
    return Workload(problem, UNIFORM, max_m=max_m, copies=copies, seed=seed, device=CPU, resident=resident)


def storages(workload: Workload, m: int) -> dict[int, int]:
    """Return the bytes of every allocation that the calls of a rotation touch, by address."""
    found: dict[int, int] = {}
    for index in range(workload.copies):
        call = workload.operands(m, index, 1)
        for tensor in (
            call.tokens, call.hidden.codes, call.w1.codes, call.w2.codes, call.gate_up_out, call.activated,
            call.down_out,
        ):  # fmt: skip
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


# Sizes


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("copies", [1, 3])
def test_the_bytes_that_are_asked_for_beforehand_are_those_allocated(problem: MoEProblem, copies: int) -> None:
    workload = make(problem, copies=copies)
    allocated = sum(storages(workload, MAX_M).values())
    assert allocated == copies * weight_bytes(problem) + activation_bytes(problem, MAX_M)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_call_of_every_tile_fits(problem: MoEProblem) -> None:
    workload = make(problem)
    for m, block_m, in_order in itertools.product((1, 2, 7, MAX_M), VALUES["BLOCK_SIZE_M"], (False, True)):
        rows = intermediate_rows(problem, m, block_m, in_order)
        call = workload.operands(m, 0, rows)
        assert call.gate_up_out.shape == (rows, 2 * problem.intermediate)
        assert call.activated.shape == (rows, problem.intermediate)
        assert call.down_out.shape == (m * problem.topk, problem.hidden)
        assert call.hidden.codes.shape == (m, problem.hidden)
        assert call.route.ids.shape == call.route.weights.shape == (m, problem.topk)


def test_weights_are_those_of_the_layer() -> None:
    call = make().operands(1, 0, 2)
    assert call.w1.codes.shape == (8, 64, 64)
    assert call.w2.codes.shape == (8, 64, 32)
    assert call.w1.codes.dtype is torch.bfloat16
    assert make(replace(SMALL, dtype="fp16")).operands(1, 0, 2).w1.codes.dtype is torch.float16


def test_copies_of_the_weights_differ_and_are_used_in_turn() -> None:
    workload = make(copies=3)
    calls = [workload.operands(4, index, 8) for index in range(6)]
    for weights in ([call.w1.codes for call in calls], [call.w2.codes for call in calls]):
        assert len({tensor.data_ptr() for tensor in weights}) == 3
        assert weights[0].data_ptr() == weights[3].data_ptr()
        assert not torch.equal(weights[0], weights[1])


def test_values_neither_grow_nor_vanish_along_the_layer() -> None:
    for problem in (SMALL, replace(SMALL, hidden=1024), replace(SMALL, intermediate=512)):
        call = make(problem, max_m=64).fresh(64, 128, 5)
        gate_up = call.hidden.codes.float() @ call.w1.codes[0].float().T
        assert 0.5 < float(gate_up.std()) < 2
        down = torch.randn(64, problem.intermediate) @ call.w2.codes[0].float().T
        assert 0.5 < float(down.std()) < 2


# Cold caches


@pytest.mark.parametrize("card", known_devices(), ids=lambda card: card.file_name)
@pytest.mark.parametrize("experts", [1, 8, 256])
@pytest.mark.parametrize("m", [1, 64, 4096])
def test_a_rotation_outsizes_the_l2(card: object, experts: int, m: int) -> None:
    l2_bytes = card.l2_bytes  # type: ignore[attr-defined]
    problem = MoEProblem(experts, intermediate=512, hidden=2048, topk=1, router_experts=experts)
    workload = make()
    most = workload.rotation(1, l2_bytes, 1.0)
    copies = workload.copies = weight_copies(problem, l2_bytes, 80 * 2**30, m)
    assert copies * weight_bytes(problem) >= COLD_FACTOR * l2_bytes or copies >= most
    per_call = min(m, experts) * weight_bytes(problem) / experts
    calls = workload.rotation(m, l2_bytes, per_call)
    assert calls * per_call >= COLD_FACTOR * l2_bytes or calls == most
    # Every copy has its turn, and even the bounded rotation of small weights is larger than the cache.
    assert calls >= min(copies, most)
    assert calls * per_call > l2_bytes


def test_a_rotation_is_bounded_and_never_of_one_call() -> None:
    workload = make()
    assert workload.rotation(4096, 2**20, 1e12) >= 2
    assert workload.rotation(1, 2**30, 0.0) <= 64
    assert workload.rotation(1, 2**27, 1e9) >= workload.rotation(4096, 2**27, 1e9)


def test_copies_shrink_to_the_memory_that_is_free() -> None:
    l2_bytes = 128 * 2**20
    one = weight_bytes(SMALL)
    counts = [weight_copies(SMALL, l2_bytes, free, 1) for free in (0, 2 * one, 10 * one, 2**40)]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] > counts[1]
    for free, count in zip((2 * one, 10 * one, 2**40), counts[1:], strict=True):
        assert count == 1 or count * one + activation_bytes(SMALL, 1) <= free
    assert weight_copies(replace(SMALL, hidden=2**20, intermediate=2**12), l2_bytes, 2**45, 1) == 1


# Routing


@pytest.mark.parametrize("routing", [UNIFORM, BALANCED, parse_routing("power:1.2")], ids=str)
def test_calls_of_a_rotation_route_differently_and_stay_as_they_are(routing: object) -> None:
    workload = Workload(SHARED, routing, max_m=MAX_M, copies=1, seed=3, device=CPU)  # type: ignore[arg-type]
    routes = [workload.operands(MAX_M, index, 120).route for index in range(4)]
    again = [workload.operands(MAX_M, index, 120).route for index in range(4)]
    for one, same in zip(routes, again, strict=True):
        assert one.ids.data_ptr() == same.ids.data_ptr()
    assert len({tuple(route.ids.flatten().tolist()) for route in routes}) == 4
    for route in routes:
        assert route.ids.dtype is torch.int32
        assert route.weights.dtype is torch.float32


def test_the_seed_decides_everything() -> None:
    one, same, other = make(seed=3), make(seed=3), make(seed=4)
    for index in range(2):
        calls = [workload.operands(8, index, 16) for workload in (one, same, other)]
        for name in ("w1", "w2", "hidden"):
            one_codes, same_codes, other_codes = (getattr(call, name).codes for call in calls)
            assert torch.equal(one_codes, same_codes)
            assert not torch.equal(one_codes, other_codes)
        assert torch.equal(calls[0].route.ids, calls[1].route.ids)
        assert not torch.equal(calls[0].route.ids, calls[2].route.ids)


def test_alignments_belong_to_their_routing_and_are_made_once() -> None:
    workload = make(PARALLEL)
    for index, block_m in itertools.product(range(3), (16, 64)):
        found = workload.alignment(MAX_M, index, block_m)
        assert found is workload.alignment(MAX_M, index, block_m)
        wanted = align(workload.operands(MAX_M, index, 80).route.ids, block_m, PARALLEL.experts)
        assert torch.equal(found.sorted_token_ids, wanted.sorted_token_ids)
        assert torch.equal(found.expert_ids, wanted.expert_ids)


# Checks on fresh data


def test_fresh_data_is_new_and_unwritten_outputs_show() -> None:
    workload = make()
    timed = workload.operands(MAX_M, 0, 80)
    hidden = timed.hidden.codes.clone()
    fresh = workload.fresh(MAX_M, 80, seed=11)
    other = workload.fresh(MAX_M, 80, seed=12)
    for output in (other.gate_up_out, other.activated, other.down_out):
        assert bool(output.isnan().all())
    assert not torch.equal(fresh.hidden.codes, hidden)
    assert not torch.equal(fresh.hidden.codes, other.hidden.codes)
    assert not torch.equal(fresh.route.ids, other.route.ids)
    assert torch.equal(fresh.route.ids, torch.from_numpy(topk_ids(SMALL, MAX_M, UNIFORM, 11)))
    assert torch.equal(fresh.route.weights, torch.from_numpy(topk_weights(SMALL, MAX_M, UNIFORM, 11)))
    # The inputs that are timed stay what they were.
    assert torch.equal(workload.operands(MAX_M, 0, 80).hidden.codes, hidden)


def test_after_a_check_no_nan_is_timed() -> None:
    workload = make()
    before = workload.operands(MAX_M, 0, 80)
    activated, ids = before.activated.clone(), before.route.ids.clone()
    workload.fresh(MAX_M, 80, seed=11)
    assert bool(before.activated.isnan().all())
    workload.refill()
    after = workload.operands(MAX_M, 0, 80)
    for tensor in (after.gate_up_out, after.activated):
        assert bool(tensor.isfinite().all())
    assert 0.9 < float(after.activated.float().std()) < 1.1
    assert activated.shape == after.activated.shape
    assert torch.equal(after.route.ids, ids)


def test_a_right_chain_passes_and_a_forgotten_row_does_not() -> None:
    # The layer in plain torch on the workload's own tensors, written to its outputs as the kernels do.
    workload = make(SHARED)
    call = workload.fresh(MAX_M, MAX_M * 3, seed=5)
    for token, choice in itertools.product(range(MAX_M), range(3)):
        row, expert = token * 3 + choice, int(call.route.ids[token, choice])
        gate, up = (call.hidden.codes[token].float() @ call.w1.codes[expert].float().T).bfloat16().float().chunk(2)
        call.activated[row] = torch.nn.functional.silu(gate) * up
        down = call.activated[row].float() @ call.w2.codes[expert].float().T
        call.down_out[row] = down * call.route.weights[token, choice]
    expected = reference_moe(call.hidden.codes, call.w1.codes, call.w2.codes, call.route.weights, call.route.ids)

    def error() -> object:
        return measure_error(call.down_out.view(MAX_M, 3, -1).float().sum(dim=1), expected)

    assert is_correct(error(), "bf16")  # type: ignore[arg-type]
    call.down_out[5, 7] = math.nan
    assert not is_correct(error(), "bf16")  # type: ignore[arg-type]
    call.down_out[5] = 0
    assert not is_correct(error(), "bf16")  # type: ignore[arg-type]


def test_fewer_resident_experts_share_weights_and_keep_the_blocks() -> None:
    few, all_of_them = make(resident=3), make()
    one, other = few.operands(MAX_M, 0, 80), all_of_them.operands(MAX_M, 0, 80)
    assert one.w1.codes.shape[0] == one.w2.codes.shape[0] == 3
    assert torch.equal(one.route.ids, other.route.ids)
    order, whole = few.alignment(MAX_M, 0, 16), all_of_them.alignment(MAX_M, 0, 16)
    assert torch.equal(order.sorted_token_ids, whole.sorted_token_ids)
    used = whole.expert_ids >= 0
    assert torch.equal(order.expert_ids[used], whole.expert_ids[used] % 3)
    assert torch.equal(order.expert_ids[~used], whole.expert_ids[~used])
    assert int(order.expert_ids.max()) == 2


@pytest.mark.parametrize("dtype", ["bf16", "fp8_w8a8"])
def test_resident_experts_are_all_that_fit_and_enough_for_a_cold_cache(dtype: str) -> None:
    problem = replace(SMALL, experts=512, router_experts=512, dtype=dtype)
    l2_bytes = 2**16
    each = sum(expert_bytes(problem, gemm) for gemm in Gemm)
    least = least_experts(problem, l2_bytes)
    assert min(least * expert_bytes(problem, gemm) for gemm in Gemm) >= COLD_FACTOR * l2_bytes
    free = [
        int((count * each + activation_bytes(problem, 64)) / USABLE_SHARE) + 1 for count in (0, 400, 511, 512, 9999)
    ]
    assert [resident_experts(problem, l2_bytes, one, 64) for one in free] == [least, 400, 511, 512, 512]
    assert needed_bytes(problem, l2_bytes, 64) == least * each + activation_bytes(problem, 64)
    assert least_experts(problem, 2**40) == 512
