from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm120tune import cli
from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.errors import UserError
from sm120tune.explain import best_tile, explain
from sm120tune.measure.model import estimate_gemm
from sm120tune.measure.routing import BALANCED
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile

CARD = find_device(DEFAULT_DEVICE_NAME)
QWEN = MoEProblem(experts=256, intermediate=512, hidden=2048, topk=8, router_experts=256)
NAME = f"E=256,N=512,device_name={CARD.file_name}"
ROW = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3}


def test_counts_follow_from_the_routing() -> None:
    # Balanced: every expert has 4096 * 8 / 256 = 128 rows, two blocks of 64.
    found = explain(QWEN, Gemm.GATE_UP, Tile(64, 128, 64, 8), 4096, CARD, BALANCED)
    assert found.blocks == 256 * 2 * 1024 // 128
    assert found.padding == 0.0
    assert found.waves == pytest.approx(found.blocks / (CARD.sm_count * found.blocks_per_sm))
    assert found.memory_bytes == 2 * (256 * 1024 * 2048 + 4096 * 2048 + 4096 * 8 * 1024)
    assert found.facts_from == "record"
    half = explain(QWEN, Gemm.GATE_UP, Tile(256, 64, 32, 8, 8, 3), 4096, CARD, BALANCED)
    assert half.padding == 0.5


def test_time_and_bound_are_those_of_the_model() -> None:
    tile = Tile(64, 64, 32, 8)
    found = explain(QWEN, Gemm.DOWN, tile, 1024, CARD, BALANCED)
    estimate = estimate_gemm(QWEN, Gemm.DOWN, tile, 1024, CARD, None, BALANCED)
    assert (found.us, found.bound) == (estimate.us, estimate.bound)
    assert found.bound == max(found.terms_us, key=found.terms_us.__getitem__)


@pytest.mark.parametrize("gemm", list(Gemm))
def test_best_tile_is_no_slower_than_any_other_of_its_rows(gemm: Gemm) -> None:
    best = best_tile(QWEN, gemm, 4096, CARD, BALANCED, 64)
    assert best.BLOCK_SIZE_M == 64
    us = estimate_gemm(QWEN, gemm, best, 4096, CARD, None, BALANCED).us
    for other in (Tile(64, 64, 64, 1), Tile(64, 128, 128, 1, 8, 2), Tile(64, 64, 32, 8)):
        assert us <= estimate_gemm(QWEN, gemm, other, 4096, CARD, None, BALANCED).us


def test_a_tile_that_cannot_run_says_what_it_lacks() -> None:
    with pytest.raises(UserError, match="shared memory"):
        explain(QWEN, Gemm.GATE_UP, Tile(128, 256, 128, 8, 8, 4), 4096, CARD, BALANCED)


def written(folder: Path, up: object, down: object = None) -> str:
    for name, rows in ((NAME, up), (f"{NAME}_down", down)):
        if rows is not None:
            (folder / f"{name}.json").write_text(json.dumps(rows))
    return str(folder / f"{NAME}.json")


ASK = ["--hidden", "2048", "--topk", "8", "--batch-size"]


def test_command_says_what_serves_m_and_what_would_be_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {**ROW, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}
    config = written(tmp_path, {"64": {**ROW, "BLOCK_SIZE_M": 16}, "4096": ROW}, {"64": ROW, "4096": wide})
    assert cli.run(["explain", config, *ASK, "3000", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gate_up"]["row"]["tile"] == ROW
    assert document["down"]["row"]["tile"] == wide
    assert document["gate_up"]["best"]["us"] < document["gate_up"]["row"]["us"]
    assert document["gate_up"]["row"]["measured"] is False
    assert cli.run(["explain", config, *ASK, "3000"]) == 0
    text = capsys.readouterr().out
    assert "ESTIMATES" in text
    assert "64x64x32 g8 w4 s3" in text


def test_without_a_down_file_the_up_rows_serve_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["explain", written(tmp_path, {"64": ROW}), *ASK, "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["down"]["row"]["tile"] == ROW


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (f"{NAME}.json", "{}", "has no row"),
        (f"{NAME}.json", "[]", "no SGLang config file"),
        (f"{NAME}.json", '{"64": 5}', "a row must be an object"),
        (f"{NAME}.json", json.dumps({"64": {**ROW, "BLOCK_SIZE_N": 48}}), "BLOCK_SIZE_N 48 is no power of two"),
        (
            f"{NAME}.json",
            json.dumps({"64": {**ROW, "GROUP_SIZE_M": 10**400}}),
            "GROUP_SIZE_M must be a positive integer",
        ),
        (f"{NAME}.json", None, "cannot be read"),
        ("tiles.json", "{}", "is no name"),
        (f"{NAME},dtype=fp8_w4a4.json", "{}", "explain knows bf16"),
    ],
)
def test_what_cannot_be_explained_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert cli.run(["explain", str(tmp_path / name), *ASK, "64"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--batch-size", "0", "--batch-size must be at least 1, not 0\n"),
        ("--batch-size", str(2**20 + 1), "--batch-size 1048577 is more than"),
        ("--hidden", str(10**30), f"--hidden {10**30} is more than"),
        ("--topk", "257", "--topk 257 is more than --experts 256"),
    ],
)
def test_a_wrong_number_names_its_own_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, said: str
) -> None:
    config = written(tmp_path, {"64": ROW})
    assert cli.run(["explain", config, *ASK, "64", "--no-compile", option, value]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
