"""Two ladders beside each other at some M, and over a mix of M: measured interleaved, or estimated by the model."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm120tune.compiler.pool import VariantPool
from sm120tune.errors import UserError
from sm120tune.estimates import estimated_ratio
from sm120tune.failures import Failure
from sm120tune.job import Job
from sm120tune.measure.lane import Timer, started
from sm120tune.measure.results import RaceRequest
from sm120tune.rows import why_not_runnable
from sm120tune.search.race import Ratio, compare
from sm120tune.tiles import TilePair

REPEATS = 3
ROUNDS = 15

Serves = Callable[[int], tuple[TilePair | None, str]]
"""The pair that a ladder runs at M; None and the reason where it runs none."""


@dataclass(frozen=True)
class Compared:
    """One M."""

    m: int
    a: TilePair | None
    b: TilePair | None
    a_us: float | None = None
    b_us: float | None = None
    ratio: Ratio | None = None
    """A over B: below 1 A is faster."""
    problem: str = ""
    """Why there is no comparison."""

    @property
    def word(self) -> str:
        """What may be said of A: faster, slower, same, equal rows, or not compared."""
        if self.ratio is None:
            return "not compared"
        if self.a == self.b:
            return "equal rows"
        return "faster" if self.ratio.faster else "slower" if self.ratio.slower else "same"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "m": self.m,
            "a": _rows(self.a),
            "b": _rows(self.b),
            "a_us": self.a_us,
            "b_us": self.b_us,
            "ratio": self.ratio.middle if self.ratio else None,
            "ratio_interval": [self.ratio.low, self.ratio.high] if self.ratio else None,
            "verdict": self.word,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Mix:
    """How often each M is called, in shares that add up to 1."""

    shares: Mapping[int, float]

    def expected_us(self, times: Mapping[int, float | None]) -> float | None:
        """Return the mean time of a call, or None where an M of the mix has no time."""
        found = {m: times.get(m) for m in self.shares}
        if any(us is None for us in found.values()):
            return None
        return sum(share * (found[m] or 0.0) for m, share in self.shares.items())


def uniform_mix(sizes: Sequence[int]) -> Mix:
    """Return the mix in which every M is called as often."""
    return Mix({m: 1 / len(sizes) for m in sizes})


def parse_mix(text: str) -> Mix:
    """Read ``1:0.5,64:0.3``; the shares may add up to anything. Raises UserError naming the part that is wrong."""
    shares: dict[int, float] = {}
    for part in text.split(","):
        m, _, share = part.strip().partition(":")
        try:
            # Of more than 4,300 digits int raises ValueError too.
            value, size = float(share), int(m) if m.isdecimal() else 0
        except ValueError:
            value = size = 0
        if size < 1 or not 0 < value < float("inf"):
            raise UserError(
                f"--mix {part.strip()!r} is no M:SHARE with a share above 0; write for example 1:0.5,64:0.5"
            )
        if size in shares:
            raise UserError(f"--mix has M={m} twice")
        shares[size] = value
    largest = max(shares.values())
    # Divided first: the sum of two shares may be more than a float holds.
    total = sum(share / largest for share in shares.values())
    return Mix({m: shares[m] / largest / total for m in sorted(shares)})


async def compare_ladders(
    job: Job, pool: VariantPool, lane: Timer, a: Serves, b: Serves, on_row: Callable[[Compared], None]
) -> list[Compared]:
    """Compare at every M of the job; raises UserError where the lane cannot start."""
    said = lane.prepare()
    pairs = {m: (a(m), b(m)) for m in job.batch_sizes}
    ready = await asyncio.gather(*(_why_not(job, pool, lane, m, side) for m, sides in pairs.items() for side in sides))
    await started(lane, said)
    rows = []
    for index, (m, ((pair_a, _), (pair_b, _))) in enumerate(pairs.items()):
        problems = [f"{side}: {why}" for side, why in zip("AB", ready[2 * index : 2 * index + 2], strict=True) if why]
        row = Compared(m, pair_a, pair_b, problem="; ".join(problems))
        if pair_a is not None and pair_b is not None and not problems:
            row = await _race(job, lane, m, pair_a, pair_b)
        rows.append(row)
        on_row(row)
    return rows


async def _why_not(job: Job, pool: VariantPool, lane: Timer, m: int, side: tuple[TilePair | None, str]) -> str:
    """Return why a side has nothing to run, or an empty text."""
    pair, problem = side
    return problem if pair is None else str(await why_not_runnable(job, pool, m, pair, lane=lane) or "")


async def _race(job: Job, lane: Timer, m: int, a: TilePair, b: TilePair) -> Compared:
    distinct = tuple(dict.fromkeys((a, b)))
    samples: dict[TilePair, list[float]] = {pair: [] for pair in distinct}
    estimated = job.timer == "model"
    for _ in range(1 if estimated else REPEATS):
        lanes = await asyncio.wrap_future(lane.race(RaceRequest(m, distinct, ROUNDS)))
        if isinstance(lanes, Failure):
            return Compared(m, a, b, problem=str(lanes))
        for one in lanes:
            samples[one.pair] += one.samples_us
    if estimated and a != b:
        ratio = estimated_ratio(job, m, samples[a][0], samples[b][0])
    else:
        ratio = Ratio(1.0, 1.0, 1.0) if a == b else compare(samples[a], samples[b])
    return Compared(m, a, b, statistics.median(samples[a]), statistics.median(samples[b]), ratio)


def _rows(pair: TilePair | None) -> dict[str, Any] | None:
    return None if pair is None else {"gate_up": pair.gate_up.to_row(), "down": pair.down.to_row()}
