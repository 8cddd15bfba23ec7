"""Run one job from its start to the written pair."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sm120tune import __version__
from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.pool import CompilePool, VariantPool
from sm120tune.devices import LocalGPU
from sm120tune.errors import UserError
from sm120tune.job import Job
from sm120tune.measure.cost_constants import CalibratedSpec, version_for
from sm120tune.measure.gpu_lane import GpuLane
from sm120tune.measure.lane import Timer
from sm120tune.measure.memory import resident_experts, weight_copies
from sm120tune.measure.model_lane import ModelLane
from sm120tune.measure.replay import ReplayLane, ReplayPool
from sm120tune.measure.worker import WorkerSetup
from sm120tune.observer import Observer
from sm120tune.problem import MoEProblem
from sm120tune.provenance import FileProvenance
from sm120tune.runner import Runner, RunResult
from sm120tune.search.journal import Journal
from sm120tune.search_space import space_hash
from sm120tune.state import cache_root
from sm120tune.tiles import TilePair
from sm120tune.writer import Ladder, WrittenPair, existing_rows, write_ladder


@dataclass(frozen=True)
class Outcome:
    """What a finished job leaves."""

    result: RunResult
    written: WrittenPair
    seconds: float
    problems: tuple[MoEProblem, ...]
    """The layers that the pair was made for."""


@dataclass(frozen=True)
class RunOptions:
    """How to run a job, apart from what is tuned."""

    output: Path
    fresh: bool = False
    replace: bool = False
    began: float | None = None
    """``time.monotonic()`` at the start of the command; a budget counts from there."""
    workers: int | None = None
    """Compile processes; None leaves one core to each GPU's process."""


def tune(job: Job, options: RunOptions, observer: Observer) -> Outcome:
    """Tune and write; raises UserError, and KeyboardInterrupt with every finished trial in the journal."""
    begin = time.monotonic() if options.began is None else options.began
    if not options.replace:
        job = replace(job, existing=rows_to_merge((job,), options.output))
    with open_pool(job, options.workers) as pool:
        result = run_job(job, options, pool, observer)
    return write((job,), result, options, begin)


def run_job(job: Job, options: RunOptions, pool: VariantPool, observer: Observer) -> RunResult:
    """Search, settle and check one job; every finished trial is in the journal."""
    journal = Journal(cache_root() / "runs", job.identity(), fresh=options.fresh, space=space_hash(job.values))
    with open_lanes(job, observer.event) as lanes, only_first_error():
        return asyncio.run(Runner(job, pool, lanes, journal, observer, options.began).run())


def write(jobs: Sequence[Job], result: RunResult, options: RunOptions, begin: float) -> Outcome:
    """Write the pair of one job, or of several that share it."""
    written = write_ladder(options.output, _ladder(jobs, result), replace=options.replace)
    return Outcome(result, written, time.monotonic() - begin, tuple(job.problem for job in jobs))


def rows_to_merge(jobs: Sequence[Job], output: Path) -> dict[int, TilePair]:
    """Return the rows of the pair that the jobs' are merged into; raises UserError, before the work, for any other.

    Several jobs are those that share a pair.
    """
    record, names = _record(jobs, RunResult((), Counter())), jobs[0].lookup.file_names(jobs[0].problem)
    return existing_rows(output, record, names, str(jobs[0].routing))


@contextmanager
def only_first_error() -> Iterator[None]:
    """Raise the first UserError of a group instead of the group."""
    try:
        yield
    except* UserError as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[UserError]) -> UserError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, UserError)
    return error


@contextmanager
def open_pool(job: Job, workers: int | None) -> Iterator[VariantPool]:
    """Yield what compiles: that many processes (None leaves a core to each GPU's), or a recorded table."""
    workers = workers or max(1, (os.cpu_count() or 1) - len(job.gpus))
    pool: VariantPool = CompilePool(_cache(), workers) if job.table is None else ReplayPool(job.table)
    try:
        yield pool
    finally:
        pool.stop()


