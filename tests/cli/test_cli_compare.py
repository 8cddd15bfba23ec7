"""``sm120tune compare`` as a person calls it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import CARD, CommandLine, InProcess
from made_pairs import Maker, rows
from synthetic import SMALL, StubPool, SyntheticLane

from sm120tune import tune
from sm120tune.cli import compare as module
from sm120tune.resolve import CardRequest, resolve_card
from sm120tune.tiles import Tile, TilePair

GOOD = TilePair(Tile(16, 64, 128, 1, 4, 3), Tile(16, 128, 128, 1, 4, 3))


@pytest.fixture
def maker(line: CommandLine) -> Maker:
    return Maker(line.sglang, line.output)


@pytest.fixture
def measured(command: InProcess, monkeypatch: pytest.MonkeyPatch) -> SyntheticLane:
    """Let a made-up card stand for the GPU, from the compile pool to the times."""
    lane = SyntheticLane(noise=0.005)
    card = resolve_card(CardRequest(CARD, None, None, "model"))
    monkeypatch.setattr(module, "resolve_card", lambda _request: card.__class__(card.spec, (), "cuda"))
    monkeypatch.setattr(tune, "make_lanes", lambda *_args: [lane])
    monkeypatch.setattr(tune, "CompilePool", lambda *_args: StubPool())
    return lane


def run(command: InProcess, *args: str | Path) -> dict[str, Any]:
    done = command.run("compare", *map(str, args), "--sglang", str(command.line.sglang), "--json")
    assert done.code == 0, done.err
    return done.document


def test_two_pairs_measured(command: InProcess, measured: SyntheticLane, maker: Maker) -> None:
    a = maker.write({1: GOOD, 64: GOOD}, problem=SMALL).up_path
    b = shutil.copytree(maker.output, maker.output.with_name("older")) / a.relative_to(maker.output)
    a = maker.write(rows(1, 64, stages=2), problem=SMALL).up_path
    document = run(command, b, a, "--mix", "1:0.5,64:0.3,100:0.2")
    assert document["timer"] == "cuda"
    # 100 is no key: both serve it with their row of 64.
    assert [row["m"] for row in document["rows"]] == [1, 64, 100]
    assert {row["verdict"] for row in document["rows"]} == {"faster"}
    assert document["rows"][2]["a"] == document["rows"][1]["a"] == {
        "gate_up": GOOD.gate_up.to_row(), "down": GOOD.down.to_row(),
    }  # fmt: skip
    mix = document["mix"]
    times = {row["m"]: row["a_us"] for row in document["rows"]}
    assert mix["a_us"] == pytest.approx(0.5 * times[1] + 0.3 * times[64] + 0.2 * times[100])
    assert mix["ratio"] == pytest.approx(mix["a_us"] / mix["b_us"])
    assert measured.stopped


def test_a_pair_beside_the_default_and_todays(command: InProcess, measured: SyntheticLane, maker: Maker) -> None:
    file = maker.write({1: GOOD, 64: GOOD}, problem=SMALL).up_path
    done = command.run("compare", str(file), "--sglang", str(command.line.sglang))
    assert done.code == 0
    assert "B: default" in done.out
    assert ", measured" in done.out
    assert "16x32x64 g1 w4 s3" in done.out  # SGLang's default up to M=E
    assert "64x64x32 g8 w4 s3" in done.out  # and above
    assert "mix (every M alike): A " in done.out


def test_what_cannot_run_is_an_exit_code(command: InProcess, measured: SyntheticLane, maker: Maker) -> None:
    large = TilePair.same(Tile(128, 256, 128, 1, 8, 4))
    file = maker.write({1: GOOD, 64: large}, problem=SMALL).up_path
    done = command.run("compare", str(file), "today", "--sglang", str(command.line.sglang))
    assert done.code == 1
    assert "not compared (A: shared_memory" in done.out
    assert "an M of it could not be" in done.out


def test_without_the_card_it_is_an_estimate(line: CommandLine, maker: Maker) -> None:
    """The whole of it: the kernels are compiled for the card, the model says the rest."""
    file = maker.write({1: GOOD, 64: GOOD}, problem=SMALL).down_path
    done = line.run("compare", str(file), "--timer", "model", "--batch-sizes", "64", "--sglang", str(line.sglang))
    assert done.code == 0, done.err
    assert "ESTIMATED, not measured" in done.out
    assert "mix (every M alike): A " in done.out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": SMALL.__class__(**{**vars(SMALL), "hidden": 1024})}, "hidden 512"),
        ({"problem": replace(SMALL, gated=False)}, "gated True"),
        ({"device": {"name": "NVIDIA H200"}}, "is for NVIDIA RTX PRO 6000"),
    ],
)
def test_pairs_of_two_layers_or_cards(command: InProcess, maker: Maker, change: dict[str, Any], words: str) -> None:
    a = maker.write(rows(1), problem=SMALL).up_path
    other = Maker(maker.site, maker.output.with_name("other")).write(rows(1), **{"problem": SMALL, **change}).up_path
    err = command.refused("compare", str(a), str(other), words=[words, "nothing to compare"])
    assert str(other) in err
    # The other way round too: what only some layers have is written for those alone.
    command.refused("compare", str(other), str(a), words=["nothing to compare"])


def test_numbers_choose_a_layer_of_a_pair_for_several(
    command: InProcess, measured: SyntheticLane, maker: Maker
) -> None:
    wide = replace(SMALL, hidden=1024, topk=4)
    file = maker.write({1: GOOD, 64: GOOD}, problem=SMALL, shared_with=(wide,)).up_path
    command.refused("compare", str(file), "default", "--hidden", "2048", words=["hidden=512", "--hidden 2048"])
    chosen = run(command, file, "default", "--batch-sizes", "64", "--hidden", "1024")
    assert (chosen["problem"]["hidden"], chosen["problem"]["topk"]) == (1024, 4)
    assert measured.races


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere.json"], ["nowhere.json", "no such file"]),
        (["FILE", "--mix", "1:x"], ["--mix '1:x'"]),
        (["FILE", "--batch-sizes", "0"], ["--batch-sizes has 0"]),
        (["FILE", "--seed", "-1"], ["--seed"]),
        (["FILE", "--routing", "odd"], ["--routing 'odd'"]),
    ],
)
def test_bad_input(command: InProcess, maker: Maker, args: list[str], words: list[str]) -> None:
    file = str(maker.write(rows(1), problem=SMALL).up_path)
    extra = ["--timer", "model", "--sglang", str(command.line.sglang)]
    command.refused("compare", *[file if arg == "FILE" else arg for arg in args], *extra, words=words)


def test_a_file_without_provenance_needs_the_layer(command: InProcess, measured: SyntheticLane, maker: Maker) -> None:
    written = maker.write({1: GOOD, 64: GOOD}, problem=SMALL)
    plain = command.line.folder / "plain"
    plain.mkdir()
    for path in (written.up_path, written.down_path):
        shutil.copy(path, plain)
    file = plain / written.up_path.name
    command.refused("compare", str(file), words=["missing --hidden"])
    document = run(command, file, written.up_path, "--hidden", "512", "--topk", "2")
    assert {row["verdict"] for row in document["rows"]} == {"equal rows"}
    assert json.dumps(document["problem"]) == json.dumps(SMALL.to_json())
