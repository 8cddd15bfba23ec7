from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from check_trees import Copy, check, codes, errors, ladder, name, only, problem, row, write
from wheels import VERSIONS, Trees

from sm120tune.check import Level
from sm120tune.check.resources import Resources
from sm120tune.check.rules import Rules, rules_of
from sm120tune.upstream import find_sglang

DOWN = name(rest="_down")
OLD = Rules("0.5.12", up_tma=False, overrides_block_m=False)
NEW = Rules("0.5.23", up_tma=True, overrides_block_m=True)
MIXED_BYTES = 2 * (128 + 128) * 128 * 2
"""What the down row of the mixes below needs with the up row's BLOCK_SIZE_M of 128: over the card's limit."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "triton_3_8_0"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_rules_of_every_release(sglang_trees: Trees, version: str) -> None:
    number = tuple(int(part) for part in version.split(".")[:3])
    rules = rules_of(find_sglang(sglang_trees[version]))
    assert rules == Rules(version, up_tma=number >= (0, 5, 18), overrides_block_m=number >= (0, 5, 15))


def test_row_14_a_lone_up_file(folder: Path) -> None:
    report = check(write(folder, name(), ladder()))
    finding = only(report.findings, "partner-missing")
    assert finding.level is Level.WARNING
    assert "_down" in finding.what


def test_row_14_a_lone_down_file(folder: Path) -> None:
    report = check(write(folder, DOWN, ladder()))
    assert "built-in default" in only(report.findings, "partner-missing").what


def test_row_14_a_new_up_file_meets_an_older_down_file(folder: Path) -> None:
    path = write(folder, name(), ladder())
    write(folder.parent / "triton_3_6_0", DOWN, ladder())
    write(folder.parent / "triton_3_7_1", DOWN, ladder(block_m=32))
    report = check(path, rules=NEW)
    # The newest of the others, as SGLang searches.
    assert f"triton_3_7_1/{DOWN}" in only(report.findings, "partner-other-folder").what
    assert "pair-block-m" in codes(report)


@pytest.mark.parametrize(("rules", "level"), [(OLD, Level.ERROR), (Rules(), Level.ERROR), (NEW, Level.WARNING)])
def test_row_14_another_block_size_m(folder: Path, rules: Rules, level: Level) -> None:
    write(folder, name(), {**ladder(), "64": row(32)})
    write(folder, DOWN, ladder())
    report = check(folder, rules=rules)
    finding = only(report.findings, "pair-block-m")
    # 40 lies between 16 and 64, 160 between 64 and 256; ties go to the first in the file.
    assert (finding.level, finding.key) == (level, "M=41-160")
    assert finding.file == DOWN


@pytest.mark.parametrize("given", [[name()], [DOWN], [name(), DOWN]])
def test_row_14_other_keys(folder: Path, given: list[str]) -> None:
    write(folder, name(), {**ladder(), "8": row()})
    write(folder, DOWN, {**ladder(), "32": row()})
    found = [f for f in check(*(folder / file for file in given)).findings if f.code == "pair-keys"]
    assert len(found) == 1
    assert "only in up: 8; only in down: 32" in found[0].what


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(("rules", "level"), [(OLD, Level.ERROR), (Rules(), Level.WARNING), (NEW, None)])
def test_row_14_tma_in_an_up_file(folder: Path, rules: Rules, level: Level | None, value: bool) -> None:
    write(folder, name(), {**ladder(), "64": row(USE_TMA=value)})
    write(folder, DOWN, ladder())
    found = [finding for finding in check(folder, rules=rules).findings if finding.code == "up-tma"]
    assert [(finding.level, finding.key) for finding in found] == ([(level, "64")] if level else [])


@pytest.mark.parametrize("given", [[name()], [DOWN], [name(), DOWN]])
def test_row_14_a_mix_that_exceeds_shared_memory(folder: Path, given: list[str]) -> None:
    write(folder, name(), {**ladder(), "64": row(128)})
    write(folder, DOWN, ladder(BLOCK_SIZE_N=128, BLOCK_SIZE_K=128))
    report = check(*(folder / file for file in given), rules=NEW)
    # Alone, either row fits.
    finding = only(report.findings, "shared-memory")
    assert finding.key == "64 with up row 64's BLOCK_SIZE_M"
    assert f"at least {MIXED_BYTES:,} of 101,376 B" in finding.what
    assert finding.file.endswith(DOWN)


def test_row_12_and_14_the_mix_is_compiled_for_bf16(folder: Path, compiling: Resources) -> None:
    write(folder, name(), {"1": row(), "4": row(128)})
    write(folder, DOWN, {"1": row(BLOCK_SIZE_N=128, BLOCK_SIZE_K=128), "4": row(128, USE_TMA=True)})
    report = check(folder, rules=NEW, resources=compiling, last=4)
    assert errors(report) == set()
    write(folder, DOWN, {"1": row(BLOCK_SIZE_N=128, BLOCK_SIZE_K=128)})
    finding = only(check(folder, rules=NEW, resources=compiling, last=4).findings, "shared-memory")
    assert f"needs {MIXED_BYTES:,} of 101,376 B" in finding.what
    assert "lower-bound" not in codes(report)


def test_row_14_an_older_server_stops_at_the_pair(release: Callable[[str], Copy]) -> None:
    for version, expected in (("0.5.12", {"server-stops", "pair-block-m"}), ("0.5.23", set())):
        copy = release(version)
        copy.write(name(), {**ladder(), "64": row(32)})
        copy.write(DOWN, ladder())
        report = copy.serve(problem())
        assert errors(report) == expected
        found = [finding.key for finding in report.findings if finding.code == "server-stops"]
        assert found == (["M=41-160"] if expected else [])
        assert "pair-block-m" in codes(report)
