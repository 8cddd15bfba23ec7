"""Fixtures that every room's tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from wheels import CACHE, Trees, sglang_tree


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> Iterator[None]:
    """Let SIGINT interrupt, child processes too: a script starts what runs in its background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the product's and Triton's caches of a test run, and of its child processes, out of the user's.

    The user's own folder of config files stays out of it too.
    """
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SM120TUNE_TEST_CACHE", str(CACHE))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        patch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
        # A user's Python writes bytecode; what imports SGLang must not leave any in its tree even so.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield folder


@pytest.fixture(scope="session")
def sglang_trees() -> Trees:
    """SGLang's releases by version, fetched when asked for."""
    return Trees()


@pytest.fixture(scope="session")
def sglang_0_5_23() -> Path:
    """SGLang's release that a new user runs."""
    return sglang_tree("0.5.23")


@pytest.fixture(scope="session")
def sglang_0_5_15() -> Path:
    """SGLang's release with lookup and kernels in ``moe_runner/triton_utils``."""
    return sglang_tree("0.5.15")
