from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from check_trees import CARD_FILE, check, codes, errors, ladder, name, only, row, write

from sm120tune.check import Level

BLOCK = ",dtype=fp8_w8a8,block_shape=[128, 128]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "triton_3_8_0"


def test_a_sound_pair_has_no_findings(folder: Path) -> None:
    write(folder, name(), ladder())
    write(folder, name(rest="_down"), ladder())
    report = check(folder)
    assert codes(report) == {"lower-bound"}
    assert len(report.files) == 2


@pytest.mark.parametrize("text", ["", "{", '{"1": ', "[1]", "\x00", '{"1": NaN}', "null"])
def test_damaged_json(folder: Path, text: str) -> None:
    assert errors(check(write(folder, name(), text))) == {"json-damaged"}


def test_an_empty_file_is_as_good_as_none(folder: Path) -> None:
    report = check(write(folder, name(), "{}"))
    assert only(report.findings, "empty").level is Level.WARNING
    assert errors(report) == set()


def test_a_key_given_twice(folder: Path) -> None:
    rows = ", ".join(f'"{m}": {json.dumps(row())}' for m in (1, 4, 16, 64, 256, 1024, 4096, 16384, 4))
    report = check(write(folder, name(), f"{{{rows}}}"))
    assert only(report.findings, "key-repeated").level is Level.WARNING
    assert errors(report) == set()


def test_row_23_vendor_key(folder: Path) -> None:
    report = check(write(folder, name(), {"triton_version": "3.8.0", **ladder()}))
    finding = only(report.findings, "key-not-integer")
    assert finding.level is Level.ERROR
    assert finding.key == "triton_version"
    assert "vLLM" in finding.what


def test_row_23_unsorted_keys(folder: Path) -> None:
    rows = {key: row() for key in ("1", "64", "2", "16", "8", "256", "1024", "4096", "16384")}
    finding = only(check(write(folder, name(), rows)).findings, "keys-unsorted")
    assert finding.level is Level.WARNING
    # 12 lies between 8 and 16, 40 between 16 and 64; 5 between 2 and 8 goes to 2, which comes first.
    assert "M=12, 40 the tie" in finding.what


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"SPLIT_K": 1}, "field-unknown"),
        ({"num_warps": 3}, "field-value"),
        ({"num_warps": "4"}, "field-value"),
        ({"BLOCK_SIZE_K": 48}, "field-value"),
        ({"BLOCK_SIZE_N": 0}, "field-value"),
        ({"GROUP_SIZE_M": True}, "field-value"),
        ({"num_stages": 2.0}, "field-value"),
        ({"GROUP_SIZE_M": 2**31}, "field-value"),
        ({"BLOCK_SIZE_N": 2**100}, "field-value"),
        ({"USE_TMA": 1}, "field-value"),
    ],
)
def test_rows_that_no_launch_takes(folder: Path, changes: dict[str, Any], code: str) -> None:
    rows = {**ladder(), "16": row(**changes)}
    report = check(write(folder, name(rest="_down"), rows))
    finding = only(report.findings, code)
    assert (finding.level, finding.key) == (Level.ERROR, "16")


@pytest.mark.parametrize("field", ["BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M"])
def test_a_missing_field(folder: Path, field: str) -> None:
    short = {key: value for key, value in row().items() if key != field}
    report = check(write(folder, name(), {**ladder(), "64": short}))
    assert field in only(report.findings, "field-missing").what
    assert errors(report) == {"field-missing"}


def test_warps_and_stages_may_be_missing(folder: Path) -> None:
    short = {key: value for key, value in row().items() if not key.startswith("num_")}
    assert errors(check(write(folder, name(), {**ladder(), "64": short}))) == set()


@pytest.mark.parametrize("value", [None, 4, "row", []])
def test_a_row_that_is_no_object(folder: Path, value: object) -> None:
    assert errors(check(write(folder, name(), {**ladder(), "64": value}))) == {"row-not-object"}


