from __future__ import annotations

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sm120tune.measure.align import align, buffer_rows
from sm120tune.problem import MoEProblem


def plain_align(ids: list[int], block: int, experts: int) -> tuple[list[int], list[int]]:
    """Rows in use and the experts of their blocks, the slow and obvious way."""
    rows: list[int] = []
    owners: list[int] = []
    for expert in range(-1, experts):
        group = [row for row, chosen in enumerate(ids) if chosen == expert]
        while len(group) % block:
            group.append(len(ids))
        rows += group
        owners += [expert] * (len(group) // block)
    return rows, owners


def check(topk_ids: torch.Tensor, block: int, experts: int) -> None:
    m, topk = topk_ids.shape
    numel = m * topk
    result = align(topk_ids, block, experts)
    rows, owners = plain_align(topk_ids.flatten().tolist(), block, experts)
    problem = MoEProblem(experts=experts, intermediate=8, hidden=8, topk=topk, router_experts=experts)
    total = problem.padded_rows(m, block)

    assert all(t.dtype == torch.int32 for t in vars(result).values())
    assert result.num_tokens_post_padded.tolist() == [len(rows)]
    assert len(rows) <= total
    assert result.sorted_token_ids.tolist() == rows + [numel] * (total - len(rows))
    blocks = -(-total // block)
    assert result.expert_ids.tolist() == owners + [-1] * (blocks - len(owners))
    # Said once more without the helper above: every row exactly once, each in a block of its own expert.
    order = result.sorted_token_ids
    assert sorted(order[order < numel].tolist()) == list(range(numel))
    for place, row in enumerate(order.tolist()):
        if row < numel:
            assert int(result.expert_ids[place // block]) == int(topk_ids.flatten()[row])


@pytest.mark.parametrize("seed", range(60))
def test_random_ids(seed: int) -> None:
    rng = random.Random(seed)
    experts, topk = rng.randint(1, 40), rng.randint(1, 6)
    m = rng.choice([1, 2, 7, 60])
    lowest = rng.choice([-1, 0])
    highest = rng.randint(0, experts - 1)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.int32, torch.int64])
    ids = torch.randint(lowest, highest + 1, (m, topk), generator=generator, dtype=dtype)
    check(ids, rng.choice([1, 16, 32, 64, 3]), experts)


@pytest.mark.parametrize("fill", [-1, 0, 7])
def test_all_rows_in_one_group(fill: int) -> None:
    check(torch.full((5, 2), fill, dtype=torch.int32), 16, 8)


def test_one_token_small_by_hand() -> None:
    result = align(torch.tensor([[2, -1, 0]], dtype=torch.int32), 2, 3)
    # 3 rows for 3 + 1 buckets: the short buffer of 3 * 2 entries, rounded up to 8.
    assert result.sorted_token_ids.tolist() == [1, 3, 2, 3, 0, 3, 3, 3]
    assert result.expert_ids.tolist() == [-1, 0, 2, -1]
    assert result.num_tokens_post_padded.tolist() == [6]


@pytest.mark.parametrize("numel_of", [(1, 1), (1, 8), (9, 1), (32, 8), (33, 8)])
@pytest.mark.parametrize("experts", [1, 8, 256])
@pytest.mark.parametrize("block", [16, 128])
def test_buffer_is_as_long_as_the_problem_says(numel_of: tuple[int, int], experts: int, block: int) -> None:
    m, topk = numel_of
    problem = MoEProblem(experts=experts, intermediate=8, hidden=8, topk=topk, router_experts=experts)
    assert buffer_rows(m * topk, experts, block) == problem.padded_rows(m, block)


def test_nothing_is_read_back_from_the_device() -> None:
    # Fake tensors hold no values: any operation that needs one on the host raises.
    with FakeTensorMode():
        result = align(torch.empty(6, 4, dtype=torch.int32), 16, 10)
        assert result.sorted_token_ids.shape == (buffer_rows(24, 10, 16),)
        with pytest.raises(Exception, match=r"item|_local_scalar_dense"):
            int(result.num_tokens_post_padded)


def test_input_is_not_changed() -> None:
    ids = torch.tensor([[1, 0], [-1, 1]], dtype=torch.int32)
    before = ids.clone()
    align(ids, 16, 2)
    assert torch.equal(ids, before)


@pytest.mark.parametrize(
    ("shape", "block", "experts", "words"),
    [((4,), 16, 2, "topk"), ((0, 2), 16, 2, "topk"), ((2, 2), 0, 2, "BLOCK_SIZE_M"), ((2, 2), 16, 0, "experts")],
)
def test_bad_arguments(shape: tuple[int, ...], block: int, experts: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        align(torch.zeros(shape, dtype=torch.int32), block, experts)
