from __future__ import annotations

from pathlib import Path

import pytest
from lookup_releases import DOWN, PROBLEM, SMALL_DEFAULT, UP, Make, tile
from sglang_copies import (
    RELEASES,
    UP_TO_0_5_10,
    edit,
    row,
    write_rows,
)

from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import UpstreamError, find_sglang
from sm120tune.upstream.lookup import BUILT_IN, ConfigLookup, Target


@pytest.mark.parametrize("release", RELEASES)
def test_a_folder_name_that_is_no_version(make: Make, release: str) -> None:
    made = make(release)
    made.write("3.7.0rc1", {8: row(64)})
    lookup = made.lookup()
    if release in UP_TO_0_5_10:
        assert lookup.todays_pair(PROBLEM, 8).pair == SMALL_DEFAULT
        return
    for ask in (lookup.file_keys, lambda problem: lookup.todays_pair(problem, 8)):
        with pytest.raises(UpstreamError, match="0rc1") as raised:
            ask(PROBLEM)
        assert str(made.configs) in str(raised.value)
    # Lookups that find their exact folder never get to the others' names.
    made.write("3.8.0", {8: row(64)})
    made.write("3.8.0", {8: row(64)}, DOWN)
    assert made.lookup().todays_pair(PROBLEM, 8).pair == TilePair.same(tile(64))
    # The up file alone does not help: down is looked up as well, and up is not to blame.
    (made.configs / "triton_3_8_0" / DOWN).unlink()
    with pytest.raises(UpstreamError) as raised:
        made.lookup().todays_pair(PROBLEM, 8)
    assert UP not in str(raised.value)


