"""Small copies of SGLang's releases that a test may edit, and where each release keeps its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FUSED = "srt/layers/moe/fused_moe_triton"
UTILS = "srt/layers/moe/moe_runner/triton_utils"
OPS = "kernels/ops/moe"

FOLDERS = {
    "0.5.8.post1": (FUSED, FUSED),
    "0.5.10": (FUSED, FUSED),
    "0.5.12": (UTILS, UTILS),
    "0.5.15": (UTILS, UTILS),
    "0.5.18": (OPS, UTILS),
    "0.5.23": (OPS, UTILS),
}
"""The folders of the kernels and of the lookup, by release."""

RELEASES = tuple(FOLDERS)
UP_TO_0_5_10 = RELEASES[:2]
UP_TO_0_5_12 = RELEASES[:3]
UP_TO_0_5_15 = RELEASES[:4]
FROM_0_5_12 = RELEASES[2:]
FROM_0_5_15 = RELEASES[3:]
FROM_0_5_18 = RELEASES[4:]


def kernel_path(release: str) -> str:
    return f"{FOLDERS[release][0]}/fused_moe_triton_kernels.py"


def config_path(release: str) -> str:
    return f"{FOLDERS[release][1]}/fused_moe_triton_config.py"


def slim_copy(tree: Path, release: str, into: Path) -> Path:
    """Copy what sm120tune reads of a release, with an empty ``configs`` folder; return the package folder."""
    package = into / "sglang"
    wanted = ["__init__.py", "version.py", "_version.py", kernel_path(release), config_path(release)]
    for name in [*wanted, f"{FOLDERS[release][1]}/fused_moe.py"]:
        source = tree / "sglang" / name
        if source.is_file():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, package / name)
    for metadata in tree.glob("*.dist-info/METADATA"):
        (into / metadata.parent.name).mkdir()
        shutil.copyfile(metadata, into / metadata.parent.name / "METADATA")
    (package / FOLDERS[release][1] / "configs").mkdir()
    return package


def edit(file: Path, old: str, new: str, *, after: str = "") -> None:
    """Replace the first ``old`` past ``after``; a text that is not there fails the test that wants to edit it."""
    text = file.read_text()
    start = text.index(after)
    place = text.index(old, start)
    file.write_text(text[:place] + new + text[place + len(old) :])


def write_rows(configs: Path, triton: str, name: str, rows: Mapping[Any, Any]) -> Path:
    """Write a config file into ``configs/triton_X_Y_Z`` in the order of ``rows``."""
    file = configs / f"triton_{triton.replace('.', '_')}" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({str(m): row for m, row in rows.items()}))
    return file


def row(block_m: int, **changes: Any) -> dict[str, Any]:
    """Return a row of a config file."""
    base = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    return {**base, "num_warps": 4, "num_stages": 3, **changes}
