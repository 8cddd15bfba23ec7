"""A whole calibration: choose tiles, measure them, fit, and judge the fit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sm120tune import __version__, _nvidia_smi
from sm120tune.calibrate.assess import Assessment, assess
from sm120tune.calibrate.choice import Chosen
from sm120tune.calibrate.file import Calibration, Origin
from sm120tune.calibrate.launches import Layer
from sm120tune.calibrate.measure import JOURNAL_SPACE, Clocks, Found, Measuring
from sm120tune.calibrate.refit import made
from sm120tune.job import Job
from sm120tune.measure.cost_constants import CardClass
from sm120tune.observer import Observer
from sm120tune.search.journal import Journal
from sm120tune.state import cache_root
from sm120tune.tune import RunOptions, only_first_error, open_lanes, open_pool, torch_version

_CLOCKS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Result:
    """What a calibration ends with."""

    calibration: Calibration
    assessment: Assessment
    found: Found


def calibrate(job: Job, chosen: Sequence[Chosen], start: CardClass, options: RunOptions, observer: Observer) -> Result:
    """Measure and fit; raises UserError, and KeyboardInterrupt with every finished tile in the journal."""
    journal = Journal(cache_root() / "runs", _identity(job), fresh=options.fresh, space=JOURNAL_SPACE)
    with open_pool(job, options.workers) as pool, open_lanes(job, observer.event) as lanes, only_first_error():
        measuring = Measuring(job, pool, lanes[0], journal, observer, lambda: _clocks(job))
        found = asyncio.run(measuring.run(chosen))
    assessment = assess(found.timed, Layer(job.problem, job.device, job.routing), start)
    return Result(_calibration(job, start, found, assessment), assessment, found)


def _identity(job: Job) -> Mapping[str, Any]:
    """Return what makes two calibrations one, for resuming; which tiles were asked for does not count."""
    return {**job.identity(), "space": JOURNAL_SPACE}


def _clocks(job: Job) -> Clocks | None:
    return _nvidia_smi.clocks(job.gpus[0].uuid, _CLOCKS_TIMEOUT_S) if job.gpus else None


def _calibration(job: Job, start: CardClass, found: Found, assessment: Assessment) -> Calibration:
    table = {} if job.table is None else job.table.meta
    drivers = [gpu.driver for gpu in job.gpus] or list(table.get("driver", ()))
    origin = Origin(
        tool_version=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        timer=job.timer,
        device=job.device,
        driver=", ".join(sorted(set(drivers))) or "unknown",
        clocks=found.clocks,
        versions={
            "torch": torch_version() if job.table is None else "unknown",
            "triton": job.triton_version,
            "sglang": job.tree.version if job.table is None else str(table.get("sglang", "unknown")),
        },
        kernel_source_hash=job.source_hash,
        problem=job.problem,
        routing=str(job.routing),
        seed=job.settings.seed,
    )
    return made(origin, found.timed, assessment, start)
