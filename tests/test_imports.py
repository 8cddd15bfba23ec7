"""What the command line imports: torch takes seconds, and only those who launch kernels need it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sm120tune


@pytest.mark.parametrize(
    ("module", "torch"),
    [
        ("sm120tune.cli.tune", False),
        ("sm120tune.cli.calibrate", False),
        ("sm120tune.cli.check", False),
        ("sm120tune.runner", False),
        ("sm120tune.measure.routing", False),
        ("sm120tune.measure.roofline", False),
        ("sm120tune.upstream.arguments", False),
        # The same question is answered the other way where the answer is known.
        ("sm120tune.measure.stored", True),
    ],
)
def test_only_what_launches_needs_torch(module: str, torch: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print('torch' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(Path(sm120tune.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{torch}\n"
