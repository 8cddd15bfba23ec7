"""Copies of releases, and one set of compile processes for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from check_trees import Copy, copy_of
from wheels import Trees

from sm120tune.check.resources import Resources
from sm120tune.upstream import find_sglang


@pytest.fixture
def release(sglang_trees: Trees, tmp_path: Path) -> Callable[[str], Copy]:
    """Return a function that copies a release, without its config files."""
    return lambda version: copy_of(sglang_trees[version], tmp_path / f"sglang-{version}")


@pytest.fixture
def newest(release: Callable[[str], Copy]) -> Copy:
    """Return a copy of SGLang 0.5.23 without config files."""
    return release("0.5.23")


@pytest.fixture(scope="session")
def compiling(sglang_0_5_23: Path) -> Iterator[Resources]:
    """Return resources that really compile."""
    resources = Resources(find_sglang(sglang_0_5_23), 2)
    yield resources
    resources.stop()