@contextmanager
def open_lanes(job: Job, on_event: Callable[[str], None]) -> Iterator[list[Timer]]:
    """Yield what times the job, and end it afterwards."""
    lanes = make_lanes(job, _cache(), on_event)
    try:
        yield lanes
    finally:
        for lane in lanes:
            lane.stop()


def make_lanes(job: Job, cache: CompileCache, on_event: Callable[[str], None]) -> list[Timer]:
    """Return what times the job: a lane for each GPU, or the one of a model or a recorded table."""
    if job.table is not None:
        return [ReplayLane(job.table, job.settings.seed)]
    if job.timer != "cuda":
        return [ModelLane(job.problem, job.device, job.routing)]
    return [GpuLane(f"GPU {gpu.index}", worker_setup(job, gpu, cache), on_event) for gpu in job.gpus]


def _cache() -> CompileCache:
    return CompileCache(cache_root() / "compile")


def worker_setup(job: Job, gpu: LocalGPU, cache: CompileCache) -> WorkerSetup:
    """Return what a GPU's worker needs to time the job."""
    max_m = job.largest_m
    return WorkerSetup(
        visible_device=gpu.visible_token,
        source=job.source,
        routing=job.routing,
        max_m=max_m,
        copies=weight_copies(job.problem, job.device.l2_bytes, gpu.free_bytes, max_m),
        resident=resident_experts(job.problem, job.device.l2_bytes, gpu.free_bytes, max_m),
        seed=job.settings.seed,
        triton_folder=cache.triton_folder,
    )


def _model(job: Job) -> dict[str, str]:
    """Return the cost model's version where its times stand in rows, or where it was calibrated on the card."""
    named = job.timer == "model" or isinstance(job.device, CalibratedSpec)
    return {"model": version_for(job.device)} if named else {}


def _fewer_experts(job: Job) -> dict[str, int]:
    """Return how many experts' weights were there, where memory did not suffice for all."""
    held = [resident_experts(job.problem, job.device.l2_bytes, gpu.free_bytes, job.largest_m) for gpu in job.gpus]
    return {"resident_experts": min(held)} if held and min(held) < job.problem.experts else {}


def torch_version() -> str:
    """Return the version of torch here, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def _record(jobs: Sequence[Job], result: RunResult) -> FileProvenance:
    job = jobs[0]
    return FileProvenance(
        tool_version=__version__,
        kind=job.kind,
        problem=job.problem,
        shared_with=tuple(other.problem for other in jobs[1:]),
        device={
            "name": job.device.name,
            "capability": list(job.device.capability),
            "driver": ", ".join(sorted({gpu.driver for gpu in job.gpus})) or "none",
        },
        versions={"torch": torch_version(), "triton": job.triton_version, "sglang": job.tree.version},
        kernel_source_hash=job.source_hash,
        search={
            "search": "exhaustive" if job.settings.exhaustive else "optuna",
            "trials": job.settings.trials,
            "budget_s": job.settings.budget_s,
            "seed": job.settings.seed,
            "space": job.identity()["space"],
            "gpus": len(job.gpus),
            **_model(job),
            **_fewer_experts(job),
            "seconds": {name: round(value, 1) for name, value in result.seconds.items()},
            "compiled": result.compiled,
            "timed": result.timed,
            "gpu_busy_s": round(result.busy_s, 1),
            "resumed": result.resumed,
        },
        failures=dict(result.failures),
        rows=result.rows,
    )


def _ladder(jobs: Sequence[Job], result: RunResult) -> Ladder:
    job = jobs[0]
    up_name, down_name = job.lookup.file_names(job.problem)
    rows = {row.m: row.chosen for row in result.rows}
    if not rows:
        raise UserError("no M has a pair that runs on this card; nothing was written")
    superseded = frozenset(job.batch_sizes) - set(rows) if job.settings.fewest_keys else frozenset[int]()
    return Ladder(up_name, down_name, job.triton_version, rows, _record(jobs, result), superseded)
