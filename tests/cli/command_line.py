"""Run the command line as a person does: ``python -m sm120tune`` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sm120tune
from sm120tune import cli

CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
SMALL = ["--experts", "16", "--inter", "256", "--hidden", "256", "--topk", "2"]
"""A problem whose kernels compile in a moment."""
HANGS_S = 300


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; raises where there is anything else."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


@dataclass(frozen=True)
class CommandLine:
    """Where commands run, and what all of them are given."""

    folder: Path
    sglang: Path
    cache: Path

    @property
    def output(self) -> Path:
        """Where results go unless told otherwise."""
        return self.folder / "generated_configs"

    def args(self, *more: str) -> list[str]:
        """Return a whole command's arguments: a small problem estimated for the default card."""
        return [*SMALL, "--device", CARD, "--timer", "model", "--sglang", str(self.sglang), *more]

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command in a process group of its own."""
        env = {**os.environ, "PYTHONPATH": str(Path(sm120tune.__file__).parents[1]), "XDG_CACHE_HOME": str(self.cache)}
        env.pop("SGLANG_MOE_CONFIG_DIR", None)
        # No width of whoever's terminal.
        env.pop("COLUMNS", None)
        env.update(options.pop("env", {}))
        return subprocess.Popen(
            [sys.executable, "-m", "sm120tune", *args],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *args: str, **options: Any) -> Done:
        """Run a command to its end."""
        return finish(self.start(*args, **options))

    def tune(self, *more: str, **options: Any) -> Done:
        """Tune the small problem."""
        return self.run(*self.args(*more), **options)


class InProcess:
    """The command line without a process of its own: the whole of it but the import and the probe for GPUs."""

    def __init__(self, line: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
        self.line = line
        self._capsys = capsys

    def run(self, *args: str) -> Done:
        """Run a command to its end."""
        code = cli.run(list(args))
        captured = self._capsys.readouterr()
        return Done(code, captured.out, captured.err)

    def refused(self, *args: str, words: list[str]) -> str:
        """Check that a command ends with 2 and one line that names what is wrong."""
        before = sorted(self.line.folder.rglob("*"))
        done = self.run(*args)
        err = done.err
        assert done.code == 2, err
        assert done.out == ""
        assert err.startswith("sm120tune: error: "), err
        assert err.count("\n") == 1
        assert err.endswith("\n")
        for word in words:
            assert word in err
        assert sorted(self.line.folder.rglob("*")) == before
        assert not list(self.line.cache.rglob("*"))
        return err


def finish(process: subprocess.Popen[str]) -> Done:
    """Wait for a command."""
    try:
        out, err = process.communicate(timeout=HANGS_S)
    except BaseException:
        process.kill()
        raise
    return Done(process.returncode, out, err)


def files_under(*folders: Path) -> dict[Path, bytes]:
    """Return every file in some folders with its content."""
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}
