from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from command_line import CommandLine, Done

import sm120tune
from sm120tune.cli.tune import DEFAULT_HIDDEN, DEFAULT_TOPK, DEFAULT_TRIALS, tune_command
from sm120tune.problem import DEFAULT_BATCH_SIZES

OPTIONS = [parameter for parameter in tune_command.params if isinstance(parameter, click.Option)]


@pytest.fixture(scope="module")
def helped(sglang_0_5_23: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Return the help, as wide as it gets."""
    folder = tmp_path_factory.mktemp("help")
    line = CommandLine(folder, sglang_0_5_23, folder / "cache")
    done = line.run("tune", "--help", env={"COLUMNS": "1000"})
    assert list(folder.iterdir()) == []
    return done


def entry(text: str, option: click.Option) -> str:
    """Return what the help says of one option, in one line."""
    name = re.escape(option.opts[0])
    found = re.search(rf"^  {name}\b.*(\n {{6,}}.*)*", text, re.MULTILINE)
    assert found is not None, option.name
    return " ".join(found.group(0).split())


def test_help_is_no_error(helped: Done) -> None:
    assert helped.code == 0
    assert helped.err == ""


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.opts[0])
def test_help_states_the_default_of_every_option(helped: Done, option: click.Option) -> None:
    text = entry(helped.out, option)
    if option.is_flag:
        # Off unless given.
        assert "default" not in text
        return
    if option.name == "device_spec":
        # Without it there is no such file: the card comes from --device.
        return
    said = re.search(r"\[(?:default: )?([^\]]*)\]$", text)
    assert said is not None, text
    if isinstance(option.default, int | str | Path) and not isinstance(option.default, bool):
        assert said.group(1).replace(" ", "") == str(option.default)


def test_help_states_the_values_that_stand_for_figures_not_given(helped: Done) -> None:
    said = {option.name: entry(helped.out, option) for option in OPTIONS}
    assert f"[default: {DEFAULT_HIDDEN}," in said["hidden"]
    assert f"[default: {DEFAULT_TOPK}," in said["topk"]
    assert str(DEFAULT_TRIALS["cuda"]) in said["trials"]
    assert str(DEFAULT_TRIALS["model"]) in said["trials"]
    assert ",".join(map(str, DEFAULT_BATCH_SIZES)) in said["batch_sizes"].replace(" ", "")
    for name in ("experts", "inter"):
        assert "[this or --model]" in said[name]
    assert "[this or the numbers]" in said["model"]
    for choice in ("optuna", "exhaustive"):
        assert choice in said["search"]


def test_help_after_any_option_and_of_the_whole(sglang_0_5_23: Path, tmp_path: Path, helped: Done) -> None:
    line = CommandLine(tmp_path, sglang_0_5_23, tmp_path / "cache")
    implicit = line.run("--experts", "16", "--help", env={"COLUMNS": "1000"})
    assert (implicit.code, implicit.out) == (0, helped.out)
    whole = line.run("--help")
    assert whole.code == 0
    assert "tune" in whole.out
    assert "--experts" in whole.out


def test_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sm120tune", "--version"],
        env={"PYTHONPATH": str(Path(sm120tune.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sm120tune.__version__ in done.stdout
