"""Two ladders timed beside each other by a made-up card."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from synthetic import StubPool, SyntheticLane, bowl, make_job, pair_us

from sm120tune.compare import REPEATS, Compared, Mix, Serves, compare_ladders, parse_mix, uniform_mix
from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.cost_constants import card_class
from sm120tune.measure.results import GemmRequest, RaceRequest, VerifyRequest
from sm120tune.tiles import Tile, TilePair

GOOD = TilePair(Tile(16, 64, 128, 1, 4, 3), Tile(16, 128, 128, 1, 4, 3))
BAD = TilePair.same(Tile(16, 32, 32, 8, 8, 2))
SIZES = (1, 16, 64)


def always(pair: TilePair | None, why: str = "") -> Serves:
    return lambda _m: (pair, why)


def compared(
    sglang: Path,
    tmp_path: Path,
    a: Serves,
    b: Serves,
    *,
    lane: SyntheticLane | None = None,
    pool: StubPool | None = None,
) -> list[Compared]:
    lane = lane or SyntheticLane(noise=0.01)
    seen: list[Compared] = []
    job = make_job(sglang, tmp_path, batch_sizes=SIZES, timer=lane.timer)
    try:
        rows = asyncio.run(compare_ladders(job, pool or StubPool(), lane, a, b, seen.append))
    finally:
        lane.stop()
    assert seen == rows
    return rows


def test_who_is_faster_at_each_m(sglang_0_5_23: Path, tmp_path: Path) -> None:
    lane = SyntheticLane(noise=0.01)
    rows = compared(sglang_0_5_23, tmp_path, always(GOOD), always(BAD), lane=lane)
    assert [row.m for row in rows] == list(SIZES)
    for row in rows:
        assert row.word == "faster"
        assert row.ratio is not None
        assert row.ratio.middle == pytest.approx(pair_us(bowl, GOOD, row.m) / pair_us(bowl, BAD, row.m), rel=0.02)
    # Interleaved: both pairs are in each race, and there are three for every M.
    assert [request.pairs for request in lane.races] == [(GOOD, BAD)] * (REPEATS * len(SIZES))
    words = [row.word for row in compared(sglang_0_5_23, tmp_path, always(BAD), always(GOOD))]
    assert words == ["slower"] * 3


def test_noise_is_no_difference(sglang_0_5_23: Path, tmp_path: Path) -> None:
    like = TilePair(Tile(16, 64, 128, 1, 4, 3, USE_TMA=False), Tile(16, 128, 128, 1, 4, 3, USE_TMA=True))
    rows = compared(sglang_0_5_23, tmp_path, always(GOOD), always(like), lane=SyntheticLane(noise=0.02))
    assert [row.word for row in rows] == ["same"] * 3


def test_equal_rows_are_timed_once(sglang_0_5_23: Path, tmp_path: Path) -> None:
    lane = SyntheticLane(noise=0.05)
    rows = compared(sglang_0_5_23, tmp_path, always(GOOD), lambda m: (GOOD if m == 16 else BAD, ""), lane=lane)
    assert [row.word for row in rows] == ["faster", "equal rows", "faster"]
    assert rows[1].ratio is not None
    assert rows[1].ratio.middle == 1.0
    assert rows[1].a_us == rows[1].b_us
    assert [len(request.pairs) for request in lane.races if request.m == 16] == [1] * REPEATS


def test_a_pair_that_does_not_compile_is_named_and_never_launched(sglang_0_5_23: Path, tmp_path: Path) -> None:
    def fault(spec: CompileSpec) -> Failure | TileFacts | None:
        tile = getattr(spec.variant, "tile", None)
        return Failure(FailureKind.COMPILE_CRASH, "PassManager::run failed") if tile == BAD.down else None

    lane = SyntheticLane()
    rows = compared(
        sglang_0_5_23, tmp_path, always(GOOD), lambda m: (BAD if m == 16 else GOOD, ""), lane=lane, pool=StubPool(fault)
    )
    assert rows[1].word == "not compared"
    assert rows[1].problem == "B: compile_crash: PassManager::run failed"
    assert rows[0].ratio is not None
    assert all(BAD not in request.pairs for request in lane.races)


def test_too_much_shared_memory_and_no_pair_at_all(sglang_0_5_23: Path, tmp_path: Path) -> None:
    large = TilePair.same(Tile(128, 256, 128, 1, 8, 4))
    rows = compared(sglang_0_5_23, tmp_path, always(large), always(None, "this SGLang stops at an assert"))
    assert all("A: shared_memory" in row.problem for row in rows)
    assert all("B: this SGLang stops at an assert" in row.problem for row in rows)


def test_a_failure_while_racing(sglang_0_5_23: Path, tmp_path: Path) -> None:
    def fault(request: GemmRequest | RaceRequest | VerifyRequest) -> Failure | None:
        return Failure(FailureKind.TIMEOUT, "not done within 60 s") if request.m == 64 else None

    rows = compared(sglang_0_5_23, tmp_path, always(GOOD), always(BAD), lane=SyntheticLane(fault=fault))
    assert [row.problem for row in rows] == ["", "", "timeout: not done within 60 s"]


def test_a_lane_that_cannot_start(sglang_0_5_23: Path, tmp_path: Path) -> None:
    lane = SyntheticLane(ready=Failure(FailureKind.OUT_OF_MEMORY, "2 GiB missing"))
    with pytest.raises(UserError, match="2 GiB missing"):
        compared(sglang_0_5_23, tmp_path, always(GOOD), always(BAD), lane=lane)


def test_estimates_have_the_models_margin(sglang_0_5_23: Path, tmp_path: Path) -> None:
    lane = SyntheticLane(timer="model")
    rows = compared(sglang_0_5_23, tmp_path, always(GOOD), always(BAD), lane=lane)
    assert rows[0].ratio is not None
    margin = card_class(find_device(DEFAULT_DEVICE_NAME).arch).margin(rows[0].m)
    assert 0 < margin < 0.5
    assert rows[0].ratio.high == pytest.approx((1 + margin) * rows[0].ratio.middle)
    assert len(lane.races) == len(SIZES)
    # The model needs the binary of each GEMM first.
    assert {request.tile for request in lane.gemms} == {GOOD.gate_up, GOOD.down, BAD.gate_up}


def test_mixes() -> None:
    assert parse_mix("64:3, 1:1") == Mix({1: 0.25, 64: 0.75})
    assert parse_mix("1:1,64:3").expected_us({1: 10.0, 64: 100.0}) == pytest.approx(77.5)
    assert parse_mix("1:1e308,64:1e308") == uniform_mix((1, 64))
    assert uniform_mix((1, 64)).expected_us({1: 10.0, 64: 100.0}) == pytest.approx(55.0)
    assert uniform_mix((1, 64)).expected_us({1: 10.0, 64: None}) is None
    assert uniform_mix((1, 64)).expected_us({1: 10.0}) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1:",
        "x:1",
        "0:1",
        "1:0",
        "1:-1",
        "1:nan",
        "1:inf",
        "1:1,1:2",
        "1:1,",
        "²:1",
        pytest.param(f"{'9' * 5000}:1", id="endless"),
    ],
)
def test_bad_mixes(text: str) -> None:
    with pytest.raises(UserError, match="--mix"):
        parse_mix(text)
