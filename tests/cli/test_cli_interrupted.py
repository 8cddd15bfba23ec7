from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import HANGS_S, CommandLine
from pair_files import as_sglang, pair_paths


def processes_of(line: CommandLine) -> set[int]:
    """Return every process with a command line's cache in its environment, whatever its group."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"XDG_CACHE_HOME={line.cache}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def nothing_is_left(line: CommandLine) -> bool:
    """Wait until nothing that a command started runs any more."""
    end = time.monotonic() + 30
    while processes_of(line) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes_of(line)


def trials_in(cache: Path) -> int:
    """Return how many finished trials the journals of a cache hold."""
    return sum(path.read_text().count('"user_attrs"') for path in cache.glob("sm120tune/runs/*/journal.log"))


@contextlib.contextmanager
def running(line: CommandLine, *more: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Yield a run and the lines that it has printed so far; whatever happens, nothing of it survives."""
    process = line.start(*line.args(*more), **options)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
    reader.start()
    try:
        yield process, lines
        reader.join(HANGS_S)
    finally:
        for pid in processes_of(line):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def cold(line: CommandLine, tmp_path: Path) -> CommandLine:
    """Return a command line that has everything still to compile."""
    return replace(line, cache=tmp_path / "cold")


def warm_up(cold: CommandLine, line: CommandLine) -> None:
    """Give a command line what other tests have compiled, to save time."""
    shared = line.cache / "sm120tune" / "compile"
    if shared.is_dir():
        shutil.copytree(shared, cold.cache / "sm120tune" / "compile", dirs_exist_ok=True)


INTERRUPTED = ["--batch-sizes", "512", "--trials", "4"]


@pytest.mark.parametrize(
    ("which", "whole_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["ctrl-c", "sigterm"]
)
def test_an_interrupted_run_says_one_line_and_the_same_command_goes_on(
    cold: CommandLine, line: CommandLine, which: signal.Signals, whole_group: bool
) -> None:
    with running(cold, *INTERRUPTED) as (process, lines):
        wait_for(lambda: trials_in(cold.cache) >= 2 or process.poll() is not None)
        said = len(lines)
        (os.killpg if whole_group else os.kill)(process.pid, which)
        process.wait(HANGS_S)
        assert nothing_is_left(cold)
    assert process.returncode == 130
    left = [text for text in lines[said:] if text.strip()]
    assert left == ["interrupted; everything finished is saved, the same command goes on from there\n"]
    assert list(cold.folder.iterdir()) == []
    found = trials_in(cold.cache)
    assert found >= 2
    warm_up(cold, line)
    again = cold.tune(*INTERRUPTED, "--json")
    assert again.code == 0, again.err
    assert again.document["resumed"] == found
    assert as_sglang(pair_paths(cold.output)[0])


def test_an_interrupt_while_everything_starts_is_one_line_too(cold: CommandLine) -> None:
    with running(cold, *INTERRUPTED) as (process, lines):
        # The compilers are about to import what they need.
        wait_for(lambda: any(text.startswith("search") for text in lines) or process.poll() is not None)
        time.sleep(0.4)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(HANGS_S)
        assert nothing_is_left(cold)
    assert process.returncode == 130
    assert "Traceback" not in "".join(lines)
    assert lines[-1].startswith("interrupted")


def test_a_killed_run_leaves_no_compilers_behind_and_can_go_on(cold: CommandLine, line: CommandLine) -> None:
    with running(cold, *INTERRUPTED) as (process, _):
        wait_for(lambda: trials_in(cold.cache) >= 1 or process.poll() is not None)
        process.kill()
        process.wait(HANGS_S)
        assert nothing_is_left(cold)
    assert process.returncode == -signal.SIGKILL
    warm_up(cold, line)
    again = cold.tune(*INTERRUPTED, "--json")
    assert again.code == 0, again.err
    assert again.document["resumed"] >= 1


def test_in_a_scripts_background_sigterm_ends_a_run_and_ctrl_c_does_not(cold: CommandLine) -> None:
    def in_background() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with running(cold, *INTERRUPTED, preexec_fn=in_background) as (process, lines):
        wait_for(lambda: trials_in(cold.cache) >= 1 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        found = trials_in(cold.cache)
        wait_for(lambda: trials_in(cold.cache) > found or process.poll() is not None)
        assert process.poll() is None
        process.terminate()
        process.wait(HANGS_S)
        assert nothing_is_left(cold)
    assert process.returncode == 130
    assert lines[-1].startswith("interrupted")
