"""The whole command: vLLM's file to a pair and back, cards that are alike, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from made_pairs import CARD, Maker, copied, rows

from sm120tune import cli
from sm120tune.convert.alias import check_alias
from sm120tune.devices import find_device, known_devices
from sm120tune.errors import UserError
from sm120tune.install import Consent, InstallOptions, find_pairs, install
from sm120tune.provenance import RowStatus, load
from sm120tune.tiles import Tile, TilePair

CARD_FILE = CARD.replace(" ", "_")
WORKSTATION = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
BLOCK_FP8 = f"E=32,N=256,device_name={CARD_FILE},dtype=fp8_w8a8,block_shape=[128,128].json"
LAYER = ["--hidden", "512", "--topk", "4"]
LADDER = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def row(**changes: Any) -> dict[str, Any]:
    """Return a row as vLLM's tuner writes it."""
    base = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    return {**base, "num_warps": 4, "num_stages": 3, **changes}


def ladder(**changes: Any) -> dict[str, Any]:
    return {"triton_version": "3.6.0", **{str(m): row(**changes) for m in LADDER}}


@dataclass(frozen=True)
class Command:
    """Runs the command in this process, in a folder of its own."""

    folder: Path
    site: Path
    capsys: pytest.CaptureFixture[str]

    def write(self, name: str, content: Mapping[str, Any], folder: str = "vllm-configs") -> Path:
        path = self.folder / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        return path

    def run(self, *args: str | Path) -> tuple[int, str, str]:
        extra = ["--sglang", self.site, "--output", self.folder / "out"]
        code = cli.run(["convert", *map(str, [*args, *extra])])
        out, err = self.capsys.readouterr()
        return code, out, err

    def made(self, *args: str | Path) -> dict[str, Any]:
        code, out, err = self.run(*args, "--json")
        assert code == 0, err + out
        document: dict[str, Any] = json.loads(out)
        return document

    def refused(self, *args: str | Path) -> str:
        code, out, err = self.run(*args)
        assert (code, out) == (2, ""), out + err
        assert err.count("\n") == 1
        assert not (self.folder / "out").exists()
        return err


@pytest.fixture
def convert(sglang_0_5_23: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path / "work", sglang_0_5_23, capsys)


def content(path: str | Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(path).read_text())
    return data


# vLLM to SGLang


def test_a_file_of_vllm_becomes_a_pair(convert: Command) -> None:
    source = convert.write(BLOCK_FP8, {"64": row(num_warps=8), **ladder(SPLIT_K=1)})
    made = convert.made(source, "--to", "sglang", *LAYER)
    up, down = map(Path, made["files"])
    # The blank is SGLang's, the folder is the file's own Triton.
    assert up.name == BLOCK_FP8.replace("[128,128]", "[128, 128]")
    assert down.name == up.name.replace(".json", "_down.json")
    assert up.parent == convert.folder / "out" / "converted" / "configs" / "triton_3_6_0"
    assert content(up) == content(down)
    assert list(content(up)) == [str(m) for m in LADDER]
    assert content(up)["1"] == row()
    record = load(Path(made["provenance"][0]))
    assert (record.kind, record.kernel_source_hash) == ("converted", "unknown")
    assert (record.problem.hidden, record.problem.topk, record.problem.dtype) == (512, 4, "fp8_w8a8")
    assert record.search["converted_from"] == "vLLM"
    for one in record.rows:
        assert one.status is RowStatus.CONVERTED
        assert not one.measured
        assert (one.chosen_us, one.today_us, one.ratio, one.error, one.repetitions) == (None, None, None, None, 0)
        assert "nothing was measured here" in one.note


def test_k_is_clamped_as_vllm_does_at_launch(convert: Command) -> None:
    rows = {**ladder(), "64": row(BLOCK_SIZE_K=256)}
    made = convert.made(convert.write(BLOCK_FP8, rows), "--to", "sglang", *LAYER)
    assert content(made["files"][0])["64"]["BLOCK_SIZE_K"] == 128
    assert list(made["notes"]) == ["64"]
    assert "BLOCK_SIZE_K 256 clamped to 128" in made["notes"]["64"]
    assert not [one for one in made["findings"] if one["level"] == "error"]
    notes = {one.m: one.note for one in load(Path(made["provenance"][1])).rows}
    assert "clamped" in notes[64]
    assert "clamped" not in notes[1]
    # The smaller side of the block counts in vLLM.
    narrow = convert.write(BLOCK_FP8.replace("[128,128]", "[64,128]"), ladder())
    made = convert.made(narrow, "--to", "sglang", *LAYER)
    assert content(made["files"][0])["1"]["BLOCK_SIZE_K"] == 64


