"""The command line in a folder of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine


@pytest.fixture
def line(tmp_path: Path, sglang_0_5_23: Path, own_cache: Path) -> CommandLine:
    """Return a command line whose cache of binaries all tests share."""
    folder = tmp_path / "work"
    folder.mkdir()
    return CommandLine(folder, sglang_0_5_23, own_cache)
