"""The whole ``calibrate`` command on a real GPU; skipped where torch sees none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sm120tune import cli

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYER = ["--experts", "32", "--inter", "256", "--hidden", "1024", "--topk", "4"]
TILES, SIZES = 16, (1, 64, 512)


def calibrate(*more: str) -> int:
    path = os.environ.get("SM120TUNE_TEST_SGLANG")
    sglang = ["--sglang", path] if path else []
    sizes = ",".join(map(str, SIZES))
    return cli.run(["calibrate", *LAYER, "--tiles", str(TILES), "--batch-sizes", sizes, "--quiet", *sglang, *more])


def test_a_small_layer_is_timed_checked_and_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert calibrate("--output", "mine.json", "--json", "--from-class", "sm120") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    data = json.loads((tmp_path / "mine.json").read_text())
    assert data["origin"]["device"]["name"] == torch.cuda.get_device_name(0)
    assert data["origin"]["timer"] == "cuda"
    assert len(data["times"]) == TILES * len(SIZES)
    timed = [one for one in data["times"] if "us" in one["gate_up"] and "us" in one["down"]]
    assert len(timed) > 0.8 * len(data["times"])
    assert all(one["check"]["correct"] and 0 < one["check"]["error"] < 0.01 for one in timed)
    assert all(one[gemm]["repetitions"] > 1 for one in timed for gemm in ("gate_up", "down"))
    every = document["quality"]["all"]
    # On a card whose class is right already there is nothing to gain.
    assert every["unseen_tiles"]["median"] < max(every["before"]["median"], 0.12)
    assert calibrate("--output", "mine.json", "--json", "--from-class", "sm120") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["resumed"] == TILES * len(SIZES)
    assert again["model"] == document["model"]
