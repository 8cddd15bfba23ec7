"""A machine with the card and an SGLang that imports, as far as a CPU can be one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from importable_sglang import importable_copy
from made_pairs import CARD, Maker

from sm120tune.cli import verify as command
from sm120tune.devices import LocalGPU, find_device
from sm120tune.verify import run

CHILD = Path(__file__).with_name("cpu_child.py")


@pytest.fixture
def maker(sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Return a writer of pairs for the importable copy; ``sm120tune verify`` finds a GPU of their card."""
    gpu = LocalGPU(0, "0", "GPU-0", find_device(CARD), "580.1", 2**36, 2**36, 0, 0)
    monkeypatch.setattr(command, "local_gpus", lambda: (gpu,))
    monkeypatch.setattr(run, "CHILD", (sys.executable, str(CHILD)))
    return Maker(importable_copy(sglang_0_5_23, tmp_path), tmp_path / "output")
