"""A copy of a release and pairs for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_pairs import Maker, copied


@pytest.fixture
def maker(sglang_0_5_23: Path, tmp_path: Path) -> Maker:
    """Return a writer of pairs for a copy of the newest release without its config files."""
    return Maker(copied(sglang_0_5_23, tmp_path, without_configs=True), tmp_path / "output")


@pytest.fixture
def whole(sglang_0_5_23: Path, tmp_path: Path) -> Maker:
    """Return a writer of pairs for a copy of the newest release."""
    return Maker(copied(sglang_0_5_23, tmp_path), tmp_path / "output")