def test_what_the_card_cannot_run_is_not_written(convert: Command) -> None:
    """Public SM120 files had rows beyond 101,376 B: vLLM's are checked as SGLang's are."""
    source = convert.write(BLOCK_FP8, {**ladder(), "64": row(BLOCK_SIZE_M=128, BLOCK_SIZE_N=256, num_stages=4)})
    code, out, _ = convert.run(source, "--to", "sglang", *LAYER)
    assert code == 1
    assert "148,480 of 101,376 B" in out
    assert "nothing was written" in out
    assert not (convert.folder / "out").exists()


def test_bf16_rows_are_compiled_for_the_card(convert: Command) -> None:
    name = f"E=32,N=256,device_name={CARD_FILE}.json"
    source = convert.write(name, {"triton_version": "3.6.0", "1": row(BLOCK_SIZE_N=256, num_stages=5)})
    code, out, err = convert.run(source, "--to", "sglang", *LAYER)
    assert code == 1
    assert "compiling" in err
    assert "of 101,376 B" in out


def test_int4_without_provenance_has_groups_that_nobody_knows(convert: Command) -> None:
    source = convert.write(f"E=32,N=256,device_name={CARD_FILE},dtype=int4_w4a16.json", {"1": row()})
    card = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    assert "no provenance for it" in convert.refused(source, "--alias-device", card, "--triton", "3.6.0", *LAYER)


def test_sparse_ladders_are_said(convert: Command) -> None:
    source = convert.write(BLOCK_FP8, {"triton_version": "3.6.0", "8": row(), "64": row()})
    made = convert.made(source, "--to", "sglang", *LAYER)
    assert {"ladder-short", "ladder-start", "ladder-gap"} <= {one["code"] for one in made["findings"]}


def test_without_triton_version_a_person_says_it(convert: Command) -> None:
    rows = {key: value for key, value in ladder().items() if key != "triton_version"}
    source = convert.write(BLOCK_FP8, rows)
    assert "give --triton" in convert.refused(source, "--to", "sglang", *LAYER)
    made = convert.made(source, "--to", "sglang", *LAYER, "--triton", "3.5.1")
    assert Path(made["files"][0]).parent.name == "triton_3_5_1"


