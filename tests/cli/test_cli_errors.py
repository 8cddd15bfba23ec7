from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from command_line import CARD, SMALL, CommandLine, InProcess

from sm120tune.devices import find_device

BAD: dict[str, tuple[list[str], list[str]]] = {
    # What is given beside a good command, and what the message must name.
    "inter-not-divisible": (["--inter", "250", "--tp", "4"], ["--inter 250", "4"]),
    "tp-not-divisible": (["--tp", "8", "--ep", "3"], ["--tp 8", "--ep 3"]),
    "experts-not-divisible": (["--experts", "17", "--tp", "2", "--ep", "2"], ["--experts 17", "--ep 2"]),
    "topk-too-large": (["--topk", "17"], ["--topk 17", "--experts 16"]),
    "m-zero": (["--batch-sizes", "1,0,64"], ["--batch-sizes", "0"]),
    "m-negative": (["--batch-sizes", "-5"], ["--batch-sizes", "-5"]),
    "m-twice": (["--batch-sizes", "1,64,1"], ["--batch-sizes", "1 twice"]),
    "m-no-number": (["--batch-sizes", "1,x"], ["--batch-sizes", "1,x"]),
    "m-fraction": (["--batch-sizes", "1.5"], ["--batch-sizes", "1.5"]),
    "m-hole": (["--batch-sizes", "1,,2"], ["--batch-sizes", "1,,2"]),
    "m-empty": (["--batch-sizes", ""], ["--batch-sizes", "''"]),
    "dtype": (["--dtype", "int3"], ["--dtype int3", "bf16"]),
    "blocks-of-bf16": (["--block-shape", "128,128"], ["--dtype bf16", "--block-shape"]),
    "channels-of-bf16": (["--per-channel"], ["--dtype bf16"]),
    "groups-of-bf16": (["--group-size", "128"], ["--dtype bf16", "--group-size"]),
    "block-no-pair": (["--dtype", "fp8_w8a8", "--block-shape", "128"], ["--block-shape '128'", "128,128"]),
    "block-no-number": (["--dtype", "fp8_w8a8", "--block-shape", "a,b"], ["--block-shape 'a,b'"]),
    "block-endless": (["--dtype", "fp8_w8a8", "--block-shape", "9" * 5000 + ",128"], ["--block-shape", "128,128"]),
    "block-negative": (["--dtype", "fp8_w8a8", "--block-shape", "128,-128"], ["--block-shape '128,-128'"]),
    "block-odd": (["--dtype", "fp8_w8a8", "--block-shape", "128,48"], ["--block-shape 128,48", "32"]),
    "block-over-n": (["--dtype", "fp8_w8a8", "--block-shape", "512,128"], ["--inter 256", "[512, 128]"]),
    "block-over-hidden": (
        ["--dtype", "fp8_w8a8", "--block-shape", "128,128", "--hidden", "192"], ["--hidden 192", "128"],
    ),
    "blocks-and-channels": (
        ["--dtype", "fp8_w8a8", "--block-shape", "128,128", "--per-channel"],
        ["--block-shape 128,128", "--per-channel"],
    ),
    "blocks-and-groups": (
        ["--dtype", "int8_w8a16", "--block-shape", "128,128", "--group-size", "128"], ["--block-shape", "--group-size"],
    ),
    "group-odd": (["--dtype", "int4_w4a16", "--group-size", "48"], ["--group-size 48", "32, 64, 128"]),
    "group-over-n": (["--dtype", "int4_w4a16", "--group-size", "128", "--tp", "4"], ["N=64", "128"]),
    "groups-of-fp8": (["--dtype", "fp8_w8a8", "--group-size", "128"], ["--dtype fp8_w8a8", "--group-size 128"]),
    "int4-without-groups": (["--dtype", "int4_w4a16"], ["--dtype int4_w4a16", "--group-size"]),
    "int8-without-scales": (["--dtype", "int8_w8a8"], ["--dtype int8_w8a8", "--per-channel", "--block-shape"]),
    "zero-points-without-groups": (["--dtype", "int8_w8a16", "--zero-points"], ["--zero-points", "--group-size"]),
    "zero-points-of-bf16": (["--zero-points"], ["--dtype bf16"]),
    "budget-endless": (["--budget", "inf"], ["--budget", "inf"]),
    "routing": (["--routing", "zipf"], ["--routing", "zipf", "uniform"]),
    "routing-alpha": (["--routing", "power:0"], ["--routing", "power:0"]),
    "routing-no-alpha": (["--routing", "power:x"], ["--routing", "power:x"]),
    "search": (["--search", "random"], ["--search", "random", "exhaustive"]),
    "keys": (["--keys", "some"], ["--keys", "some", "auto"]),
    "timer": (["--timer", "sundial"], ["--timer", "sundial"]),
    "replay-without-file": (["--timer", "replay"], ["--timer replay"]),
    "shared-with-ep": (
        ["--shared-experts", "1", "--tp", "2", "--ep", "2"], ["--shared-experts 1", "--ep 2"],
    ),
    "shared-negative": (["--shared-experts", "-1"], ["--shared-experts", "-1"]),
    "trials-negative": (["--trials", "-3"], ["--trials", "-3"]),
    "trials-zero": (["--trials", "0"], ["--trials", "0"]),
    "trials-no-number": (["--trials", "many"], ["--trials", "many"]),
    "budget-zero": (["--budget", "0"], ["--budget", "0"]),
    "budget-negative": (["--budget", "-1.5"], ["--budget", "-1.5"]),
    "budget-nan": (["--budget", "nan"], ["--budget", "nan"]),
    "workers": (["--workers", "0"], ["--workers", "0"]),
    "seed": (["--seed", "-1"], ["--seed", "-1"]),
    "experts-zero": (["--experts", "0"], ["--experts", "0"]),
    "experts-negative": (["--experts", "-4"], ["--experts", "-4"]),
    "experts-no-number": (["--experts", "many"], ["--experts", "many"]),
    "inter-zero": (["--inter", "0"], ["--inter", "0"]),
    "hidden-zero": (["--hidden", "0"], ["--hidden", "0"]),
    "topk-zero": (["--topk", "0"], ["--topk", "0"]),
    "tp-zero": (["--tp", "0"], ["--tp", "0"]),
    "ep-zero": (["--ep", "0"], ["--ep", "0"]),
    "device": (["--device", "NVIDIA RTX PRO 9000"], ["--device", "NVIDIA RTX PRO 9000", "RTX PRO 5000"]),
    "device-nothing": (["--device", ""], ["--device ''"]),
    "no-sglang-there": (["--sglang", "/nowhere/at/all"], ["--sglang /nowhere/at/all"]),
    "unknown-option": (["--experst", "5"], ["--experst"]),
    "option-without-value": (["--trials"], ["--trials"]),
    "one-word-too-many": (["sideways"], ["sideways"]),
}  # fmt: skip


