"""``calibrate --from-times``: a file's times fitted again, without a GPU."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import InProcess
from made_cards import calibration_of
from made_pairs import Maker, rows
from synthetic import SMALL

from sm120tune.calibrate.applied import applied_path
from sm120tune.calibrate.file import read_file
from sm120tune.devices import find_device
from sm120tune.measure.cost_constants import formula_version, model_version

ON_A_GPU = Path(__file__).parents[1] / "data" / "calibration_h200_cost_1.json"
CARD = "NVIDIA H200"


@pytest.fixture
def old(command: InProcess) -> Path:
    """A file that an earlier formula left after a measurement on a GPU."""
    return Path(shutil.copy(ON_A_GPU, command.line.folder / "old.json"))


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_the_same_summary_and_a_file_with_the_same_times(command: InProcess, old: Path) -> None:
    done = command.run("calibrate", "--from-times", "old.json", "--output", "new.json")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == (
        "E=128 N=768 hidden=2048 topk=8 bf16 on NVIDIA H200, measured: 30 tiles, 240 times, 120 of 120 results right; "
        "failures: none"
    )
    assert [line.split()[0] for line in lines[2:7]] == ["1", "64", "4096", "16384", "all"]
    assert "wrote new.json" in lines
    assert f"made by formula cost-1 from sm120, fitted again by {formula_version()} from sm120" in done.err
    before, after = read(old), read(command.line.folder / "new.json")
    assert before == read(ON_A_GPU)
    for part in ("origin", "times", "kind", "schema_version"):
        assert after[part] == before[part]
    assert (after["model"]["formula"], after["model"]["start_version"]) == (formula_version(), model_version())
    quality = after["quality"]["all"]
    assert quality["unseen_tiles"]["median"] < 0.6 * quality["before"]["median"]


def test_what_it_writes_estimates_as_the_old_file_does(command: InProcess, old: Path) -> None:
    assert command.run("calibrate", "--from-times", "old.json", "--output", "new.json", "--quiet").code == 0
    pair = Maker(command.line.sglang, command.line.output).write(rows(64), problem=SMALL).up_path
    explain = ["explain", str(pair), "--batch-size", "64", "--hidden", "512", "--topk", "2", "--device", CARD]
    again, new = (
        command.run(*explain, "--no-compile", "--json", "--calibration", f"{name}.json") for name in ("old", "new")
    )
    assert again.code == new.code == 0
    assert again.document == new.document
    found = read_file(command.line.folder / "new.json", "it").calibration()
    assert new.document["model"] == f"{model_version()}+calibrated.{found.digest}"
    assert new.err == ""
    assert again.err == (
        "--calibration old.json was made by formula cost-1: its 240 times were fitted again by this release's "
        f"{formula_version()}; calibrate --from-times writes that\n"
    )


def test_applied_it_takes_the_place_of_the_old_one(command: InProcess, old: Path) -> None:
    kept = applied_path(CARD)
    kept.parent.mkdir(parents=True)
    shutil.copy(old, kept)
    pair = Maker(command.line.sglang, command.line.output).write(rows(64), problem=SMALL).up_path
    explain = ["explain", str(pair), "--batch-size", "64", "--hidden", "512", "--topk", "2", "--device", CARD]
    first = command.run(*explain, "--no-compile", "--json")
    assert f"{kept} was made by formula cost-1" in first.err
    done = command.run("calibrate", "--from-times", str(kept), "--apply", "--json", "--quiet")
    assert done.document["files"] == ["calibration-NVIDIA_H200.json", str(kept)]
    assert kept.read_bytes() == (command.line.folder / "calibration-NVIDIA_H200.json").read_bytes()
    second = command.run(*explain, "--no-compile", "--json")
    assert (second.err, second.document) == ("", first.document)


def test_a_file_may_be_replaced_by_itself_and_no_other_times_are_lost(command: InProcess, old: Path) -> None:
    (command.line.folder / "other.json").write_text(calibration_of(find_device(CARD)).dumps())
    command.refused(
        "calibrate", "--from-times", "old.json", "--output", "other.json",
        words=["--output other.json holds other times than old.json", "choose another"],
    )  # fmt: skip
    for _ in range(2):
        assert command.run("calibrate", "--from-times", "old.json", "--output", "old.json", "--quiet").code == 0
    assert read(old)["model"]["formula"] == formula_version()
    assert read(old)["times"] == read(ON_A_GPU)["times"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_that_it_points_to_is_written(command: InProcess, old: Path, there: bool) -> None:
    target, link = command.line.folder / "kept" / "mine.json", command.line.folder / "link.json"
    target.parent.mkdir()
    if there:
        shutil.copy(old, target)
    link.symlink_to("kept/mine.json")
    assert command.run("calibrate", "--from-times", "old.json", "--output", "link.json", "--quiet").code == 0
    assert link.readlink() == Path("kept/mine.json")
    assert read(target)["model"]["formula"] == formula_version()


def test_a_link_into_no_folder_is_refused(command: InProcess, old: Path) -> None:
    (command.line.folder / "link.json").symlink_to("typo/mine.json")
    command.refused(
        "calibrate", "--from-times", "old.json", "--output", "link.json",
        words=["--output link.json: there is no folder", "typo"],
    )  # fmt: skip


def test_pipes_are_not_waited_for(command: InProcess, old: Path) -> None:
    os.mkfifo(command.line.folder / "pipe")
    args = ["calibrate", "--from-times"]
    command.refused(*args, "pipe", words=["--from-times pipe is no regular file; give a calibration's file"])
    command.refused(*args, "old.json", "--output", "pipe", words=["--output pipe is no regular file", "left as it is"])


def test_another_class_to_begin_with(command: InProcess, old: Path) -> None:
    args = ["calibrate", "--from-times", "old.json", "--output", "new.json", "--json", "--quiet"]
    model = command.run(*args, "--from-class", "sm90").document["model"]
    assert model["start"] == "sm90"
    assert model["correction"] is not None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tiles", "30"], ["--from-times measures nothing", "drop --tiles"]),
        (["--experts", "8", "--inter", "64"], ["drop --experts"]),
        (["--batch-sizes", "1"], ["drop --batch-sizes"]),
        (["--dry-run"], ["drop --dry-run"]),
        (["--timer", "cuda"], ["drop --timer"]),
        (["--from-class", "sm70"], ["--from-class sm70"]),
        (["--output", "typo/new.json"], ["--output typo/new.json", "there is no folder typo"]),
        (["--output", "."], ["is a folder"]),
    ],
)
def test_what_does_not_go_with_it(command: InProcess, old: Path, args: list[str], words: list[str]) -> None:
    command.refused("calibrate", "--from-times", "old.json", *args, words=words)


def test_times_that_cannot_be_fitted_leave_nothing(command: InProcess, old: Path) -> None:
    data = read(old)
    few = {**data, "times": data["times"][:20]}
    replayed = {**data, "origin": {**data["origin"], "timer": "replay"}}
    foreign = {**data, "schema_version": 2}
    for name, content in (("few", few), ("replayed", replayed), ("foreign", foreign), ("odd", {"a": 1})):
        (command.line.folder / f"{name}.json").write_text(json.dumps(content))
    for name, words in (
        ("few", "times of fewer than 10 tiles, too few to fit"),
        ("foreign", "schema_version is 2; this release reads 1"),
        ("odd", 'it has no "kind"'),
        ("none", "cannot be read: No such file"),
    ):
        command.refused("calibrate", "--from-times", f"{name}.json", words=[f"--from-times {name}.json", words])
    command.refused("calibrate", "--from-times", "replayed.json", "--apply", words=["--apply", "replay"])
