"""A run over one lane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import StubPool, open_journal

from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.observer import Silent
from sm120tune.runner import Runner, RunResult


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunResult]:
    def run(job: Job, lane: Timer, pool: Any = None) -> RunResult:
        journal = open_journal(tmp_path / "runs", job.identity(), fresh=True)
        runner = Runner(job, pool or StubPool(), [lane], journal, Silent())
        return asyncio.run(asyncio.wait_for(runner.run(), 120))

    return run
