"""The pair of files that a run of the small problem writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton

UP = "E=16,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"
DOWN = "E=16,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition_down.json"
TRITON = f"triton_{triton.__version__.replace('.', '_')}"


def pair_paths(output: Path) -> list[Path]:
    return [output / "estimated" / kind / TRITON / name for kind in ("configs", "provenance") for name in (UP, DOWN)]


def as_sglang(path: Path) -> dict[int, dict[str, Any]]:
    """Read a config file as SGLang does, and check the order of its keys."""
    text = path.read_text()
    content: dict[str, dict[str, Any]] = json.loads(text)
    keys = [int(key) for key in content]
    assert keys == sorted(keys)
    assert [str(key) for key in keys] == list(content)
    return {int(key): row for key, row in content.items()}
