from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from check_trees import CARD, CARD_FILE, DATA, Copy, ladder, name, row, write

from sm120tune import cli

LAYER = ["--experts", "32", "--inter", "256", "--hidden", "512", "--topk", "4"]


class Command:
    """The check command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *args: str | Path) -> tuple[int, str, str]:
        code = cli.run(["check", *map(str, args)])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def document(self, *args: str | Path) -> tuple[int, dict[str, Any]]:
        code, out, _ = self.run(*args, "--json")
        document = json.loads(out)
        assert isinstance(document, dict)
        return code, document

    def refused(self, *args: str | Path) -> str:
        code, out, err = self.run(*args)
        assert (code, out) == (2, ""), err
        assert err.startswith("sm120tune: error: ")
        assert err.count("\n") == 1
        return err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    handler = signal.getsignal(signal.SIGTERM)
    yield Command(capsys)
    signal.signal(signal.SIGTERM, handler)


def test_the_eight_files(command: Command, sglang_0_5_23: Path) -> None:
    code, document = command.document(DATA, "--sglang", sglang_0_5_23)
    assert code == 0
    assert len(document["files"]) == 8
    assert (document["counts"]["error"], document["counts"]["warning"]) == (0, 14)
    found = {(finding["code"], finding["file"].split(",")[0]) for finding in document["findings"]}
    assert ("keys-unsorted", "triton_3_7_1/E=288") in found
    assert ("ladder-gap", "triton_3_7_1/E=36") in found
    assert ("related-key", "triton_3_7_1/E=36") in found
    # 64x128x128 with 4 warps over fp8 blocks keeps a few registers too many.
    assert ("spills", "triton_3_7_1/E=64") in found
    assert document["sglang"]["version"] == "0.5.23"


def test_row_7_the_eight_files_hold_one_with_a_wrong_key(command: Command, sglang_0_5_23: Path) -> None:
    _, out, _ = command.run(DATA, "--sglang", sglang_0_5_23)
    lines = [line for line in out.splitlines() if "E=36 is 288/8" in line]
    assert len(lines) == 1
    assert lines[0].startswith("  info    related-key")


def test_a_tree_is_audited_for_a_card(command: Command, newest: Copy) -> None:
    for file in sorted(DATA.glob("triton_*/*.json")):
        shutil.copy(
            file, newest.write("made.json", "{}", file.parent.name.removeprefix("triton_")).with_name(file.name)
        )
    args = ["--sglang", newest.tree.package.parent]
    code, document = command.document(*args, "--device", CARD)
    assert code == 0
    assert len(document["files"]) == 4
    assert all(CARD_FILE in file for file in document["files"])
    # In the server's own tree a partner that is not there is nowhere.
    assert {f["level"] for f in document["findings"] if f["code"] == "partner-missing"} == {"info"}
    assert len(command.document(*args, "--all-cards")[1]["files"]) == 8


def test_errors_make_the_exit_code_1(command: Command, tmp_path: Path, newest: Copy) -> None:
    path = write(tmp_path, name(rest=",dtype=fp8_w8a8"), {**ladder(), "triton_version": "3.8.0"})
    code, out, _ = command.run(path, "--sglang", newest.tree.package.parent)
    assert code == 1
    assert f"{path}\n  error   key-not-integer [triton_version]: " in out
    assert out.splitlines()[-1].startswith("files read: 1; findings: 1 error, ")


def test_a_layer_is_compiled_for_the_card(command: Command, newest: Copy) -> None:
    newest.write(name(), {"1": row(), "32": row(32)})
    newest.write(name(rest="_down"), {"1": row(), "32": row(32)})
    args = [*LAYER, "--device", CARD, "--sglang", newest.tree.package.parent, "--max-tokens", "64", "--workers", "2"]
    code, out, err = command.run(*args)
    assert code == 0, err
    # 2 stages of (16 + 64) * 64 and (32 + 64) * 64 elements.
    assert "1-16   1 | 1    16x64x64 g1 w4 s3  20,480 B " in out
    assert "17-64  32 | 32  32x64x64 g1 w4 s3  24,576 B " in out
    assert f"the server asks for {name()}\n" in out
    assert "NVFP4" in out


def test_a_quantized_layer(command: Command, newest: Copy) -> None:
    args = [*LAYER, "--dtype", "fp8_w8a8", "--block-shape", "128,128", "--device", CARD]
    code, document = command.document(*args, "--sglang", newest.tree.package.parent)
    assert code == 0
    assert document["server"]["asked"][0] == name(rest=",dtype=fp8_w8a8,block_shape=[128, 128]")
    # SGLang's default: 64 rows, the block, three stages.
    span = document["server"]["spans"][0]
    staged = 2 * (64 + 128) * 128
    assert span["gate_up_use"]["exact"] is True
    assert staged <= span["gate_up_use"]["shared_bytes"] <= staged + 1024


@pytest.mark.parametrize("zeros", [[], ["--zero-points"]])
def test_groups_are_compiled_as_what_they_are(command: Command, newest: Copy, zeros: list[str]) -> None:
    rest = ",dtype=int4_w4a16"
    newest.write(name(inter=128, rest=rest), {"1": row(BLOCK_SIZE_K=128)})
    # The kernel for groups takes no notice of USE_TMA, and does not say so either.
    newest.write(name(inter=128, rest=f"{rest}_down"), {"1": row(BLOCK_SIZE_K=128, USE_TMA=True)})
    where = ["--device", CARD, "--sglang", newest.tree.package.parent, "--workers", "2"]
    code, document = command.document(*LAYER, "--dtype", "int4_w4a16", "--group-size", "64", *zeros, *where)
    assert code == 0
    (span,) = document["server"]["spans"]
    assert (
        f"int4_w4a16 group 64{' with zero points' if zeros else ''} on"
        in command.run(*LAYER, "--dtype", "int4_w4a16", "--group-size", "64", *zeros, *where)[1]
    )
    # A step of 128 over two groups of 64 is right, and the launch is known exactly.
    assert not {f["code"] for f in document["findings"]} & {"k-over-group", "k-ragged", "tma-uneven", "lower-bound"}
    for use in (span["gate_up_use"], span["down_use"]):
        assert use["exact"] is True
        # A alone is staged.
        assert use["shared_bytes"] >= 2 * 16 * 128 * 2
    # Without the group nothing is compiled.
    code, document = command.document(*LAYER, "--dtype", "int4_w4a16", *where)
    assert code == 0
    assert document["server"]["spans"][0]["gate_up_use"]["exact"] is False
    assert "lower-bound" in {f["code"] for f in document["findings"]}


def test_int8_with_groups_is_another_kernel_than_without(command: Command, newest: Copy) -> None:
    newest.write(name(rest=",dtype=int8_w8a16"), {"1": row()})
    newest.write(name(rest=",dtype=int8_w8a16_down"), {"1": row()})
    where = ["--device", CARD, "--sglang", newest.tree.package.parent, "--workers", "2"]
    uses = []
    for how in ([], ["--group-size", "32"]):
        _, document = command.document(*LAYER, "--dtype", "int8_w8a16", *how, *where)
        (span,) = document["server"]["spans"]
        assert span["gate_up_use"]["exact"] is True
        uses.append((span["gate_up_use"]["shared_bytes"], span["gate_up_use"]["registers"]))
    assert uses[0] != uses[1]


def test_a_ragged_step_over_groups_is_a_warning(command: Command, newest: Copy) -> None:
    layer = ["--experts", "32", "--inter", "96", "--dtype", "int4_w4a16", "--group-size", "32"]
    for down in ("", "_down"):
        newest.write(name(inter=48, rest=f",dtype=int4_w4a16{down}"), {"1": row()})
    code, document = command.document(*layer, "--device", CARD, "--sglang", newest.tree.package.parent)
    assert code == 0
    (found,) = [f for f in document["findings"] if f["code"] == "k-ragged"]
    assert (found["level"], found["file"].endswith("_down.json")) == ("warning", True)
    assert "BLOCK_SIZE_K 64 does not divide down's K 96" in found["what"]


def test_expert_parallelism(command: Command, newest: Copy) -> None:
    args = ["--experts", "256", "--tp", "8", "--ep", "8", "--inter", "2048", "--dtype", "int8_w8a16", "--device", CARD]
    _, document = command.document(*args, "--sglang", newest.tree.package.parent)
    assert document["server"]["asked"][0] == name(32, 2048, rest=",dtype=int8_w8a16")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no-such-file.json"], ["no-such-file.json", "no such file"]),
        (["--device", CARD, "--max-tokens", "0"], ["--max-tokens", "0"]),
        (["--experts", "8", "--device", CARD], ["--inter"]),
        (["--experts", "8", "--inter", "64", "file.json"], ["--experts", "file.json"]),
        (["--tp", "0", "file.json"], ["--tp"]),
        ([*LAYER, "--dtype", "fp4", "--device", CARD], ["--dtype fp4", "fp8_w8a8"]),
        ([*LAYER, "--block-shape", "128", "--dtype", "fp8_w8a8", "--device", CARD], ["--block-shape '128'", "128,128"]),
        ([*LAYER, "--block-shape", "128,128", "--device", CARD], ["--block-shape", "bf16"]),
        ([*LAYER, "--group-size", "128", "--device", CARD], ["--group-size", "bf16"]),
        ([*LAYER, "--dtype", "float32", "--group-size", "128", "--device", CARD], ["--group-size", "float32"]),
        ([*LAYER, "--dtype", "int4_w4a16", "--group-size", "48", "--device", CARD], ["--group-size 48", "128"]),
        ([*LAYER, "--dtype", "int4_w4a16", "--zero-points", "--device", CARD], ["int4_w4a16 needs --group-size"]),
        (["file.json", "--group-size", "128"], ["--group-size", "file.json"]),
        (["--device", "RTX 9999"], ["RTX 9999", "unknown"]),
        (["--device", CARD, "--all-cards"], ["--all-cards"]),
        ([], ["nothing to check"]),
        (["--device", "NVIDIA GB10"], ["no file for NVIDIA GB10"]),
    ],
)
def test_bad_input(command: Command, newest: Copy, args: list[str], words: list[str]) -> None:
    said = command.refused(*args, "--sglang", newest.tree.package.parent)
    for word in words:
        assert word in said


def test_a_folder_without_config_files(command: Command, tmp_path: Path) -> None:
    write(tmp_path, "notes.json", "{}")
    assert "no config file" in command.refused(tmp_path)


def test_copies_of_provenance_are_no_config_files(command: Command, tmp_path: Path, newest: Copy) -> None:
    write(tmp_path / "configs" / "triton_3_8_0", name(rest=",dtype=fp8_w8a8"), ladder())
    write(tmp_path / "provenance" / "triton_3_8_0", name(rest=",dtype=fp8_w8a8"), {"schema": 1})
    code, document = command.document(tmp_path, "--sglang", newest.tree.package.parent)
    assert code == 0
    assert document["files"] == [f"configs/triton_3_8_0/{name(rest=',dtype=fp8_w8a8')}"]


def test_nothing_is_changed(command: Command, newest: Copy) -> None:
    newest.write(name(), {**ladder(), "vendor": 1})
    before = {path: path.read_bytes() for path in newest.tree.package.rglob("*") if path.is_file()}
    command.run(*LAYER, "--dtype", "int8_w8a8", "--device", CARD, "--sglang", newest.tree.package.parent)
    command.run("--device", CARD, "--sglang", newest.tree.package.parent)
    assert {path: path.read_bytes() for path in newest.tree.package.rglob("*") if path.is_file()} == before