DAMAGE = {
    "triton_version": '{"triton_version": "3.8.0", "8": {"BLOCK_SIZE_M": 16}}',
    "cut off": '{"8": {"BLOCK_SIZE_M": 16, ',
    "empty": "",
    "list": "[1, 2]",
    "null": "null",
    "row": '{"8": null}',
    "bytes": "\0\1\2",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("release", RELEASES)
def test_damaged_files(make: Make, release: str, down: bool, damage: str) -> None:
    made = make(release)
    made.write("3.8.0", {8: row(64)})
    made.write("3.8.0", {8: row(64)}, DOWN)
    name = DOWN if down else UP
    (made.configs / "triton_3_8_0" / name).write_text(DAMAGE[damage])
    lookup = made.lookup()
    for ask in (lookup.file_keys, lambda problem: lookup.todays_pair(problem, 8)):
        with pytest.raises(UpstreamError) as raised:
            ask(PROBLEM)
        assert name in str(raised.value)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", [UP, DOWN])
def test_rows_that_crash_the_server(make: Make, release: str, name: str) -> None:
    incomplete = {key: value for key, value in row(16).items() if key != "BLOCK_SIZE_M"}
    made = make(release)
    made.write("3.8.0", {8: row(16)}, DOWN if name == UP else UP)
    for bad, words in (
        (incomplete, "BLOCK_SIZE_M"),
        (row(16, waves_per_eu=2), "waves_per_eu"),
        (row(16, num_stages=0), "num_stages"),
    ):
        made.write("3.8.0", {8: bad}, name)
        today = made.lookup().todays_pair(PROBLEM, 8)
        assert today.pair is None
        assert words in today.problem


@pytest.mark.parametrize("release", RELEASES)
def test_an_empty_file_is_the_built_in_default(make: Make, release: str) -> None:
    made = make(release)
    made.write("3.8.0", {})
    today = made.lookup().todays_pair(PROBLEM, 8)
    assert (today.pair, today.up_source, today.down_source) == (SMALL_DEFAULT, BUILT_IN, BUILT_IN)


@pytest.mark.parametrize("release", RELEASES)
def test_hidden_files_are_absent(make: Make, release: str) -> None:
    made = make(release)
    ours = [made.write("3.8.0", {8: row(16)}), made.write("3.8.0", {8: row(16)}, DOWN)]
    theirs = made.write("3.4.0", {8: row(64)})
    assert made.lookup().todays_pair(PROBLEM, 8).pair == TilePair.same(tile(16))
    lookup = made.lookup(stand_ins=dict.fromkeys(ours))
    today = lookup.todays_pair(PROBLEM, 8)
    assert today.pair == TilePair.same(tile(64))
    assert (today.up_source, today.down_source) == (str(theirs), str(theirs))
    assert lookup.file_keys(PROBLEM) == (8,)
    assert made.lookup(stand_ins=dict.fromkeys([*ours, theirs])).todays_pair(PROBLEM, 8).up_source == BUILT_IN
    # Damage in a file of ours does not stop anything.
    ours[0].write_text("{")
    assert made.lookup(stand_ins=dict.fromkeys(ours)).todays_pair(PROBLEM, 8).pair == TilePair.same(tile(64))


@pytest.mark.parametrize("release", RELEASES)
def test_config_dir_replaces_the_shipped_tree(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    made = make(release)
    made.write("3.8.0", {8: row(64)})
    other = tmp_path / "other"
    file = write_rows(other / "configs", "3.2.0", UP, {8: row(128), 64: row(32)})
    today = made.lookup(config_dir=other).todays_pair(PROBLEM, 8)
    assert today.pair == TilePair.same(tile(128))
    assert today.up_source == str(file)
    assert made.lookup(config_dir=other).file_keys(PROBLEM) == (8, 64)
    assert made.lookup(config_dir=other, stand_ins={file: None}).todays_pair(PROBLEM, 8).up_source == BUILT_IN
    # Only the argument counts, as the caller has read the variable already.
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(other))
    assert made.lookup().todays_pair(PROBLEM, 8).pair == TilePair.same(tile(64))


@pytest.mark.parametrize("release", RELEASES)
def test_config_dir_without_configs(make: Make, tmp_path: Path, release: str) -> None:
    lookup = make(release).lookup(config_dir=tmp_path)
    if release in UP_TO_0_5_10:
        assert lookup.todays_pair(PROBLEM, 8).pair == SMALL_DEFAULT
        return
    for ask in (lookup.file_keys, lambda problem: lookup.todays_pair(problem, 8)):
        with pytest.raises(UpstreamError) as raised:
            ask(PROBLEM)
        assert str(tmp_path / "configs") in str(raised.value)


def test_rows_are_copies(make: Make) -> None:
    made = make("0.5.23")
    made.write("3.8.0", {8: row(64)})
    lookup = made.lookup()
    rows = lookup.rows(PROBLEM, down=False)
    assert rows is not None
    rows[8]["BLOCK_SIZE_M"] = 1
    assert lookup.todays_pair(PROBLEM, 8).pair == TilePair.same(tile(64))


def test_a_file_that_appears_is_seen(make: Make) -> None:
    made = make("0.5.23")
    lookup = made.lookup()
    assert lookup.todays_pair(PROBLEM, 8).up_source == BUILT_IN
    made.write("3.8.0", {8: row(64)})
    assert lookup.todays_pair(PROBLEM, 8).pair == TilePair.same(tile(64))


@pytest.mark.parametrize("release", RELEASES)
def test_it_is_sglangs_own_code_that_runs(make: Make, release: str) -> None:
    made = make(release)
    edit(made.config_file, '"BLOCK_SIZE_N": 32', '"BLOCK_SIZE_N": 512', after="def get_default_config(")
    edit(made.config_file, "abs(x - M)", "-abs(x - M)", after="def try_get_optimal_moe_config(")
    lookup = made.lookup()
    assert lookup.builtin_pair(PROBLEM, 1).gate_up == Tile(16, 512, 64, 1)
    made.write("3.8.0", {8: row(16), 4096: row(64)})
    assert lookup.todays_pair(PROBLEM, 8).pair == TilePair.same(tile(64))


def test_names_that_sglang_may_import_one_day(make: Make) -> None:
    made = make("0.5.23")
    imports = "import torch\nimport sglang.srt.distributed, json as _json\nfrom sglang.srt.warp import drive, idle\n"
    edit(made.config_file, "import torch\n", imports)
    # What is imported and not used by the lookup does not matter.
    assert made.lookup().builtin_pair(PROBLEM, 1) == SMALL_DEFAULT
    edit(made.config_file, "    if dtype == ", "    drive()\n    if dtype == ", after="def get_default")
    with pytest.raises(UpstreamError, match="the lookup uses 'drive'"):
        made.lookup().builtin_pair(PROBLEM, 1)
    edit(made.config_file, "drive()", "sglang.srt.distributed.size()", after="def get_default")
    with pytest.raises(UpstreamError, match="the lookup uses 'sglang'"):
        made.lookup().builtin_pair(PROBLEM, 1)


def test_a_lookup_without_its_functions(make: Make) -> None:
    made = make("0.5.23")
    edit(made.config_file, "def try_get_optimal_moe_config(", "def try_get_best_moe_config(")
    with pytest.raises(UpstreamError, match="no function try_get_optimal_moe_config") as raised:
        made.lookup().todays_pair(PROBLEM, 1)
    assert str(made.config_file) in str(raised.value)


H200_FILE = "E=256,N=512,device_name=NVIDIA_H200"
H200_TODAY = {
    # The up file of 3.6 starts at M=256 and its down file at M=1.
    ("3.6.0", "triton_3_6_0", 1): (Tile(16, 128, 128, 16, 4, 2), Tile(16, 64, 128, 16, 4, 3, USE_TMA=True)),
    ("3.6.0", "triton_3_6_0", 48): (Tile(16, 128, 128, 16, 4, 2), Tile(16, 128, 128, 16, 4, 3, USE_TMA=True)),
    ("3.6.0", "triton_3_6_0", 16384): (Tile(64, 128, 64, 1, 4, 3), Tile(64, 128, 64, 16, 4, 3, USE_TMA=True)),
    # No folder of its own: the newest other one that has the file. Its rows for 256 leave warps and stages open.
    ("3.8.0", "triton_3_7_1", 8): (Tile(16, 32, 64, 1, 4, 3), Tile(16, 32, 64, 1, 4, 3)),
    ("3.9.0", "triton_3_7_1", 600): (Tile(32, 128, 128, 32, 8, 3), Tile(32, 64, 128, 32, 4, 3, USE_TMA=True)),
}


@pytest.mark.parametrize("case", H200_TODAY, ids=str)
def test_pairs_that_ship(sglang_0_5_23: Path, case: tuple[str, str, int]) -> None:
    """Read off SGLang's own files by hand."""
    triton, folder, m = case
    tree = find_sglang(sglang_0_5_23)
    problem = MoEProblem(experts=256, intermediate=512, hidden=2048, topk=8, router_experts=256)
    lookup = ConfigLookup(tree, Target("NVIDIA H200", 232448, triton))
    today = lookup.todays_pair(problem, m)
    assert today.pair == TilePair(*H200_TODAY[case])
    assert today.up_source == str(tree.configs_dir / folder / f"{H200_FILE}.json")
    assert today.down_source == str(tree.configs_dir / folder / f"{H200_FILE}_down.json")
    down_keys = (1, 4, 16, 32, 64, 128, 256, 512, 1024) if triton == "3.6.0" else (256, 512, 1024)
    assert lookup.file_keys(problem) == down_keys
