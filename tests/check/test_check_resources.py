from __future__ import annotations

from pathlib import Path

import pytest
from check_trees import CARD, problem

from sm120tune.check.resources import Launch, Resources, Use, staged_bytes
from sm120tune.devices import find_device
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile
from sm120tune.upstream import find_sglang

MEASURED = [
    # What Triton 3.8.0 needed for SGLang 0.5.23's kernel on SM120.
    ("int8_w8a16", Tile(16, 128, 64, 1, 4, 3), 20480, 0),
    ("int8_w8a16", Tile(32, 256, 256, 1, 4, 4), 245760, 0),
    ("int8_w8a8", Tile(64, 128, 256, 1, 8, 3), 98304, 0),
    ("int8_w8a8", Tile(16, 32, 32, 1, 4, 3), 3072, 0),
    ("int8_w8a8", Tile(64, 256, 128, 1, 8, 3), 82944, 1024),
    ("fp8_w8a8", Tile(64, 256, 256, 1, 8, 2), 81920, 0),
    ("fp8_w8a8", Tile(128, 256, 64, 1, 4, 3), 50176, 1024),
    # Two bytes of A for each thread are not staged.
    ("fp8_w8a8", Tile(16, 32, 32, 1, 8, 3), 2560, 512),
    ("fp8_w8a8", Tile(16, 256, 32, 1, 8, 4), 25600, 1024),
]


@pytest.mark.parametrize(("dtype", "tile", "measured", "slack"), MEASURED)
def test_the_formula_is_a_lower_bound(dtype: str, tile: Tile, measured: int, slack: int) -> None:
    assert measured - slack <= staged_bytes(tile, dtype) <= measured


def test_an_answer_without_a_tree_is_a_bound() -> None:
    resources = Resources(None, 1)
    assert not resources.compiles(problem())
    use = resources.ask(Launch(problem(), Gemm.DOWN, Tile(64, 64, 64, 1, 4, 3)), find_device(CARD)).result()
    assert use == Use(2 * 128 * 64 * 2, exact=False)
    assert str(use) == ">= 32,768 B"


def test_compiled_and_bound_agree_for_bf16(
    sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its own cache: another test of the same process may have compiled one of these.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiling, card = Resources(find_sglang(sglang_0_5_23), 2), find_device(CARD)
    tiles = [Tile(16, 64, 64, 1, 4, 3), Tile(128, 128, 64, 8, 8, 3)]
    launches = [Launch(problem(), gemm, tile) for tile in tiles for gemm in Gemm]
    for launch, answer in [(launch, compiling.ask(launch, card)) for launch in launches]:
        use = answer.result()
        assert (use.shared_bytes, use.exact) == (staged_bytes(launch.tile, "bf16"), True)
        assert use.failure is None
        assert use.registers is not None
        assert f"{use.shared_bytes:,} B {use.registers} regs" in str(use)
    assert compiling.compiled == len(launches)
    compiling.stop()


def test_tma_in_a_down_row_costs_its_descriptors(compiling: Resources) -> None:
    tile = Tile(64, 64, 64, 1, 4, 3)
    plain, tma = (
        compiling.ask(Launch(problem(), Gemm.DOWN, row, row.USE_TMA), find_device(CARD)).result()
        for row in (tile, Tile(64, 64, 64, 1, 4, 3, USE_TMA=True))
    )
    assert plain.shared_bytes is not None
    assert tma.shared_bytes is not None
    assert 0 < tma.shared_bytes - plain.shared_bytes <= 64