def test_per_channel_is_named_where_a_person_says_it(convert: Command) -> None:
    source = convert.write(f"E=32,N=256,device_name={CARD_FILE},dtype=fp8_w8a8.json", ladder())
    made = convert.made(source, "--to", "sglang", *LAYER, "--per-channel")
    assert made["files"][0].endswith(",dtype=fp8_w8a8,per_channel_quant=True.json")


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        (BLOCK_FP8.replace("fp8_w8a8", "int4_w4a16"), ladder(), "int4_w4a16 is not converted"),
        (BLOCK_FP8.replace("fp8_w8a8", "int8_w8a8"), ladder(), "int8_w8a8 is not converted"),
        (BLOCK_FP8, ladder(SPLIT_K=4), "SPLIT_K 4"),
        (BLOCK_FP8, ladder(waves_per_eu=2), "unknown field 'waves_per_eu'"),
        (BLOCK_FP8, {"triton_version": "3.6.0"}, "no rows"),
        (BLOCK_FP8, {"one": row()}, "key 'one'"),
        (BLOCK_FP8, {"1": {"BLOCK_SIZE_M": 16}}, "no BLOCK_SIZE_N"),
        (BLOCK_FP8, {"1": [1]}, "must be a JSON object"),
        (BLOCK_FP8.replace(".json", "_down.json"), ladder(), "vLLM has no _down files"),
        ("tuned.json", ladder(), "not that of a config file"),
        (f"E={10**30},N=256,device_name={CARD_FILE}.json", ladder(), f"E of its name {10**30} is more than"),
    ],
)
def test_files_that_mean_something_else(convert: Command, name: str, rows: dict[str, Any], words: str) -> None:
    assert words in convert.refused(convert.write(name, rows), "--to", "sglang", *LAYER)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "say what to make"),
        (["--to", "sglang", "--topk", "4"], "missing --hidden"),
        (["--to", "sglang", "--hidden", "512"], "missing --topk"),
        (["--to", "sglang", "--hidden", "0", "--topk", "4"], "--hidden must be at least 1"),
        (["--to", "sglang", "--hidden", str(10**30), "--topk", "4"], f"--hidden {10**30} is more than any model has"),
        (["--to", "sglang", *LAYER, "--use", "up"], "--use up is for --to vllm"),
        (["--to", "vllm", "--alias-device", WORKSTATION], "leave out --to vllm"),
        (["--to", "sglang", *LAYER, "--triton", "3.7rc1"], "no release version"),
        (["--to", "sglang", *LAYER, "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_bad_input(convert: Command, args: list[str], words: str) -> None:
    assert words in convert.refused(convert.write(BLOCK_FP8, ladder()), *args)


def test_a_second_conversion_needs_replace(convert: Command) -> None:
    source = convert.write(BLOCK_FP8, ladder())
    convert.made(source, "--to", "sglang", *LAYER)
    changed = convert.write(BLOCK_FP8, ladder(num_warps=8))
    code, _, err = convert.run(changed, "--to", "sglang", *LAYER)
    assert code == 2
    assert "give --replace" in err
    made = convert.made(changed, "--to", "sglang", *LAYER, "--replace")
    assert content(made["files"][1])["1"]["num_warps"] == 8


def test_a_rank_that_holds_fewer_experts_than_a_token_chooses(convert: Command) -> None:
    source = convert.write(f"E=2,N=256,device_name={CARD_FILE}.json", ladder())
    made = convert.made(source, "--to", "sglang", *LAYER)
    problem = load(Path(made["provenance"][0])).problem
    assert (problem.experts, problem.topk, problem.router_experts, problem.expert_parallel) == (2, 4, 4, True)


def test_install_takes_it_only_unmeasured(convert: Command, tmp_path: Path) -> None:
    site = copied(convert.site, tmp_path / "copy", without_configs=True)
    source = convert.write(BLOCK_FP8, {**ladder(), "triton_version": Maker(site, tmp_path).place.triton_version})
    made = convert.made(source, "--to", "sglang", *LAYER)
    place, pairs = Maker(site, tmp_path).place, find_pairs([Path(made["files"][0])])
    with pytest.raises(UserError, match="converted, not measured"):
        install(pairs, place, InstallOptions())
    # The kernel it was made for is not known, which is no reason to force anything.
    outcome = install(pairs, place, InstallOptions(Consent(allow_estimated=True)))
    assert outcome.pairs[0].state == "installed"


# SGLang to vLLM


def sglang_pair(convert: Command, up: dict[str, Any], down: dict[str, Any] | None, rest: str = "") -> Path:
    name = f"E=32,N=256,device_name={CARD_FILE}{rest}"
    if down is not None:
        convert.write(f"{name}_down.json", down, "configs/triton_3_6_0")
    return convert.write(f"{name}.json", up, "configs/triton_3_6_0")


def test_a_pair_of_equal_rows_becomes_one_file(convert: Command) -> None:
    rows = {str(m): row() for m in LADDER}
    source = sglang_pair(convert, rows, rows, ",dtype=fp8_w8a8,block_shape=[128, 128]")
    made = convert.made(source, "--to", "vllm")
    assert Path(made["file"]).name == BLOCK_FP8
    assert content(made["file"]) == {"triton_version": "3.6.0", **rows}
    assert next(iter(content(made["file"]))) == "triton_version"
    assert made["lost"] == []
    # And back to what it was.
    pair = convert.made(Path(made["file"]), "--to", "sglang", *LAYER)
    assert content(pair["files"][0]) == content(pair["files"][1]) == rows


def test_a_lone_up_file_serves_both(convert: Command) -> None:
    made = convert.made(sglang_pair(convert, {"1": row()}, None), "--to", "vllm")
    assert (made["rows"], made["lost"]) == (1, [])


def test_where_up_and_down_differ_a_person_chooses(convert: Command) -> None:
    up, down = {"1": row(), "64": row()}, {"1": row(), "64": row(num_stages=2)}
    source = sglang_pair(convert, up, down)
    assert "up and down rows differ at M=64" in convert.refused(source, "--to", "vllm")
    for use, stages, other in (("up", 3, "down"), ("down", 2, "up")):
        made = convert.made(source, "--to", "vllm", "--use", use, "--replace")
        assert content(made["file"])["64"]["num_stages"] == stages
        assert made["lost"] == [f"the {other} rows at M=64: vLLM runs the {use} rows in both GEMMs"]


def test_tma_and_per_channel_are_lost_and_said(convert: Command) -> None:
    up, down = {"1": row()}, {"1": row(USE_TMA=True)}
    source = sglang_pair(convert, up, down, ",dtype=fp8_w8a8,per_channel_quant=True")
    made = convert.made(source, "--to", "vllm")
    assert "USE_TMA" not in content(made["file"])["1"]
    assert Path(made["file"]).name == f"E=32,N=256,device_name={CARD_FILE},dtype=fp8_w8a8.json"
    assert [loss.split(" ")[0] for loss in made["lost"]] == ["USE_TMA", "per_channel_quant:"]


def test_the_h200_family_has_one_name_in_vllm(convert: Command) -> None:
    source = convert.write("E=8,N=64,device_name=NVIDIA_H200_NVL.json", {"1": row()}, "configs/triton_3_6_0")
    made = convert.made(source, "--to", "vllm")
    assert Path(made["file"]).name == "E=8,N=64,device_name=NVIDIA_H200.json"


def test_a_damaged_pair_is_refused(convert: Command) -> None:
    source = sglang_pair(convert, {"1": row(), "triton_version": "3.6.0"}, None)
    assert "no integer" in convert.refused(source, "--to", "vllm")


# Another card


def test_a_pair_of_ours_for_a_card_of_the_same_die(convert: Command, tmp_path: Path) -> None:
    maker = Maker(convert.site, tmp_path / "tuned")
    written = maker.write(rows(1, 64))
    made = convert.made(written.down_path, "--alias-device", WORKSTATION.replace(" ", "_"))
    up, down = map(Path, made["files"])
    assert f"device_name={WORKSTATION.replace(' ', '_')}.json" in up.name
    assert up.read_bytes() == written.up_path.read_bytes()
    assert down.read_bytes() == written.down_path.read_bytes()
    record, before = load(Path(made["provenance"][0])), load(written.provenance_paths[0])
    assert (record.kind, record.device["name"]) == ("converted", WORKSTATION)
    assert record.kernel_source_hash == before.kernel_source_hash
    assert record.search["device"] == CARD
    assert all(CARD in one.note and "tuned on" in one.note and not one.measured for one in record.rows)
    assert all(one.chosen_us is None for one in record.rows)


def test_a_shipped_pair_for_a_card_of_the_same_die(convert: Command) -> None:
    shipped = next(convert.site.rglob(f"triton_3_6_0/E=256,N=512,device_name={CARD_FILE}.json"))
    made = convert.made(shipped, "--alias-device", WORKSTATION, "--hidden", "2048", "--topk", "8")
    assert content(made["files"][0]) == content(shipped)
    assert load(Path(made["provenance"][0])).versions["triton"] == "3.6.0"


def test_cards_that_are_not_alike(convert: Command, tmp_path: Path) -> None:
    source = Maker(convert.site, tmp_path / "tuned").write(rows(1)).up_path
    for alias, words in (
        ("NVIDIA H200", "no NVIDIA RTX PRO 6000"),
        ("NVIDIA GB10", "capability"),
        ("NVIDIA GeForce RTX 5080", "84 SMs"),
        ("NVIDIA RTX 9000", "near names"),
        (CARD, "the card of the file already"),
    ):
        assert words in convert.refused(source, "--alias-device", alias)


def test_differences_of_like_cards_are_told() -> None:
    _, differences = check_alias(CARD, "NVIDIA GeForce RTX 5090")
    assert differences == "170 instead of 188 SMs, 96 instead of 128 MB of L2"
    target, differences = check_alias(CARD, WORKSTATION)
    assert (target, differences) == (find_device(WORKSTATION), "")
    with pytest.raises(UserError, match="no known card"):
        check_alias("NVIDIA Tesla", CARD)
    # Every alias of a known card keeps what decides whether a row runs at all.
    for one in known_devices():
        for other in known_devices():
            if one != other and one.shared_memory_per_block != other.shared_memory_per_block:
                with pytest.raises(UserError):
                    check_alias(one.name, other.name)


def test_alias_of_a_mixed_pair_without_provenance(convert: Command) -> None:
    """Keys of either file become keys of both, with the rows that SGLang would pair."""
    up, down = {"1": row(), "64": row(BLOCK_SIZE_M=64)}, {"1": row(num_stages=2)}
    source = sglang_pair(convert, up, down)
    made = convert.made(source, "--alias-device", WORKSTATION, *LAYER)
    pairs = load(Path(made["provenance"][0])).rows
    assert {one.m: one.chosen for one in pairs} == {
        1: TilePair(Tile(16, 64, 128, 1, 4, 3), Tile(16, 64, 128, 1, 4, 2)),
        64: TilePair(Tile(64, 64, 128, 1, 4, 3), Tile(64, 64, 128, 1, 4, 2)),
    }
