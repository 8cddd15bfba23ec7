"""A folder to run jobs in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runner_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for lane in bench.lanes:
        lane.stop()
