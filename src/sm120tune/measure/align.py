"""Group routed rows by expert and pad each group to whole blocks: what the MoE kernel takes its row order from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Alignment:
    """The row order of one launch, for one BLOCK_SIZE_M; all tensors int32 on the device of the ids."""

    sorted_token_ids: torch.Tensor
    """``[EM]``: routed rows (row-major over ``topk_ids``) grouped by expert; the value ``M * topk`` is padding."""
    expert_ids: torch.Tensor
    """``[ceil(EM / BLOCK_SIZE_M)]``: the expert of each block; -1 for other ranks' rows and for unused blocks."""
    num_tokens_post_padded: torch.Tensor
    """``[1]``: rows in use, padding included; a multiple of BLOCK_SIZE_M."""


def buffer_rows(numel: int, experts: int, block_size_m: int) -> int:
    """Return EM for ``numel`` routed rows: the formula of :meth:`MoEProblem.padded_rows`, for any row count."""
    few = numel < experts + 1
    rows = numel * block_size_m if few else numel + (experts + 1) * (block_size_m - 1)
    return -(-rows // 4) * 4


def align(topk_ids: torch.Tensor, block_size_m: int, experts: int) -> Alignment:
    """Sort the routed rows of ``topk_ids`` (integer ``[M, topk]``, -1 = not on this GPU) into blocks.

    Groups come in ascending order of expert, rows of id -1 first; each is padded to a multiple of BLOCK_SIZE_M.
    Entries past ``num_tokens_post_padded``, which SGLang leaves unspecified, are padding too. Nothing waits for
    the device. Raises ValueError for ids that are not 2-D, or a block size or number of experts below 1; ids of
    ``experts`` and above are the caller's fault and not looked for, since that would wait for the device.
    """
    if topk_ids.dim() != 2 or topk_ids.numel() == 0:
        raise ValueError(f"topk_ids must be [M, topk] with at least one row, not {list(topk_ids.shape)}")
    if block_size_m < 1 or experts < 1:
        raise ValueError(f"BLOCK_SIZE_M and experts must be at least 1, not {block_size_m} and {experts}")
    device, numel = topk_ids.device, topk_ids.numel()
    rows_total = buffer_rows(numel, experts, block_size_m)

    # Bucket 0 holds the rows of id -1, bucket e + 1 those of expert e.
    bucket = topk_ids.flatten().long() + 1
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, bucket, torch.ones_like(bucket))
    padded = (counts + block_size_m - 1) // block_size_m * block_size_m
    ends = padded.cumsum(0)

    order = torch.argsort(bucket, stable=True)
    ordered_bucket = bucket[order]
    first_of_bucket = counts.cumsum(0) - counts
    rank_in_bucket = torch.arange(numel, device=device) - first_of_bucket[ordered_bucket]
    position = (ends - padded)[ordered_bucket] + rank_in_bucket
    sorted_token_ids = torch.full((rows_total,), numel, dtype=torch.int32, device=device)
    sorted_token_ids.scatter_(0, position, order.int())

    block_starts = torch.arange(0, rows_total, block_size_m, device=device)
    # right=True steps over the empty buckets, which end where they start.
    owner = torch.searchsorted(ends, block_starts, right=True) - 1
    expert_ids = torch.where(block_starts < ends[-1], owner, -1).int()
    return Alignment(sorted_token_ids, expert_ids, ends[-1:].int())
