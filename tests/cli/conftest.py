"""The command line in a folder of its own for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import CommandLine, InProcess

from sm120tune import cli


@pytest.fixture
def line(tmp_path: Path, sglang_0_5_23: Path, own_cache: Path) -> CommandLine:
    """Return a command line whose cache of binaries all tests share."""
    folder = tmp_path / "work"
    folder.mkdir()
    return CommandLine(folder, sglang_0_5_23, own_cache)


@pytest.fixture
def command(
    line: CommandLine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[InProcess]:
    """Return a command line without processes and with a cache of its own: quick, for what ends before any work."""
    empty = replace(line, cache=tmp_path / "cache")
    monkeypatch.chdir(line.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty.cache))
    monkeypatch.setattr(cli, "ask_early", lambda: None)
    handler = signal.getsignal(signal.SIGTERM)
    yield InProcess(empty, capsys)
    signal.signal(signal.SIGTERM, handler)
