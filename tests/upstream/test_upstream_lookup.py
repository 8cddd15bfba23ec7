from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_copies import (
    FOLDERS,
    FROM_0_5_12,
    FROM_0_5_15,
    FROM_0_5_18,
    RELEASES,
    UP_TO_0_5_10,
    UP_TO_0_5_12,
    UP_TO_0_5_15,
    config_path,
    edit,
    row,
    slim_copy,
    write_rows,
)
from wheels import Trees

from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import UpstreamError, find_sglang
from sm120tune.upstream.lookup import BUILT_IN, ConfigLookup, Target

CARD = Target("NVIDIA RTX PRO 6000 Blackwell Server Edition", 101376, "3.8.0")
PROBLEM = MoEProblem(experts=32, intermediate=256, hidden=512, topk=4, router_experts=32)
UP = "E=32,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"
DOWN = "E=32,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition_down.json"
FP8 = MoEProblem(experts=32, intermediate=256, hidden=512, topk=4, router_experts=32, dtype="fp8_w8a8")
FP8_BLOCK = MoEProblem(
    experts=32, intermediate=256, hidden=512, topk=4, router_experts=32, dtype="fp8_w8a8", block_shape=(64, 128)
)

SMALL_DEFAULT = TilePair.same(Tile(16, 32, 64, 1, num_warps=4, num_stages=3))
LARGE_DEFAULT = TilePair.same(Tile(64, 64, 32, 8, num_warps=4, num_stages=3))


class Release:
    """An editable copy of one release: its config folder and lookups over it."""

    def __init__(self, tree: Path, release: str, folder: Path) -> None:
        self.package = slim_copy(tree, release, folder)
        self.configs = self.package / FOLDERS[release][1] / "configs"
        self.config_file = self.package / config_path(release)

    def write(self, triton: str, rows: dict[Any, Any], name: str = UP) -> Path:
        return write_rows(self.configs, triton, name, rows)

    def lookup(self, target: Target = CARD, **kwargs: Any) -> ConfigLookup:
        return ConfigLookup(find_sglang(self.package), target, **kwargs)


Make = Callable[[str], Release]


@pytest.fixture
def make(sglang_trees: Trees, tmp_path: Path) -> Make:
    return lambda release: Release(sglang_trees[release], release, tmp_path / release)


def tile(block_m: int, **changes: Any) -> Tile:
    return Tile(**row(block_m, **changes))


@pytest.mark.parametrize(
    ("device", "dtype", "block_shape", "per_channel", "name"),
    [
        ("NVIDIA GeForce RTX 5090", "bf16", None, False, "E=257,N=256,device_name=NVIDIA_GeForce_RTX_5090"),
        ("NVIDIA GeForce RTX 5090", "fp16", None, False, "E=257,N=256,device_name=NVIDIA_GeForce_RTX_5090"),
        ("NVIDIA GB10", "fp8_w8a8", None, False, "E=257,N=256,device_name=NVIDIA_GB10,dtype=fp8_w8a8"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "fp8_w8a8",
            (128, 128),
            False,
            "E=257,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition,dtype=fp8_w8a8,"
            "block_shape=[128, 128]",
        ),
        (
            "NVIDIA RTX PRO 5000 72GB Blackwell",
            "int8_w8a8",
            None,
            True,
            "E=257,N=256,device_name=NVIDIA_RTX_PRO_5000_72GB_Blackwell,dtype=int8_w8a8,per_channel_quant=True",
        ),
    ],
)
@pytest.mark.parametrize("release", RELEASES)
def test_file_names(
    sglang_trees: Trees,
    release: str,
    device: str,
    dtype: str,
    block_shape: tuple[int, int] | None,
    per_channel: bool,
    name: str,
) -> None:
    problem = MoEProblem(
        experts=257,
        intermediate=256,
        hidden=2048,
        topk=9,
        router_experts=256,
        shared_experts=1,
        dtype=dtype,
        block_shape=block_shape,
        per_channel_quant=per_channel,
    )
    lookup = ConfigLookup(find_sglang(sglang_trees[release]), Target(device, 101376, "3.8.0"))
    assert lookup.file_names(problem) == (f"{name}.json", f"{name}_down.json")
    assert "sglang" not in sys.modules


@pytest.mark.parametrize("release", RELEASES)
def test_the_exact_folder_comes_first(make: Make, release: str) -> None:
    made = make(release)
    # Every folder here is one that each release looks into.
    for triton, block_m in (("3.4.0", 16), ("3.3.1", 32), ("3.2.0", 64)):
        made.write(triton, {8: row(block_m)})
    for triton, block_m in (("3.4.0", 16), ("3.3.1", 32), ("3.2.0", 64)):
        today = made.lookup(Target(CARD.device_name, 101376, triton)).todays_pair(PROBLEM, 8)
        assert today.pair == TilePair.same(tile(block_m))
        assert today.up_source == str(made.configs / f"triton_{triton.replace('.', '_')}" / UP)


