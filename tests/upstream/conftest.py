"""Editable copies of releases."""

from __future__ import annotations

from pathlib import Path

import pytest
from lookup_releases import Make, Release
from wheels import Trees


@pytest.fixture
def make(sglang_trees: Trees, tmp_path: Path) -> Make:
    return lambda release: Release(sglang_trees[release], release, tmp_path / release)