def test_row_13_k_larger_than_the_group(folder: Path) -> None:
    rows = {**ladder(), "1": row(BLOCK_SIZE_K=128), "64": row(BLOCK_SIZE_K=256), "256": row(BLOCK_SIZE_K=256)}
    finding = only(check(write(folder, name(rest=BLOCK), rows)).findings, "k-over-group")
    assert finding.level is Level.ERROR
    assert finding.key == "64, 256"
    # Without groups the same rows are sound.
    assert errors(check(write(folder, name(rest=",dtype=fp8_w8a8"), rows))) == set()


def test_tma_over_an_uneven_k(folder: Path) -> None:
    rows = ladder(BLOCK_SIZE_K=128, USE_TMA=True)
    assert errors(check(write(folder, name(inter=192, rest="_down"), rows))) == {"tma-uneven"}
    assert errors(check(write(folder, name(inter=256, rest="_down"), rows))) == set()


def test_row_15_a_file_that_stops_at_64(folder: Path) -> None:
    path = write(folder, name(), {str(m): row() for m in (1, 4, 16, 64)})
    finding = only(check(path).findings, "ladder-short")
    assert finding.level is Level.WARNING
    assert "64" in finding.what
    assert "16384" in finding.what
    # A server that never sees more tokens has no use for more keys.
    assert "ladder-short" not in codes(check(path, last=128))
    assert "ladder-short" in codes(check(path, last=129))


def test_row_15_gaps_and_a_late_start(folder: Path) -> None:
    report = check(write(folder, name(), {str(m): row() for m in (8, 16, 128, 512, 2048, 8192)}))
    assert "16 to 128" in only(report.findings, "ladder-gap").what
    assert "8" in only(report.findings, "ladder-start").what
    assert "ladder-short" not in codes(report)


@pytest.mark.parametrize("bad", ["triton_3_7_0rc1", "triton_", "triton_3_8_0.bak", "triton_main"])
def test_row_11_a_version_folder_that_makes_sglang_raise(folder: Path, bad: str) -> None:
    path = write(folder, name(), ladder())
    assert errors(check(path)) == set()
    (folder.parent / bad).mkdir()
    finding = only(check(path).findings, "folder-version")
    assert (finding.level, finding.file) == (Level.ERROR, bad)


def test_shared_memory_by_the_formula(folder: Path) -> None:
    def big(stages: int) -> dict[str, Any]:
        return row(128, BLOCK_SIZE_N=256, BLOCK_SIZE_K=128, num_warps=8, num_stages=stages)

    rows = {**ladder(), "1024": big(4), "4096": big(3)}
    report = check(write(folder, name(rest=",dtype=fp8_w8a8"), rows))
    found = [finding for finding in report.findings if finding.code == "shared-memory"]
    # 3 * (128 + 256) * 128; two stages less one need 98,304 and fit.
    assert [finding.key for finding in found] == ["1024", "1024"]
    assert all("at least 147,456 of 101,376 B" in finding.what for finding in found)
    assert {finding.what.split()[0] for finding in found} == {"gate_up", "down"}
    assert "lower-bound" in codes(report)


def test_the_card_in_the_name_sets_the_limit(folder: Path) -> None:
    rows = ladder(block_m=128, BLOCK_SIZE_N=256, BLOCK_SIZE_K=128, num_stages=4)
    rest = ",dtype=fp8_w8a8"
    assert errors(check(write(folder, name(device="NVIDIA_H200", rest=rest), rows))) == set()
    assert errors(check(write(folder, name(device=CARD_FILE, rest=rest), rows))) == {"shared-memory"}


def test_two_folders_with_the_same_names_are_told_apart(tmp_path: Path) -> None:
    for part in ("one", "two"):
        write(tmp_path / part, name(), "{}")
    report = check(tmp_path / "one", tmp_path / "two")
    empty = [finding.file for finding in report.findings if finding.code == "empty"]
    assert empty == [str(tmp_path / part / name()) for part in ("one", "two")]


def test_rows_that_are_not_staged_have_no_bound(folder: Path) -> None:
    rows = ladder(block_m=128, BLOCK_SIZE_N=256, BLOCK_SIZE_K=128, num_stages=4)
    for inter, gemms in ((256, {"gate_up", "down"}), (250, {"gate_up"})):
        report = check(write(folder, name(inter=inter, rest=",dtype=fp8_w8a8"), rows))
        found = {finding.what.split()[0] for finding in report.findings if finding.code == "shared-memory"}
        assert found == gemms
