"""One pair of files for several layers: a file's name does not tell hidden size, topk and routing apart.

Each layer is searched for itself. Then all layers time each other's finalists, the row with the best worst case is
taken, and every layer confirms it against today's pair on new samples.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sm120tune.accuracy import is_correct
from sm120tune.compiler.pool import VariantPool
from sm120tune.estimates import estimated_ratio, out_of_reach
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.measure.results import VerifyRequest
from sm120tune.problem import MoEProblem
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.racing import race_against, race_beside
from sm120tune.rows import Decision, Samples, make_row, not_compared, why_not_runnable
from sm120tune.search.race import Ratio
from sm120tune.tiles import TilePair

FINALISTS_OF_EACH = 3
"""Pairs that each layer enters at each M."""


@dataclass
class _View:
    """One layer's view of one M."""

    today: TilePair | None
    """None where it cannot run."""
    left: str = ""
    """Why today's pair stays without a comparison."""
    samples: dict[TilePair, tuple[float, ...]] = field(default_factory=dict)
    decided: Samples = field(default_factory=dict)
    """The winner and today's pair, on new samples."""
    ratio: Ratio | None = None
    error: float | None = None
    refused: str = ""
    """Why the winner is not for this layer."""

    def median(self, pair: TilePair) -> float:
        return statistics.median(self.samples[pair])


