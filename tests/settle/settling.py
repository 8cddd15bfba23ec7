"""What the tests of settling share."""

from __future__ import annotations

import json
from collections.abc import Callable

from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.provenance import FileProvenance, RowProvenance
from sm120tune.runner import RunResult

CRASH = Failure(FailureKind.ILLEGAL_ACCESS, "out of bounds")

Run = Callable[..., RunResult]


def by_m(result: RunResult) -> dict[int, RowProvenance]:
    return {row.m: row for row in result.rows}


def check_written(job: Job, result: RunResult) -> None:
    """Check that the rows make a file: all finite, read back as written."""
    record = FileProvenance(
        "0", job.kind, job.problem, {"name": job.device.name}, {"triton": job.triton_version}, job.source_hash, {},
        dict(result.failures), result.rows,
    )  # fmt: skip
    assert FileProvenance.from_json(json.loads(record.dumps())).rows == result.rows
