from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import triton
from command_line import CARD, InProcess

LAYER = "[[job]]\nexperts = 4\ninter = 64\nhidden = 64\ntopk = 2\n"
WIDER = LAYER.replace("experts = 4", "experts = 8")
"""A second layer with a file of its own."""


def jobs(command: InProcess, folder: Path, text: str, *more: str) -> list[str]:
    path = folder / "layers.toml"
    path.write_text(text)
    line = command.line
    return ["--jobs", str(path), "--device", CARD, "--timer", "model", "--sglang", str(line.sglang), *more]


@pytest.fixture
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that is not the command's."""
    return tmp_path_factory.mktemp("beside")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("job = [1, 2]", ["[[job]]"]),
        ("[job]\nexperts = 8", ["[[job]]"]),
        (f"{LAYER}tpp = 3", ["job 1", "'tpp'"]),
        (f"{LAYER}tp = '1'", ["job 1", "tp", "'1'"]),
        (f"{LAYER}tp = [1, 1]", ["job 1", "tp", "[1, 1]", "twice"]),
        (f"{LAYER}force = true", ["job 1", "--force"]),
        (f"{LAYER}per_channel = true\nper-channel = true", ["job 1", "'per-channel'", "twice"]),
        (f"{LAYER}{WIDER}tp = 3", ["job 2", "--inter 64"]),
        (f"{LAYER}{LAYER}", ["E=4 N=64", "twice"]),
        pytest.param(f"{LAYER}tp = {'9' * 5000}", ["is no TOML that can be read", "4300 digits"], id="endless"),
        pytest.param(f"{LAYER}tp = {'[' * 20_000}", ["is no TOML that can be read"], id="deep"),
    ],
)
def test_a_wrong_job_is_one_line_that_names_it(command: InProcess, beside: Path, text: str, words: list[str]) -> None:
    command.refused(*jobs(command, beside, text), words=words)


def test_a_file_in_the_way_of_the_last_layer_is_told_before_the_first(command: InProcess, beside: Path) -> None:
    folder = command.line.output / "estimated" / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    folder.mkdir(parents=True)
    name = f"E=8,N=64,device_name={CARD.replace(' ', '_')}.json"
    (folder / name).write_text("{}")
    args = jobs(command, beside, LAYER + WIDER, "--batch-sizes", "1", "--trials", "1")
    command.refused(*args, "--output", str(command.line.output), words=[name, "--replace"])


def test_a_recording_of_another_layer_is_told_before_the_first(command: InProcess, beside: Path) -> None:
    # Its first tokens would do for the second layer, the last would not.
    path = beside / "ids.npy"
    np.save(path, np.array([[0, 1]] * 500 + [[0, 7]]))
    args = jobs(command, beside, WIDER + LAYER, "--batch-sizes", "1", "--trials", "1")
    command.refused(*args, "--routing", f"file:{path}", words=["ids up to 7", "2 of 4 experts"])