class SharedChoice:
    """Chooses the rows of layers that ask for one file. Each layer's part runs on that layer's lane."""

    def __init__(self, jobs: Sequence[Job], finalists: Sequence[Mapping[int, Sequence[TilePair]]]) -> None:
        """``finalists`` are those of each job's own search, best first."""
        self._jobs = jobs
        self._sizes = jobs[0].batch_sizes
        entered = {
            m: [pair for own in finalists for pair in list(own.get(m, ()))[:FINALISTS_OF_EACH]] for m in self._sizes
        }
        self._candidates = {m: tuple(dict.fromkeys(pairs)) for m, pairs in entered.items()}
        self._views: list[dict[int, _View]] = [{} for _ in jobs]
        self._winners: dict[int, TilePair] = {}
        self.failures: Counter[str] = Counter()

    async def race(self, index: int, m: int, lane: Timer, pool: VariantPool) -> None:
        """Time every candidate at M for one layer, beside today's pair."""
        job = self._jobs[index]
        spills = job.timer != "model"
        today = job.today(m).pair
        view = self._views[index][m] = _View(today)
        if today is not None:
            problem = await why_not_runnable(job, pool, m, today, lane=lane)
            if problem is not None and problem.inconclusive:
                view.left = not_compared(problem)
                return
            if problem is not None:
                view.today = today = None
        others = [pair for pair in self._candidates[m] if pair != today]
        why_not = await asyncio.gather(
            *(why_not_runnable(job, pool, m, pair, spills=spills, lane=lane) for pair in others)
        )
        entering = [pair for pair, why in zip(others, why_not, strict=True) if why is None]
        raced = await race_beside(lane, m, today, entering)
        view.samples = raced.samples
        self.failures += raced.failures
        if raced.base_failure is not None and raced.base_failure.inconclusive:
            view.left = not_compared(raced.base_failure)
        elif raced.base_failure is not None:
            view.today = None

    def choose(self) -> None:
        """Take at each M the pair whose time over the best one is lowest in the layer where it is highest.

        A pair that is slower than today's in any layer's race is no candidate. Call when every layer has raced.
        """
        for m in self._sizes:
            views = [views[m] for views in self._views]
            if self._left(m):
                continue
            common = [pair for pair in self._candidates[m] if all(_no_slower(pair, view) for view in views)]
            if common:
                best = [min(view.median(pair) for pair in view.samples) for view in views]
                self._winners[m] = min(
                    common, key=lambda pair: max(view.median(pair) / us for view, us in zip(views, best, strict=True))
                )

    @property
    def chosen(self) -> tuple[int, ...]:
        """M for which there is a pair to confirm."""
        return tuple(self._winners)

    async def confirm(self, index: int, m: int, lane: Timer) -> None:
        """Check the chosen pair's result for one layer, and time it against today's pair on new samples."""
        job, view, winner = self._jobs[index], self._views[index][m], self._winners[m]
        found = await asyncio.wrap_future(lane.verify(VerifyRequest(m, winner, job.settings.seed + 7919 * m + 2)))
        if isinstance(found, Failure):
            view.refused = found.kind.value
        elif found is not None:
            view.error = found.relative
            if not is_correct(found, job.problem.dtype):
                view.refused = FailureKind.WRONG_RESULT.value
        if view.refused or view.today is None:
            return
        if job.timer == "model":
            view.decided = {pair: view.samples[pair] for pair in (winner, view.today)}
            view.ratio = estimated_ratio(job, m, view.median(winner), view.median(view.today))
            return
        raced = await race_against(lane, m, view.today, winner)
        if isinstance(raced, Failure):
            view.refused = raced.kind.value
        else:
            view.decided, view.ratio = raced

    def rows(self) -> tuple[RowProvenance, ...]:
        """Return the whole ladder; every other row, and one that a layer did not confirm, is today's."""
        made = {m: row for m in self._sizes if (row := self._row(m)) is not None}
        kept = frozenset(self._sizes) - {m for m, row in made.items() if row.status is RowStatus.TUNED}
        for m in {key for job in self._jobs for key in job.ladder_keys(kept)} - set(made):
            note = "not tuned; today's pair cannot run" if m in self.missing else "not tuned"
            made[m] = _kept(self._jobs[0], m, note)
        return tuple(made[m] for m in sorted(made))

    @property
    def missing(self) -> tuple[int, ...]:
        """M where some layer has no pair that runs."""
        without = (m for m in self._sizes if any(view.today is None for _, view in self._each(m)))
        return tuple(m for m in without if m not in self._winners)

    def _row(self, m: int) -> RowProvenance | None:
        views = [views[m] for views in self._views]
        winner = self._winners.get(m)
        if winner is None:
            if m in self.missing:
                return None
            return self._kept_row(m, self._left(m) or "no other pair is as fast in every layer")
        refused = [f"{job.problem}: {view.refused}" for job, view in self._each(m) if view.refused]
        self.failures += Counter(view.refused for view in views if view.refused)
        compared = [(view.ratio, index) for index, view in enumerate(views) if view.ratio is not None]
        all_hold = all(ratio.middle <= 1.0 and not ratio.slower for ratio, _ in compared)
        gains = not compared or any(ratio.faster for ratio, _ in compared)
        if refused or not all_hold or not gains:
            return self._kept_row(m, "; ".join(refused) or self._ratios(m))
        # The row tells of the layer that gains least.
        worst = max(compared, key=lambda item: item[0].middle)[1] if compared else 0
        view = views[worst]
        errors = [view.error for view in views if view.error is not None]
        decision = Decision(
            today=self._jobs[worst].today(m).pair,
            chosen=winner,
            status=RowStatus.TUNED,
            samples=view.decided or view.samples,
            ratio=view.ratio,
            error=max(errors, default=None),
            note=self._ratios(m),
        )
        return make_row(self._jobs[worst], m, decision)

    def _left(self, m: int) -> str:
        """Return why today's row is left as it is whatever the others' times, or nothing."""
        for job, view in self._each(m):
            if why := view.left or out_of_reach(job, m, today_runs=view.today is not None):
                return why
        return ""

    def _kept_row(self, m: int, note: str) -> RowProvenance:
        """Return today's row with its times in the first layer's race."""
        view = self._views[0][m]
        samples = {pair: times for pair, times in view.samples.items() if pair == view.today}
        return _kept(self._jobs[0], m, note, samples)

    def _ratios(self, m: int) -> str:
        """Return every layer's ratio to today's pair in words."""
        parts = []
        for job, view in self._each(m):
            ratio = f"{view.ratio.middle:.3f}" if view.ratio is not None else "without today's pair"
            parts.append(f"{ratio} for {self._word(job.problem)}")
        return "over today: " + ", ".join(parts)

    def _word(self, problem: MoEProblem) -> str:
        """Return what tells a layer from the others of the file."""
        sizes = [(job.problem.hidden, job.problem.topk) for job in self._jobs]
        return f"hidden={problem.hidden} topk={problem.topk}" if len(set(sizes)) == len(sizes) else str(problem)

    def _each(self, m: int) -> list[tuple[Job, _View]]:
        return [(job, views[m]) for job, views in zip(self._jobs, self._views, strict=True)]


def with_today(job: Job, rows: Sequence[RowProvenance], keys: set[int]) -> tuple[RowProvenance, ...]:
    """Return the rows with today's pair at further keys: what is slower for one layer is changed for none."""
    note = "key added: a row beside it was slower than today's pair here"
    made = {row.m: row for row in rows} | {m: _kept(job, m, note) for m in keys}
    return tuple(made[m] for m in sorted(made))


def _no_slower(pair: TilePair, view: _View) -> bool:
    if pair not in view.samples or pair == view.today:
        return False
    return view.today is None or view.median(pair) <= view.median(view.today)


def _kept(job: Job, m: int, note: str, samples: Samples | None = None) -> RowProvenance:
    today = job.today(m).pair
    chosen = today if today is not None else job.lookup.builtin_pair(job.problem, m)
    return make_row(job, m, Decision(today, chosen, RowStatus.KEPT, samples or {}, note=note))
