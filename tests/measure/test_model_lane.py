from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sm120tune.compiler import TileFacts
from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.cost_constants import model_version
from sm120tune.measure.lane import read_timing
from sm120tune.measure.model import estimate_gemm
from sm120tune.measure.model_lane import ModelLane
from sm120tune.measure.results import (
    Estimated,
    GemmRequest,
    Measured,
    RaceRequest,
    VerifyRequest,
    What,
    half_quartile_distance,
)
from sm120tune.measure.roofline import activation_work
from sm120tune.measure.routing import BALANCED, UNIFORM
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile, TilePair

PROBLEM = MoEProblem(experts=64, intermediate=512, hidden=2048, topk=8, router_experts=64)
CARD = find_device(DEFAULT_DEVICE_NAME)
TILE = Tile(64, 64, 64, 8)
PAIR = TilePair(TILE, Tile(64, 128, 64, 8))
SPILLING = TileFacts(32768, 255, 5000, 4)


def lane() -> ModelLane:
    return ModelLane(PROBLEM, CARD, UNIFORM)


def formula(gemm: Gemm, tile: Tile, m: int, facts: TileFacts | None, routing: Any = UNIFORM) -> float:
    return estimate_gemm(PROBLEM, gemm, tile, m, CARD, facts, routing).us


@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("m", [1, 64, 4096])
def test_a_time_is_the_models_for_what_was_compiled(gemm: Gemm, m: int) -> None:
    clean, spilled = (
        lane().time_gemm(GemmRequest(m, gemm, TILE), facts).result(0)
        for facts in (TileFacts(32768, 120, 0, 4), SPILLING)
    )
    assert isinstance(clean, Estimated)
    assert isinstance(spilled, Estimated)
    assert clean.us == formula(gemm, TILE, m, TileFacts(32768, 120, 0, 4))
    assert spilled.us > clean.us
    assert clean.bound in ("bandwidth", "compute", "shared_reads", "l2", "latency")


def test_the_routing_counts() -> None:
    few = ModelLane(PROBLEM, CARD, BALANCED).time_gemm(GemmRequest(16, Gemm.DOWN, TILE), SPILLING).result(0)
    assert isinstance(few, Estimated)
    assert few.us == formula(Gemm.DOWN, TILE, 16, SPILLING, BALANCED) != formula(Gemm.DOWN, TILE, 16, SPILLING)


def test_a_race_sums_the_gemms_with_what_was_compiled() -> None:
    model = lane()
    model.time_gemm(GemmRequest(512, Gemm.GATE_UP, TILE), SPILLING)
    lanes = model.race(RaceRequest(512, (PAIR, TilePair.same(TILE)), 9)).result(0)
    assert not isinstance(lanes, Failure)
    assert [one.pair for one in lanes] == [PAIR, TilePair.same(TILE)]
    up = formula(Gemm.GATE_UP, TILE, 512, SPILLING)
    between = activation_work(PROBLEM, 512).bytes / CARD.bandwidth * 1e6
    assert between > 0
    assert lanes[0].samples_us == pytest.approx((up + between + formula(Gemm.DOWN, PAIR.down, 512, None),))
    # The facts of one GEMM are not those of the other.
    assert lanes[1].samples_us == pytest.approx((up + between + formula(Gemm.DOWN, TILE, 512, None),))


def test_a_tile_that_fits_nowhere_fails_by_kind() -> None:
    model = lane()
    big = model.time_gemm(GemmRequest(64, Gemm.DOWN, TILE), TileFacts(200_000, 100, 0, 4)).result(0)
    assert isinstance(big, Failure)
    assert big.kind is FailureKind.SHARED_MEMORY
    wide = model.time_gemm(GemmRequest(64, Gemm.GATE_UP, TILE), TileFacts(1024, 255, 0, 4)).result(0)
    assert isinstance(wide, Estimated)
    crowded = replace(TILE, num_warps=16)
    answer = model.time_gemm(GemmRequest(64, Gemm.GATE_UP, crowded), TileFacts(1024, 255, 0, 16)).result(0)
    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.REGISTERS
    race = model.race(RaceRequest(64, (TilePair.same(TILE),), 9)).result(0)
    assert race == big


def test_nothing_can_be_checked_without_the_card() -> None:
    assert lane().verify(VerifyRequest(64, PAIR, 1)).result(0) is None


def test_the_name_says_that_it_is_a_model() -> None:
    model = lane()
    assert model_version() in model.name
    assert CARD.name in model.name
    assert model.timer == "model"
    model.stop()


# Results


@pytest.mark.parametrize(
    ("timer", "timing"),
    [
        ("model", Estimated(12.5, "latency")),
        ("cuda", Measured(12.5, 0.25, 7, What.DOWN)),
        ("cuda", Measured(12.5, 0.0, 1, What.GATE_UP, stopped_early=True)),
        ("replay", Measured(12.5, 0.25, 7, What.CHAIN)),
    ],
)
def test_times_come_back_from_the_journal_as_what_they_were(timer: Any, timing: Any) -> None:
    again = read_timing(timer, timing.to_json())
    assert again == timing
    assert type(again) is type(timing)


def test_an_estimate_is_never_read_as_a_measurement() -> None:
    with pytest.raises((TypeError, KeyError)):
        read_timing("cuda", Estimated(12.5, "latency").to_json())
    with pytest.raises((TypeError, KeyError)):
        read_timing("model", Measured(12.5, 0.25, 7, What.DOWN).to_json())


def test_half_the_distance_of_the_quartiles() -> None:
    assert half_quartile_distance([]) == half_quartile_distance([7.0]) == 0.0
    assert half_quartile_distance([1, 2, 3, 4, 5]) == 1.0
    # One outlier moves it little.
    assert half_quartile_distance([1, 2, 3, 4, 1e9]) == 1.0
    assert math.isclose(half_quartile_distance([1, 3]), 0.5)