@pytest.mark.parametrize("release", FROM_0_5_12)
def test_other_folders_newest_first(make: Make, release: str) -> None:
    made = make(release)
    order = ["3.10.0", "3.9.1", "3.9.0", "3.2.0"]
    for block_m, triton in enumerate(sorted(order), start=1):
        made.write(triton, {8: row(block_m)})
    for triton in order:
        file = made.configs / f"triton_{triton.replace('.', '_')}" / UP
        assert made.lookup().todays_pair(PROBLEM, 8).up_source == str(file)
        file.unlink()
    assert made.lookup().todays_pair(PROBLEM, 8).up_source == BUILT_IN


@pytest.mark.parametrize("release", UP_TO_0_5_10)
def test_other_folders_are_a_fixed_list_in_old_releases(make: Make, release: str) -> None:
    made = make(release)
    for triton in ("3.9.0", "3.5.1", "3.3.0"):
        made.write(triton, {8: row(128)})
    assert made.lookup().todays_pair(PROBLEM, 8).up_source == BUILT_IN
    order = ["3.4.0", "3.3.1", "3.2.0", "3.1.0"]
    files = [made.write(triton, {8: row(16)}) for triton in order]
    for file in files:
        assert made.lookup().todays_pair(PROBLEM, 8).up_source == str(file)
        file.unlink()


@pytest.mark.parametrize("release", RELEASES)
def test_no_file_is_the_built_in_default(make: Make, release: str) -> None:
    lookup = make(release).lookup()
    for m, pair in ((1, SMALL_DEFAULT), (32, SMALL_DEFAULT), (33, LARGE_DEFAULT), (16384, LARGE_DEFAULT)):
        today = lookup.todays_pair(PROBLEM, m)
        assert (today.pair, today.up_source, today.down_source, today.problem) == (pair, BUILT_IN, BUILT_IN, "")
        assert lookup.builtin_pair(PROBLEM, m) == pair
    assert lookup.rows(PROBLEM, down=False) is None
    assert lookup.rows(PROBLEM, down=True) is None
    assert lookup.file_keys(PROBLEM) == ()


@pytest.mark.parametrize("release", RELEASES)
def test_the_built_in_default_stays_what_it_is_where_a_file_serves(make: Make, release: str) -> None:
    made = make(release)
    made.write("3.8.0", {8: row(128)})
    lookup = made.lookup()
    assert lookup.todays_pair(PROBLEM, 8).pair == TilePair.same(tile(128))
    assert lookup.builtin_pair(PROBLEM, 8) == SMALL_DEFAULT


@pytest.mark.parametrize("release", RELEASES)
def test_nearest_key_and_ties(make: Make, release: str) -> None:
    made = make(release)
    for keys in ((16, 32, 1024), (1024, 32, 16)):
        # A row is told by its GROUP_SIZE_M.
        made.write("3.8.0", {key: row(16, GROUP_SIZE_M=key) for key in keys})
        lookup = made.lookup()

        def served(m: int, lookup: ConfigLookup = lookup) -> int:
            pair = lookup.todays_pair(PROBLEM, m).pair
            assert pair is not None
            return pair.gate_up.GROUP_SIZE_M

        first_of_tie = next(key for key in keys if key in (16, 32))
        assert served(24) == first_of_tie
        assert [served(m) for m in (1, 23, 25, 527, 529)] == [16, 16, 32, 32, 1024]
        # The last row serves everything beyond it.
        assert served(16384) == 1024
        assert lookup.file_keys(PROBLEM) == (16, 32, 1024)


@pytest.mark.parametrize("release", RELEASES)
def test_up_and_down_are_looked_up_by_themselves(make: Make, release: str) -> None:
    made = make(release)
    up = made.write("3.8.0", {8: row(64), 512: row(64, num_stages=2)})
    down = made.write("3.2.0", {8: row(64, BLOCK_SIZE_N=128), 4096: row(64, num_warps=8, USE_TMA=True)}, DOWN)
    lookup = made.lookup()
    today = lookup.todays_pair(PROBLEM, 8)
    assert (today.up_source, today.down_source) == (str(up), str(down))
    assert today.pair == TilePair(tile(64), tile(64, BLOCK_SIZE_N=128))
    # 2000 is nearest to another key in each of the two.
    today = lookup.todays_pair(PROBLEM, 2000)
    assert today.pair == TilePair(tile(64, num_stages=2), tile(64, BLOCK_SIZE_N=128))
    today = lookup.todays_pair(PROBLEM, 3000)
    assert today.pair == TilePair(tile(64, num_stages=2), tile(64, num_warps=8, USE_TMA=True))
    assert lookup.file_keys(PROBLEM) == (8, 512, 4096)
    assert list(lookup.rows(PROBLEM, down=True) or ()) == [8, 4096]


@pytest.mark.parametrize("release", UP_TO_0_5_12)
def test_unequal_block_m_stops_old_releases(make: Make, release: str) -> None:
    made = make(release)
    files = made.write("3.8.0", {8: row(64), 512: row(128)}), made.write("3.8.0", {8: row(32), 512: row(128)}, DOWN)
    today = made.lookup().todays_pair(PROBLEM, 8)
    assert today.pair is None
    assert "BLOCK_SIZE_M" in today.problem
    assert (today.up_source, today.down_source) == tuple(str(file) for file in files)
    assert made.lookup().todays_pair(PROBLEM, 512).pair == TilePair.same(tile(128))


