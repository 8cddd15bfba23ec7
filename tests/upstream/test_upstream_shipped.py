from __future__ import annotations

from pathlib import Path

import pytest
from sglang_copies import FOLDERS, row, slim_copy, write_rows
from wheels import Trees

from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import SGLangTree, find_sglang
from sm120tune.upstream.shipped import ShippedRows

CARD = "NVIDIA_GeForce_RTX_5090"
PROBLEM = MoEProblem(experts=64, intermediate=256, hidden=512, topk=4, router_experts=64)


@pytest.fixture
def tree(sglang_trees: Trees, tmp_path: Path) -> SGLangTree:
    return find_sglang(slim_copy(sglang_trees["0.5.23"], "0.5.23", tmp_path))


def ship(tree: SGLangTree, name: str, mark: int, triton: str = "3.4.0") -> None:
    """Add a file whose one row is told by its GROUP_SIZE_M."""
    write_rows(tree.configs_dir, triton, name, {64: row(16, GROUP_SIZE_M=mark)})


def marks(shipped: ShippedRows, m: int = 64) -> list[int]:
    return [pair.gate_up.GROUP_SIZE_M for pair in shipped.pairs(m)]


def test_near_keys_first(tree: SGLangTree) -> None:
    # Octaves of E plus octaves of N, and half an octave for another card.
    ship(tree, f"E=64,N=1024,device_name={CARD}.json", 20)
    ship(tree, f"E=16,N=512,device_name={CARD}.json", 30)
    ship(tree, f"E=128,N=256,device_name={CARD}.json", 10)
    ship(tree, "E=64,N=256,device_name=NVIDIA_H200.json", 5)
    ship(tree, "E=64,N=512,device_name=NVIDIA_H200.json", 15)
    ship(tree, f"E=64,N=256,device_name={CARD}.json", 1)
    assert marks(ShippedRows(tree, PROBLEM, CARD)) == [1, 5, 10, 15, 20, 30]
    assert marks(ShippedRows(tree, PROBLEM, CARD, files=2)) == [1, 5]
    assert marks(ShippedRows(tree, PROBLEM, "NVIDIA_H200"))[:2] == [5, 1]


def test_other_dtypes_selectors_and_down_files_do_not_count(tree: SGLangTree) -> None:
    ship(tree, f"E=64,N=256,device_name={CARD}_down.json", 2)
    ship(tree, f"E=64,N=256,device_name={CARD},dtype=fp8_w8a8.json", 3)
    ship(tree, f"E=64,N=256,device_name={CARD},dtype=fp8_w8a8,block_shape=[128, 128].json", 4)
    ship(tree, f"E=64,N=256,device_name={CARD},dtype=int8_w8a8,per_channel_quant=True.json", 5)
    ship(tree, "notes.json", 6)
    ship(tree, f"E=8,N=32,device_name={CARD}.json", 7)
    assert marks(ShippedRows(tree, PROBLEM, CARD)) == [7]

    def of(dtype: str, block_shape: tuple[int, int] | None = None, per_channel: bool = False) -> list[int]:
        changed = MoEProblem(64, 256, 512, 4, 64, dtype, 0, block_shape, per_channel)
        return marks(ShippedRows(tree, changed, CARD))

    assert of("fp16") == [7]
    assert of("fp8_w8a8") == [3]
    assert of("fp8_w8a8", (128, 128)) == [4]
    assert of("int8_w8a8", per_channel=True) == [5]
    assert of("int8_w8a8") == []


def test_the_row_nearest_to_m_without_its_tma(tree: SGLangTree) -> None:
    rows = {16: row(16), 128: row(32, USE_TMA=True), 4096: row(64)}
    write_rows(tree.configs_dir, "3.8.0", f"E=64,N=256,device_name={CARD}.json", rows)
    shipped = ShippedRows(tree, PROBLEM, CARD)
    assert shipped.pairs(1) == [TilePair.same(Tile(**row(16)))]
    assert shipped.pairs(100) == [TilePair.same(Tile(**row(32)))]
    assert shipped.pairs(99999) == [TilePair.same(Tile(**row(64)))]


def test_the_same_row_of_two_files_comes_once(tree: SGLangTree) -> None:
    ship(tree, f"E=64,N=256,device_name={CARD}.json", 1)
    ship(tree, f"E=64,N=512,device_name={CARD}.json", 9)
    ship(tree, f"E=64,N=256,device_name={CARD}.json", 1, triton="3.2.0")
    assert marks(ShippedRows(tree, PROBLEM, CARD)) == [1, 9]


def test_files_that_cannot_be_read_seed_nothing(tree: SGLangTree) -> None:
    ship(tree, f"E=64,N=512,device_name={CARD}.json", 9)
    folder = tree.configs_dir / "triton_3_4_0"
    for n, text in enumerate(("{", "[1]", "\xff", '{"64": {"BLOCK_SIZE_M": 16}}', '{"64": 3}', '{"x": {}}', "null")):
        (folder / f"E=64,N={256 + n},device_name={CARD}.json").write_text(text, encoding="latin-1")
    (folder / f"E=0,N=0,device_name={CARD}.json").write_text("{}")
    shipped = ShippedRows(tree, PROBLEM, CARD, files=99)
    assert marks(shipped) == [9]


def test_of_a_file_with_one_bad_row_the_others_serve(tree: SGLangTree) -> None:
    rows = {"triton_version": "3.8.0", 8: {"BLOCK_SIZE_M": 16}, 64: row(16, GROUP_SIZE_M=7)}
    write_rows(tree.configs_dir, "3.8.0", f"E=64,N=256,device_name={CARD}.json", rows)
    assert marks(ShippedRows(tree, PROBLEM, CARD), m=8) == [7]


def test_a_release_without_configs(tree: SGLangTree) -> None:
    tree.configs_dir.rmdir()
    assert ShippedRows(tree, PROBLEM, CARD).pairs(1) == []


@pytest.mark.parametrize("release", FOLDERS)
def test_every_release_ships_rows_for_a_new_card(sglang_trees: Trees, release: str) -> None:
    problem = MoEProblem(experts=256, intermediate=256, hidden=7168, topk=8, router_experts=256)
    pairs = ShippedRows(find_sglang(sglang_trees[release]), problem, "NVIDIA_GB10").pairs(64)
    assert 2 <= len(pairs) <= 6
    assert all(pair.gate_up == pair.down and not pair.down.USE_TMA for pair in pairs)
