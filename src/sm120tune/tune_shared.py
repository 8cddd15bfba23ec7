"""Run several jobs that ask for one file: each by itself, then the choice between their finalists."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from sm120tune.between import Between
from sm120tune.compiler.pool import VariantPool
from sm120tune.job import Job
from sm120tune.measure.lane import Timer, started
from sm120tune.observer import Observer
from sm120tune.provenance import RowProvenance
from sm120tune.runner import RunResult
from sm120tune.search.ladder import Gap
from sm120tune.shared import SharedChoice, with_today
from sm120tune.spread import spread
from sm120tune.tune import Outcome, RunOptions, only_first_error, open_lanes, open_pool, rows_to_merge, run_job, write


def tune_shared(jobs: Sequence[Job], options: RunOptions, observer: Observer) -> Outcome:
    """Tune jobs that share a file and write it once; raises what :func:`tune` raises.

    The GPUs hold one layer at a time: layers may be as large as for a run of their own.
    """
    begin = time.monotonic() if options.began is None else options.began
    existing = {} if options.replace else rows_to_merge(jobs, options.output)
    jobs = [replace(job, existing=existing) for job in jobs]
    with open_pool(jobs[0], options.workers) as pool:
        results = []
        for number, job in enumerate(jobs, 1):
            observer.event(f"layer {number} of {len(jobs)} that share the file: {job.problem}")
            # A budget counts from the start of the command, for the first layer alone.
            own = options if number == 1 else replace(options, began=None)
            results.append(run_job(job, own, pool, observer))
        choice = SharedChoice(jobs, [result.finalists for result in results])
        for index in range(len(jobs)):
            _on_lanes(jobs, index, "race", jobs[0].batch_sizes, partial(choice.race, index, pool=pool), observer)
        choice.choose()
        for index in range(len(jobs)):
            _on_lanes(jobs, index, "decide", choice.chosen, partial(choice.confirm, index), observer)
        rows = choice.rows()
        added: set[int] = set()
        if jobs[0].timer == "cuda":
            for index in range(len(jobs)):
                added |= _between(jobs, index, pool, rows, observer)
    rows = with_today(jobs[0], rows, added)
    for row in rows:
        if row.m in jobs[0].batch_sizes or row.m in added:
            observer.row(row)
    return write(jobs, _together(results, choice, rows), options, begin)


def _between(
    jobs: Sequence[Job], index: int, pool: VariantPool, rows: tuple[RowProvenance, ...], observer: Observer
) -> set[int]:
    """Return the M between the keys at which the rows serve one layer worse than today's pair does."""
    between = Between(jobs[index], pool, rows)

    async def check(gap: Gap, lane: Timer) -> None:
        await between.check(gap, lane)

    by_m = {gap.last_below: gap for gap in between.gaps()}
    _on_lanes(jobs, index, "between", tuple(by_m), lambda m, lane: check(by_m[m], lane), observer)
    return set(between.added)


def _on_lanes(
    jobs: Sequence[Job],
    index: int,
    phase: str,
    sizes: Sequence[int],
    work: Callable[[int, Timer], Awaitable[None]],
    observer: Observer,
) -> None:
    """Work on every M on one layer's lanes."""
    job = jobs[index]
    observer.phase(f"{phase} {index + 1}/{len(jobs)}", len(sizes))
    if not sizes:
        return

    async def step(m: int, lane: Timer) -> None:
        await work(m, lane)
        observer.advance()

    async def run(lanes: Sequence[Timer]) -> None:
        for lane in lanes:
            await started(lane, lane.prepare())
        await spread(sizes, lanes, step, cost=lambda m: 100.0 + job.floor(m)[0])

    with open_lanes(job, observer.event) as lanes, only_first_error():
        asyncio.run(run(lanes))


def _together(results: Sequence[RunResult], choice: SharedChoice, rows: tuple[RowProvenance, ...]) -> RunResult:
    """Return one result: the rows of the choice, and what all searches took."""
    seconds: Counter[str] = Counter()
    failures = Counter(choice.failures)
    for result in results:
        seconds.update(result.seconds)
        failures += result.failures
    return RunResult(
        rows=rows,
        failures=failures,
        seconds=dict(seconds),
        # The pool counts over all jobs.
        compiled=max(result.compiled for result in results),
        resumed=sum(result.resumed for result in results),
        timed=sum(result.timed for result in results),
        busy_s=sum(result.busy_s for result in results),
        missing=choice.missing,
    )
