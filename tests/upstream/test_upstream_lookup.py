from __future__ import annotations

import sys

import pytest
from lookup_releases import CARD, DOWN, FP8, FP8_BLOCK, LARGE_DEFAULT, PROBLEM, SMALL_DEFAULT, UP, Make, tile
from sglang_copies import (
    FROM_0_5_12,
    FROM_0_5_15,
    FROM_0_5_18,
    RELEASES,
    UP_TO_0_5_10,
    UP_TO_0_5_12,
    UP_TO_0_5_15,
    row,
)
from wheels import Trees

from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import find_sglang
from sm120tune.upstream.lookup import BUILT_IN, ConfigLookup, Target


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
