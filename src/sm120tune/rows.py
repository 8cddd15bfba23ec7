"""Make the provenance of one row from what was decided and timed."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sm120tune.compiler.pool import VariantPool
from sm120tune.compiler.spec import within_limits
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.measure.results import GemmRequest, What, half_quartile_distance
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.search.race import Ratio
from sm120tune.tiles import TilePair
from sm120tune.upstream.arguments import Variant

Samples = Mapping[TilePair, tuple[float, ...]]
"""Chain times of each pair, µs, from rounds that all pairs share."""

_BELOW_FLOOR = 1.02
"""A roofline share above this is no measurement: a hot cache, or a card that is not what its name says."""


@dataclass(frozen=True)
class Decision:
    """What one M got, and why."""

    today: TilePair | None
    chosen: TilePair
    status: RowStatus
    samples: Samples = field(default_factory=dict)
    ratio: Ratio | None = None
    """Of the chosen pair to today's, where it was decided by one."""
    error: float | None = None
    note: str = ""


def make_row(job: Job, m: int, decision: Decision) -> RowProvenance:
    """Return the row with its times, its share of the roofline and its circumstances."""
    today = decision.samples.get(decision.today, ()) if decision.today is not None else ()
    chosen = decision.samples.get(decision.chosen, ())
    floor_us, bound = job.floor(m)
    chosen_us = statistics.median(chosen) if chosen else None
    ratio = decision.ratio
    note = decision.note
    if job.timer == "cuda" and chosen_us is not None and floor_us > _BELOW_FLOOR * chosen_us:
        note = "; ".join(part for part in (note, "impossible: the time is below the card's floor") if part)
    same = bool(chosen) and decision.chosen == decision.today
    return RowProvenance(
        m=m,
        status=decision.status,
        today=decision.today,
        chosen=decision.chosen,
        today_us=statistics.median(today) if today else None,
        today_spread_us=half_quartile_distance(today) if today else None,
        chosen_us=chosen_us,
        chosen_spread_us=half_quartile_distance(chosen) if chosen else None,
        ratio=ratio.middle if ratio is not None else (1.0 if same else None),
        ratio_interval=(ratio.low, ratio.high) if ratio is not None else None,
        roofline_share=floor_us / chosen_us if chosen_us else None,
        bound=bound,
        timer=job.timer,
        measured=job.timer == "cuda" and bool(chosen),
        what=What.CHAIN.value,
        repetitions=len(chosen),
        routing=str(job.routing),
        error=decision.error,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        note=note,
    )


def not_compared(why: Failure) -> str:
    """Return the note of a row that keeps today's pair because nothing was found out of it."""
    return f"not compared: nothing is known of today's pair ({why})"


async def why_not_runnable(
    job: Job, pool: VariantPool, m: int, pair: TilePair, *, spills: bool = True, lane: Timer | None = None
) -> Failure | None:
    """Return why a binary of the pair's chain cannot run on the card, or None when all can.

    Without ``spills`` one that keeps registers in memory does not count as running. A ``lane`` that estimates, and has
    not searched this M itself, is told each GEMM's binary.
    """
    for spec in job.chain_specs(m, pair):
        outcome = within_limits(await asyncio.wrap_future(pool.submit(spec)), job.limits)
        if isinstance(outcome, Failure):
            return outcome
        if outcome.spill_bytes and not spills:
            return Failure(FailureKind.REGISTERS, f"spills {outcome.spill_bytes} B a thread")
        if lane is not None and job.timer == "model" and isinstance(spec.variant, Variant):
            lane.time_gemm(GemmRequest(m, spec.variant.gemm, spec.variant.tile), outcome)
    return None
