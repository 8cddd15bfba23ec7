"""``explain`` with the compiler's answer for the rows of a file, SGLang's real kernel compiled for SM120."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from triton import knobs

from sm120tune import cli
from sm120tune.binaries import Asked, Binaries
from sm120tune.check.resources import Resources
from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.errors import UserError
from sm120tune.explain import best_tile
from sm120tune.measure.model import estimate_gemm, facts_without_compiling
from sm120tune.measure.occupancy import StoredFacts
from sm120tune.measure.routing import BALANCED
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile
from sm120tune.upstream import find_sglang

CARD = find_device(DEFAULT_DEVICE_NAME)
NAME = f"E=64,N=256,device_name={CARD.file_name}"
ROW = Tile(16, 64, 64, 1, 4, 3)
ASK = ("--batch-size", "64")
SHAPE = ("--hidden", "1024", "--topk", "4")


def file_of(folder: Path, selectors: str = "", **changes: Any) -> str:
    path = folder / f"{NAME}{selectors}.json"
    path.write_text(json.dumps({"64": {**ROW.to_row(), **changes}}))
    return str(path)


@pytest.mark.parametrize(
    ("selectors", "more", "dtype", "mma"),
    [
        ("", (), "bf16", "HMMA.16816.F32.BF16"),
        (",dtype=fp8_w8a8", (), "fp8_w8a8", "QMMA.16832.F32.E4M3.E4M3"),
        (",dtype=fp8_w8a8,block_shape=[128, 128]", (), "fp8_w8a8", "QMMA.16832.F32.E4M3.E4M3"),
        (",dtype=fp8_w8a8,per_channel_quant=True", (), "fp8_w8a8", "QMMA.16832.F32.E4M3.E4M3"),
        (",dtype=int8_w8a8,per_channel_quant=True", (), "int8_w8a8", "IMMA.16832.S8.S8.SAT"),
        (",dtype=int8_w8a16", (), "int8_w8a16", "HMMA.16816.F32.BF16"),
        (",dtype=int4_w4a16", ("--group-size", "32"), "int4_w4a16", "HMMA.16816.F32.BF16"),
    ],
)
def test_every_dtype_is_compiled(
    sglang_0_5_23: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    selectors: str,
    more: tuple[str, ...],
    dtype: str,
    mma: str,
) -> None:
    config = file_of(tmp_path, selectors)
    command = ["explain", config, *ASK, *SHAPE, *more, "--sglang", str(sglang_0_5_23)]
    assert cli.run([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["compiled"]["sglang"] == "0.5.23"
    assert document["problem"]["dtype"] == dtype
    for gemm in ("gate_up", "down"):
        row, best = document[gemm]["row"], document[gemm]["best"]
        assert row["facts_from"] == best["facts_from"] == "compiler"
        assert list(row["code"]["mma"]) == [mma]
        assert row["code"]["loop_instructions"] > 0
        assert row["code"]["repeated"] == 1
        assert best["us"] <= row["us"]
    assert cli.run(command) == 0
    said = capsys.readouterr().out
    assert f"{document['gate_up']['row']['code']['mma'][mma]} {mma}" in said
    assert "compiled with triton" in said


def test_spills_are_said_with_where_they_are(
    sglang_0_5_23: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "num_stages": 2}
    command = ["explain", file_of(tmp_path, **large), *ASK, *SHAPE, "--sglang", str(sglang_0_5_23)]
    assert cli.run(command) == 0
    row, best = capsys.readouterr().out.split("  best ")[:2]
    assert "of them in every pass of the main loop" in row
    assert "spills" not in best.split("down:")[0]


def test_the_facts_are_those_of_this_problem(sglang_0_5_23: Path) -> None:
    # Descriptors take a few bytes more than the record's tile without them, which the record cannot know.
    problem = MoEProblem(experts=64, intermediate=256, hidden=1024, topk=4, router_experts=64)
    tree = find_sglang(sglang_0_5_23)
    resources = Resources(tree, 1)
    told: list[str] = []
    tile = Tile(16, 64, 64, 1, 4, 3, USE_TMA=True)
    try:
        binaries = Binaries(tree, resources, problem, 64, CARD, sorted_intermediate=True)
        asked = Asked(problem, 64, CARD, BALANCED, binaries, told.append)
        row, best = asked.row_and_best(Gemm.DOWN, tile)
    finally:
        resources.stop()
    recorded = facts_without_compiling(tile, problem, CARD)
    assert 16 <= row.shared_bytes - recorded.shared_bytes <= 24
    assert row.code is not None
    assert set(row.code.copies) == {"UTMALDG.2D", "UTMALDG.3D"}
    assert best.tile.BLOCK_SIZE_M == 16
    assert not told


def test_the_fastest_tile_is_chosen_by_what_the_compiler_says() -> None:
    problem = MoEProblem(experts=64, intermediate=256, hidden=1024, topk=4, router_experts=64, dtype="fp8_w8a8")
    guessed = best_tile(problem, Gemm.DOWN, 512, CARD, BALANCED, 64)
    asked: list[Tile] = []

    def spilling(tile: Tile) -> StoredFacts:
        asked.append(tile)
        facts = facts_without_compiling(tile, problem, CARD)
        if replace(tile, num_stages=guessed.num_stages) == guessed:
            return StoredFacts(facts.shared_bytes, 255, 5000)
        return StoredFacts(facts.shared_bytes, facts.registers, facts.spill_bytes)

    chosen = best_tile(problem, Gemm.DOWN, 512, CARD, BALANCED, 64, spilling)
    assert asked[0] == guessed
    assert chosen in asked[1:]
    # Other numbers of stages of the tile that spills are not asked for.
    assert len({replace(tile, num_stages=1) for tile in asked}) == len(asked)

    def failing(tile: Tile) -> StoredFacts:
        if tile == guessed:
            raise UserError("does not compile")
        return spilling(tile)

    assert best_tile(problem, Gemm.DOWN, 512, CARD, BALANCED, 64, failing) == chosen
    us = [estimate_gemm(problem, Gemm.DOWN, tile, 512, CARD, None, BALANCED).us for tile in (guessed, chosen)]
    assert us == sorted(us)


def test_without_the_tool_it_goes_on(
    sglang_0_5_23: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vars(type(knobs.nvidia))["nvdisasm"], "default_path", str(tmp_path / "none"))
    assert cli.run(["explain", file_of(tmp_path), *ASK, *SHAPE, "--sglang", str(sglang_0_5_23), "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == said.err.count("has no nvdisasm") == 1
    row = json.loads(said.out)["gate_up"]["row"]
    assert row["facts_from"] == "compiler"
    assert row["code"] is None


def test_without_compiling_the_record_or_a_guess_stands_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for selectors, source in (("", "record"), (",dtype=fp8_w8a8", "guess")):
        assert cli.run(["explain", file_of(tmp_path, selectors), *ASK, *SHAPE, "--no-compile", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["compiled"] is None
        assert document["down"]["row"]["facts_from"] == source
        assert document["down"]["row"]["code"] is None


def test_provenance_says_what_no_name_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = next(Path(__file__).parents[1].joinpath("generated_configs").glob("*/configs/triton_3_8_0"))
    config = next(path for path in sorted(folder.glob("E=*.json")) if not path.stem.endswith("_down"))
    record = json.loads((folder.parents[1] / "provenance" / folder.name / config.name).read_text())["problem"]
    assert cli.run(["explain", str(config), *ASK, "--no-compile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problem"] == record
    assert cli.run(["explain", str(config), *ASK, "--no-compile", "--json", "--topk", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["problem"] == {**record, "topk": 1}
    for option, value, said in (
        ("--group-size", "128", "leave them out"),
        ("--topk", "0", "must be at least 1"),
        ("--topk", "1000", "--topk 1000 cannot be of E="),
        ("--hidden", str(10**30), "is more than any model has"),
    ):
        assert cli.run(["explain", str(config), *ASK, option, value]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("selectors", "changes", "options", "said"),
    [
        ("", {}, ("--topk", "4"), "missing --hidden"),
        (",dtype=int4_w4a16", {}, SHAPE, "needs --group-size"),
        (",dtype=float32", {}, SHAPE, "explain knows bf16"),
        ("", {}, (*SHAPE, "--zero-points"), "bf16 is not quantized"),
        ("", {}, (*SHAPE, "--sglang", "nowhere"), "--sglang nowhere"),
        ("", {}, ("--hidden", "0", "--topk", "4"), "--hidden must be at least 1"),
    ],
)
def test_what_is_missing_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    selectors: str,
    changes: dict[str, int],
    options: tuple[str, ...],
    said: str,
) -> None:
    assert cli.run(["explain", file_of(tmp_path, selectors, **changes), *ASK, *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_row_that_does_not_fit_is_one_line(
    sglang_0_5_23: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = file_of(tmp_path, BLOCK_SIZE_M=128, BLOCK_SIZE_N=128, BLOCK_SIZE_K=128, num_stages=4)
    assert cli.run(["explain", config, *ASK, *SHAPE, "--sglang", str(sglang_0_5_23)]) == 2
    assert "cannot run on NVIDIA RTX PRO 6000" in capsys.readouterr().err
