"""Which pairs may load through descriptors, for real trees and lookups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from synthetic import SMALL, make_job

from sm120tune.job import Job
from sm120tune.tiles import Tile, TilePair
from sm120tune.tma import tma_variants

PAIR = TilePair(Tile(64, 64, 64, 1, 4, 3), Tile(64, 64, 128, 1, 4, 3))
DOWN, UP, BOTH = (False, True), (True, False), (True, True)
BLOCKS = replace(SMALL, dtype="fp8_w8a8", block_shape=(128, 128))


def flags(job: Job, m: int = 512, pair: TilePair = PAIR) -> list[tuple[bool, bool]]:
    return [(one.gate_up.USE_TMA, one.down.USE_TMA) for one in tma_variants(job, m, pair)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_the_up_row_can_from_0_5_18_on(sglang_0_5_15: Path, sglang_0_5_23: Path, out: Path) -> None:
    assert flags(make_job(sglang_0_5_15, out)) == [DOWN]
    assert flags(make_job(sglang_0_5_23, out)) == [DOWN, UP, BOTH]


def test_what_no_gpu_times_gets_no_descriptors(sglang_0_5_23: Path, out: Path) -> None:
    job = make_job(sglang_0_5_23, out)
    assert flags(replace(job, timer="model")) == []
    assert flags(replace(job, device=replace(job.device, capability=(8, 0)))) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden": 544}, [DOWN]),
        ({"intermediate": 192}, [UP]),
        ({"router_experts": 64}, [UP]),
        ({"dtype": "fp8_w8a8"}, [UP]),
        ({"dtype": "fp8_w8a8", "per_channel_quant": True}, [UP]),
        ({"dtype": "fp8_w8a8", "block_shape": (128, 128)}, [UP]),
        ({"dtype": "int8_w8a16"}, [UP]),
        ({"dtype": "int4_w4a16", "block_shape": (0, 64)}, []),
    ],
    ids=str,
)
def test_where_descriptors_would_be_wrong_or_unpriced(
    sglang_0_5_23: Path, out: Path, changes: dict[str, object], expected: list[tuple[bool, bool]]
) -> None:
    problem = replace(SMALL, **changes)  # type: ignore[arg-type]
    assert flags(make_job(sglang_0_5_23, out, problem=problem)) == expected


@pytest.mark.parametrize(("block_m", "use_tma", "expected"), [(64, True, [DOWN]), (32, True, []), (64, False, [])])
def test_sorted_rows_are_quantized_only_where_they_are_today(
    sglang_0_5_15: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block_m: int,
    use_tma: bool,
    expected: list[tuple[bool, bool]],
) -> None:
    tile = Tile(block_m, 64, 128, 1, 4, 3)
    names = make_job(sglang_0_5_15, tmp_path / "out", problem=BLOCKS).lookup.file_names(BLOCKS)
    folder = tmp_path / "server/configs" / f"triton_{triton.__version__.replace('.', '_')}"
    folder.mkdir(parents=True)
    for name, row in zip(names, (tile, replace(tile, USE_TMA=use_tma)), strict=True):
        (folder / name).write_text(json.dumps({"512": row.to_row()}))
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path / "server"))
    job = make_job(sglang_0_5_15, tmp_path / "out", problem=BLOCKS)
    assert job.today(512).pair is not None
    assert flags(job) == expected