@pytest.mark.parametrize(("more", "words"), BAD.values(), ids=BAD)
def test_an_impossible_argument_is_one_line_and_nothing_is_written(
    command: InProcess, more: list[str], words: list[str]
) -> None:
    command.refused(*command.line.args(*more), words=words)


@pytest.mark.parametrize("name", ["inter-not-divisible", "m-twice", "search", "no-sglang-there", "shared-with-ep"])
def test_the_same_as_a_process(line: CommandLine, tmp_path: Path, name: str) -> None:
    more, words = BAD[name]
    line = replace(line, cache=tmp_path / "cache")
    done = line.tune(*more)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert all(word in done.err for word in words), done.err
    assert list(line.folder.iterdir()) == []
    assert not line.cache.exists()


@pytest.mark.parametrize("missing", ["--experts", "--inter"])
def test_a_missing_option_is_named(command: InProcess, missing: str) -> None:
    at = SMALL.index(missing)
    command.refused(*SMALL[:at], *SMALL[at + 2 :], words=[missing])


def test_no_arguments_show_the_way(command: InProcess) -> None:
    done = command.run()
    assert done.code == 2
    assert done.out == ""
    assert "python -m sm120tune --experts" in done.err


def test_an_output_that_is_a_file(command: InProcess) -> None:
    path = command.line.folder / "results"
    path.write_text("mine")
    command.refused(*command.line.args("--output", str(path)), words=[f"--output {path}", "file"])
    command.refused(*command.line.args("--output", str(path / "below")), words=[f"--output {path / 'below'}"])
    assert path.read_text() == "mine"