@pytest.mark.parametrize("release", FROM_0_5_15)
def test_unequal_block_m_is_overridden_in_newer_releases(make: Make, release: str) -> None:
    made = make(release)
    made.write("3.8.0", {8: row(64)})
    made.write("3.8.0", {8: row(32, BLOCK_SIZE_N=128, num_stages=5)}, DOWN)
    today = made.lookup().todays_pair(PROBLEM, 8)
    assert today.pair == TilePair(tile(64), tile(64, BLOCK_SIZE_N=128, num_stages=5))
    assert today.problem == ""


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("release", RELEASES)
def test_use_tma_in_an_up_file(make: Make, release: str, value: bool) -> None:
    made = make(release)
    made.write("3.8.0", {8: row(64, USE_TMA=value), 512: row(64)})
    made.write("3.8.0", {8: row(64), 512: row(64)}, DOWN)
    lookup = made.lookup()
    supported = release in FROM_0_5_18
    assert lookup.up_tma_supported is supported
    today = lookup.todays_pair(PROBLEM, 8)
    if supported:
        assert today.pair == TilePair(tile(64, USE_TMA=value), tile(64))
        assert today.problem == ""
    else:
        # The key itself reaches the kernel's launch, whatever its value.
        assert today.pair is None
        assert "USE_TMA" in today.problem
        assert "KeyError" in today.problem
    assert lookup.todays_pair(PROBLEM, 512).pair == TilePair.same(tile(64))


@pytest.mark.parametrize("release", UP_TO_0_5_15)
def test_a_lone_up_file_in_old_releases(make: Make, release: str) -> None:
    made = make(release)
    up = made.write("3.8.0", {8: row(64)})
    lookup = made.lookup()
    assert lookup.rows(PROBLEM, down=True) is None
    today = lookup.todays_pair(PROBLEM, 8)
    assert today.pair == TilePair.same(tile(64))
    assert (today.up_source, today.down_source) == (str(up), str(up))


@pytest.mark.parametrize("release", FROM_0_5_18)
def test_a_lone_up_file_serves_down_with_its_tma(make: Make, release: str) -> None:
    made = make(release)
    up = made.write("3.2.0", {8: row(64, USE_TMA=True), 512: row(32)})
    lookup = made.lookup()
    assert lookup.rows(PROBLEM, down=True) == {8: row(64, USE_TMA=True), 512: row(32)}
    today = lookup.todays_pair(PROBLEM, 8)
    assert today.pair == TilePair.same(tile(64, USE_TMA=True))
    assert (today.up_source, today.down_source) == (str(up), str(up))


@pytest.mark.parametrize("release", RELEASES)
def test_a_lone_down_file_meets_the_built_in_up_row(make: Make, release: str) -> None:
    made = make(release)
    down = made.write("3.8.0", {8: row(16), 512: row(64)}, DOWN)
    lookup = made.lookup()
    today = lookup.todays_pair(PROBLEM, 512)
    assert today.pair == TilePair(LARGE_DEFAULT.gate_up, tile(64))
    assert (today.up_source, today.down_source) == (BUILT_IN, str(down))
    # M=200 takes the down row of key 8, and the default for M > E, which has another BLOCK_SIZE_M.
    pair = lookup.todays_pair(PROBLEM, 200).pair
    assert pair == (None if release in UP_TO_0_5_12 else TilePair(LARGE_DEFAULT.gate_up, tile(64)))


@pytest.mark.parametrize("release", RELEASES)
def test_fp8_default_depends_on_shared_memory(sglang_trees: Trees, release: str) -> None:
    tree = find_sglang(sglang_trees[release])

    def default(shared: int, m: int) -> Tile:
        return ConfigLookup(tree, Target("NVIDIA GB10", shared, "3.8.0")).builtin_pair(FP8, m).gate_up

    large = (Tile(64, 128, 128, 1, 4, 4), Tile(128, 256, 128, 32, 8, 4))
    small = (Tile(32, 64, 256, 1, 4, 4), Tile(64, 128, 256, 64, 4, 2))
    for_sm120 = small if release in FROM_0_5_15 else large
    assert (default(101376, 32), default(101376, 33)) == for_sm120
    assert (default(232448, 32), default(232448, 33)) == large
    assert (default(128 * 1024, 32), default(128 * 1024, 33)) == large
    assert default(128 * 1024 - 1, 33) == for_sm120[1]


@pytest.mark.parametrize("release", RELEASES)
def test_fp8_block_default(sglang_trees: Trees, release: str) -> None:
    lookup = ConfigLookup(find_sglang(sglang_trees[release]), CARD)
    for m in (1, 4096):
        assert lookup.builtin_pair(FP8_BLOCK, m) == TilePair.same(Tile(64, 64, 128, 32, 4, 3))


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
