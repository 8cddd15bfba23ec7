"""Interleaved races on one lane: several pairs beside a base, and two against each other on new samples."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sm120tune.failures import Failure
from sm120tune.measure.lane import Timer
from sm120tune.measure.results import RaceRequest
from sm120tune.search.race import LOOK_CONFIDENCE, LOOKS, Ratio, compare
from sm120tune.tiles import TilePair

RACE_ROUNDS = 9


@dataclass
class Raced:
    """What a race came to."""

    samples: dict[TilePair, tuple[float, ...]] = field(default_factory=dict)
    """Chain times, µs, of every pair that ran."""
    failures: Counter[str] = field(default_factory=Counter)
    """Pairs that did not, by kind."""
    base_failure: Failure | None = None


async def race_beside(
    lane: Timer, m: int, base: TilePair | None, pairs: Sequence[TilePair], rounds: int = RACE_ROUNDS
) -> Raced:
    """Time pairs in the same rounds as the base, where there is one; only what cannot run is lost."""
    raced = Raced()
    failure = await _together(lane, m, base, pairs, rounds, raced)
    if failure is None:
        return raced
    if pairs:
        # Someone in this race cannot run: race the base alone, then each beside it.
        failure = await _together(lane, m, base, (), rounds, raced)
    if failure is not None:
        raced.base_failure, base = failure, None
    for pair in pairs:
        failure = await _together(lane, m, base, (pair,), rounds, raced)
        if failure is not None:
            raced.failures[failure.kind.value] += 1
    return raced


async def _together(
    lane: Timer, m: int, base: TilePair | None, pairs: Sequence[TilePair], rounds: int, raced: Raced
) -> Failure | None:
    wanted = (*([base] if base is not None else []), *pairs)
    if not wanted:
        return None
    lanes = await asyncio.wrap_future(lane.race(RaceRequest(m, wanted, rounds)))
    if isinstance(lanes, Failure):
        return lanes
    raced.samples.update({one.pair: one.samples_us for one in lanes})
    return None


async def race_against(
    lane: Timer, m: int, base: TilePair, pair: TilePair
) -> tuple[dict[TilePair, tuple[float, ...]], Ratio] | Failure:
    """Time a pair against the base alone, on new samples: the winner of a race is a lucky one."""
    samples: dict[TilePair, tuple[float, ...]] = {base: (), pair: ()}
    ratio: Ratio | None = None
    for look in LOOKS:
        rounds = look - len(samples[pair])
        lanes = await asyncio.wrap_future(lane.race(RaceRequest(m, tuple(samples), rounds)))
        if isinstance(lanes, Failure):
            return lanes
        samples = {one.pair: (*samples[one.pair], *one.samples_us) for one in lanes}
        ratio = compare(samples[pair], samples[base], LOOK_CONFIDENCE)
        if ratio.settled:
            break
    assert ratio is not None
    return samples, ratio