def test_an_output_that_cannot_be_written_is_told_before_the_work(
    command: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    dangling = command.line.folder / "dangling"
    dangling.symlink_to("nowhere")
    command.refused(*command.line.args("--output", "dangling"), words=["--output dangling"])
    # A read-only mount; root may write to any other folder.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    command.refused(*command.line.args("--output", "below/results"), words=["--output below/results", "written"])


def test_a_working_directory_that_is_gone(line: CommandLine, tmp_path: Path) -> None:
    done = replace(line, folder=tmp_path).run("list", preexec_fn=lambda: _lose_folder(tmp_path / "gone"))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert "the working directory is gone" in done.err


def _lose_folder(folder: Path) -> None:
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (None, "Expecting property name"),
        ({"sm_count": None}, "sm_count"),
        ({"sm_count": -1}, "sm_count"),
        ({"bandwidth": "fast"}, "bandwidth"),
        ({"bandwidth": float("nan")}, "NaN"),
        ({"capability": [12]}, "capability"),
        ({"colour": "green"}, "colour"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_a_damaged_device_spec(command: InProcess, changes: dict[str, Any] | None, word: str) -> None:
    path = command.line.folder / "card.json"
    good = asdict(find_device("NVIDIA GB10"))
    path.write_text("{" if changes is None else json.dumps({**good, **changes}))
    args = [*SMALL, "--sglang", str(command.line.sglang), "--device-spec", str(path)]
    command.refused(*args, words=[f"--device-spec {path}", word])


def test_a_device_spec_that_is_not_there_or_a_folder(command: InProcess) -> None:
    for path in (command.line.folder / "none.json", command.line.folder):
        command.refused(*SMALL, "--device-spec", str(path), words=[f"--device-spec {path}"])
    path = command.line.folder / "card.json"
    path.write_text(json.dumps(asdict(find_device("NVIDIA GB10"))))
    command.refused(*SMALL, "--device-spec", str(path), "--timer", "cuda", words=["--device-spec", "--timer cuda"])


@pytest.mark.parametrize("damage", ["no kernel", "no lookup", "no Python", "another kernel"])
def test_a_damaged_sglang(command: InProcess, tmp_path: Path, damage: str) -> None:
    tree = Path(shutil.copytree(command.line.sglang, tmp_path / "tree"))
    kernel = next(tree.rglob("fused_moe_triton_kernels.py"))
    lookup = next(tree.rglob("fused_moe_triton_config.py"))
    match damage:
        case "no kernel":
            kernel.unlink()
        case "no lookup":
            lookup.unlink()
        case "no Python":
            kernel.write_text("def fused_moe_kernel(:\n")
        case "another kernel":
            kernel.write_text(kernel.read_text().replace("def fused_moe_kernel(", "def other_kernel("))
    command.refused(*command.line.args("--sglang", str(tree)), words=[str(tree)])


def test_explain_names_what_is_no_config_file(command: InProcess) -> None:
    numbers = ["--batch-size", "64", "--hidden", "64", "--topk", "2"]
    command.refused("explain", ".", *numbers, words=["error: . is no name"])
    assert "file:PATH" in command.run("explain", "--help").out


def test_a_replay_needs_a_table_and_no_problem(command: InProcess) -> None:
    timer = ["--timer", "replay:none.parquet"]
    command.refused(*timer, words=["none.parquet"])
    command.refused(*SMALL, *timer, words=["--experts"])
    command.refused("--device", CARD, *timer, words=["--device"])
    for more in (["--dtype", "fp16"], ["--tp", "4"], ["--batch-sizes", "7"], ["--routing", "balanced"]):
        command.refused(*more, *timer, words=["--timer replay:FILE", more[0]])


@pytest.mark.parametrize("below", [".", "below"])
def test_a_cache_folder_that_cannot_be_written(
    command: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / below
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    command.refused(
        *command.line.args("--quiet"), words=["cannot write the cache folder", str(cache), "XDG_CACHE_HOME"]
    )


def test_a_cache_folder_where_nobody_can_write_as_a_process(line: CommandLine) -> None:
    done = replace(line, cache=Path("/proc/nowhere")).tune("--quiet")
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("sm120tune: error: cannot write the cache folder /proc/nowhere")
    assert done.err.count("\n") == 1
    assert list(line.folder.iterdir()) == []
