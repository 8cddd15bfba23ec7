"""Spread work over lanes: a contiguous share for each, help for others at the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from sm120tune.measure.lane import Timer

_T = TypeVar("_T")


async def spread(
    items: Sequence[_T],
    lanes: Sequence[Timer],
    work: Callable[[_T, Timer], Awaitable[None]],
    *,
    cost: Callable[[_T], float],
    active: int = 1,
) -> None:
    """Run ``work(item, lane)`` for every item, ``active`` at a time on each lane.

    Shares are contiguous, so that neighbouring M meet on one lane and their winners seed each other early; a lane
    that is done takes from the end of the longest share. The first error ends it all and is raised in a group.
    """
    shares = [deque(share) for share in contiguous(items, [cost(item) for item in items], len(lanes))]

    async def serve(index: int) -> None:
        while True:
            own = shares[index]
            fullest = max(shares, key=len)
            if own:
                item = own.popleft()
            elif fullest:
                item = fullest.pop()
            else:
                return
            await work(item, lanes[index])

    async with asyncio.TaskGroup() as group:
        for index in range(len(lanes)):
            for _ in range(active):
                group.create_task(serve(index))


def contiguous(items: Sequence[_T], costs: Sequence[float], parts: int) -> list[list[_T]]:
    """Split the items into contiguous parts of about the same cost."""
    total = sum(costs)
    shares: list[list[_T]] = [[] for _ in range(parts)]
    done = 0.0
    for item, cost in zip(items, costs, strict=True):
        shares[min(parts - 1, int(parts * (done + cost / 2) / total))].append(item)
        done += cost
    return shares
