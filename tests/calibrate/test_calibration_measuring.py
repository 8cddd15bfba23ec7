"""What is measured, what happens to a candidate that fails, and how an interrupted run goes on."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from made_cards import CLASS, FormulaLane, make_calibration_job
from synthetic import RIGHT, WRONG, StubPool, every_kind

from sm120tune.accuracy import ErrorMeasure
from sm120tune.calibrate.assess import assess, usable_launches
from sm120tune.calibrate.choice import Chosen, choose_tiles
from sm120tune.calibrate.launches import Layer
from sm120tune.calibrate.measure import JOURNAL_SPACE, Found, Measuring
from sm120tune.calibrate.timed import Checked, GemmResult, TimedTile
from sm120tune.compiler import TileFacts
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.occupancy import StoredFacts
from sm120tune.measure.results import Estimated, GemmRequest, Measured, What
from sm120tune.observer import Silent
from sm120tune.problem import Gemm
from sm120tune.search.journal import Journal
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import Variant

SIZES = (1, 64, 4096)
TILES = tuple(Chosen(tile, "") for tile in (Tile(16, 64, 64, 1), Tile(32, 64, 128, 1), Tile(64, 128, 64, 16, 8, 3)))
CLOCKS = {"sm_mhz": 2400.0, "power_w": 310.5}


@pytest.fixture(scope="module")
def job(sglang_0_5_23: Path) -> Job:
    return make_calibration_job(sglang_0_5_23, sizes=SIZES)


def layer(job: Job) -> Layer:
    return Layer(job.problem, job.device, job.routing)


def measure(
    job: Job,
    folder: Path,
    lane: FormulaLane,
    *,
    pool: StubPool | None = None,
    tiles: tuple[Chosen, ...] = TILES,
    clocks: Mapping[str, float] | None = CLOCKS,
    fresh: bool = False,
) -> Found:
    journal = Journal(folder, job.identity(), fresh=fresh, space=JOURNAL_SPACE)
    try:
        return asyncio.run(Measuring(job, pool or StubPool(), lane, journal, Silent(), lambda: clocks).run(tiles))
    finally:
        lane.stop()


def test_every_tile_is_timed_and_checked_at_every_m(job: Job, tmp_path: Path) -> None:
    lane = FormulaLane(job)
    found = measure(job, tmp_path, lane)
    assert [(one.tile, one.m) for one in found.timed] == [(one.tile, m) for one in TILES for m in SIZES]
    assert len(lane.gemms) == len(set(lane.gemms)) == 2 * len(TILES) * len(SIZES)
    # To the end, however slow.
    assert all(request.stop_above_us is None for request in lane.gemms)
    assert {(check.m, check.pair.gate_up, check.pair.down) for check in lane.checks} == {
        (m, one.tile, one.tile) for one in TILES for m in SIZES
    }
    for one in found.timed:
        assert one.check == Checked(True, RIGHT.relative)
        assert not one.failures
        assert set(one.usable()) == set(Gemm)
        for gemm, (facts, us) in one.usable().items():
            assert facts == StoredFacts(facts.shared_bytes, 128, 0)
            assert us == pytest.approx(one.gemms[gemm].time.us)  # type: ignore[union-attr]
    assert (found.resumed, found.clocks) == (0, CLOCKS)


def test_a_second_run_takes_all_from_the_journal_and_fresh_nothing(job: Job, tmp_path: Path) -> None:
    first = measure(job, tmp_path, FormulaLane(job))
    lane = FormulaLane(job)
    again = measure(job, tmp_path, lane, clocks=None)
    assert not lane.gemms
    assert not lane.checks
    assert again.resumed == 9
    assert again.clocks == CLOCKS
    assert [one.to_json() for one in again.timed] == [one.to_json() for one in first.timed]
    lane = FormulaLane(job)
    assert measure(job, tmp_path, lane, fresh=True).resumed == 0
    assert len(lane.gemms) == 18


def test_more_tiles_are_added_to_those_of_an_earlier_run(job: Job, tmp_path: Path) -> None:
    measure(job, tmp_path, FormulaLane(job), tiles=TILES[:2])
    lane = FormulaLane(job)
    found = measure(job, tmp_path, lane)
    assert found.resumed == 6
    assert {request.tile for request in lane.gemms} == {TILES[2].tile}


def test_an_interrupted_run_goes_on(job: Job, tmp_path: Path) -> None:
    def interrupt(request: object) -> Failure | None:
        if isinstance(request, GemmRequest) and request.tile == TILES[1].tile and request.m == 64:
            # As Ctrl-C: the event loop's own handler cancels what runs.
            os.kill(os.getpid(), signal.SIGINT)
        return None

    with pytest.raises(KeyboardInterrupt):
        measure(job, tmp_path, FormulaLane(job, fault=interrupt))
    lane = FormulaLane(job)
    found = measure(job, tmp_path, lane)
    assert 0 < found.resumed < 9
    assert len(lane.checks) == 9 - found.resumed
    assert all(not one.failures for one in found.timed)


def test_failures_of_every_kind_are_results(job: Job, tmp_path: Path) -> None:
    kinds = [kind for kind in FailureKind if kind is not FailureKind.WRONG_RESULT]
    many = choose_tiles(job, CLASS)
    lane = FormulaLane(job, fault=lambda request: every_kind(request, kinds, 0.15))
    found = measure(job, tmp_path, lane, tiles=many)
    seen = {failure.kind for one in found.timed for failure in one.failures}
    assert seen == set(kinds)
    for one in found.timed:
        if any(isinstance(result.time, Failure) for result in one.gemms.values()):
            # The layer cannot be run, so it is not checked; what the other GEMM took is kept.
            assert one.check is None
        assert TimedTile.from_json(json.loads(json.dumps(one.to_json()))).to_json() == one.to_json()
    assert assess(found.timed, layer(job), CLASS).overall is not None


def test_what_cannot_be_compiled_or_launched_is_not_timed(job: Job, tmp_path: Path) -> None:
    def fault(spec: object) -> Failure | TileFacts | None:
        variant = spec.variant  # type: ignore[attr-defined]
        if not isinstance(variant, Variant):
            return None
        if variant.tile == TILES[0].tile:
            return Failure(FailureKind.COMPILE_CRASH, "error in /home/me/site/triton/x.py: failed")
        if variant.tile == TILES[1].tile and variant.gemm is Gemm.DOWN:
            return TileFacts(200_000, 64, 0, 4)
        return None

    lane = FormulaLane(job)
    found = measure(job, tmp_path, lane, pool=StubPool(fault))
    assert {request.tile for request in lane.gemms} == {one.tile for one in TILES[1:]}
    assert (TILES[1].tile, Gemm.DOWN) not in {(request.tile, request.gemm) for request in lane.gemms}
    crashed, over = found.timed[0], found.timed[3]
    assert [failure.kind for failure in crashed.failures] == [FailureKind.COMPILE_CRASH] * 2
    # The file is passed on: no folder of whoever made it.
    assert crashed.failures[0].message == "error in …: failed"
    assert [failure.kind for failure in over.failures] == [FailureKind.SHARED_MEMORY]
    assert set(over.usable()) == {Gemm.GATE_UP}


def test_a_wrong_layer_is_told_and_its_times_fit_nothing(job: Job, tmp_path: Path) -> None:
    lane = FormulaLane(job, error=lambda request: WRONG if request.pair.gate_up == TILES[2].tile else RIGHT)
    found = measure(job, tmp_path, lane)
    wrong = [one for one in found.timed if one.wrong]
    assert {one.tile for one in wrong} == {TILES[2].tile}
    assert all(one.failures[0].kind is FailureKind.WRONG_RESULT for one in wrong)
    assert all(not one.usable() for one in wrong)
    assert len(usable_launches(found.timed, layer(job))[1]) == 12


def test_an_output_that_is_not_finite_can_be_kept(job: Job, tmp_path: Path) -> None:
    lane = FormulaLane(job, error=lambda _request: ErrorMeasure(math.inf, math.inf, 3))
    one = measure(job, tmp_path, lane).timed[0]
    assert one.wrong
    again = TimedTile.from_json(json.loads(json.dumps(one.to_json(), allow_nan=False)))
    assert again.check == Checked(False, math.inf)


def test_a_lane_that_cannot_start_ends_it(job: Job, tmp_path: Path) -> None:
    lane = FormulaLane(job, ready=Failure(FailureKind.OUT_OF_MEMORY, "no room"))
    with pytest.raises(BaseExceptionGroup) as caught:
        measure(job, tmp_path, lane)
    assert "cannot start (out_of_memory: no room)" in str(caught.value.exceptions[0])
    assert isinstance(caught.value.exceptions[0], UserError)


def test_an_estimate_is_no_measurement() -> None:
    with pytest.raises(TypeError, match="was not measured"):
        GemmResult.of(TileFacts(1, 1, 0, 4), Estimated(1.0, "l2"))


def test_lower_bounds_fit_nothing() -> None:
    facts = TileFacts(1024, 64, 0, 4)
    rough = GemmResult.of(facts, Measured(90.0, 0.0, 1, What.DOWN, stopped_early=True))
    good = GemmResult.of(facts, Measured(10.0, 0.1, 9, What.GATE_UP))
    one = TimedTile(TILES[0].tile, 1, {Gemm.GATE_UP: good, Gemm.DOWN: rough}, None)
    assert set(one.usable()) == {Gemm.GATE_UP}
    assert TimedTile.from_json(one.to_json()) == one


def test_damaged_notes_are_told(job: Job, tmp_path: Path) -> None:
    journal = Journal(tmp_path, job.identity(), fresh=False, space=JOURNAL_SPACE)
    journal.save_note(64, f"tile {TILES[0].tile}", {"m": 64})
    with pytest.raises(UserError, match=r"damaged \(tile is missing\); start over with --fresh"):
        measure(job, tmp_path, FormulaLane(job))


def test_too_few_tiles_fit_nothing_and_say_so(job: Job, tmp_path: Path) -> None:
    found = assess(measure(job, tmp_path, FormulaLane(job)).timed, layer(job), CLASS)
    assert (found.overall, found.fitted.refitted, found.fitted.constants) == (None, (), CLASS.constants)
    assert set(found.reasons.values()) == {"fewer than 10 tiles could be timed"}


def test_a_class_that_is_right_already_is_kept(job: Job, tmp_path: Path) -> None:
    lane = FormulaLane(job, CLASS.constants, spread=0.05)
    found = assess(measure(job, tmp_path, lane, tiles=choose_tiles(job, CLASS)).timed, layer(job), CLASS)
    assert found.fitted.constants == CLASS.constants
    assert found.overall is not None
    assert found.overall.before == found.overall.unseen_tiles
    assert all(0.03 < error < 0.15 for _, error in found.margins)


def test_constants_of_a_made_up_card_predict_unseen_tiles(job: Job, tmp_path: Path) -> None:
    found = assess(measure(job, tmp_path, FormulaLane(job), tiles=choose_tiles(job, CLASS)).timed, layer(job), CLASS)
    assert found.overall is not None
    assert found.overall.before.median > 0.15
    assert found.overall.unseen_tiles.median < 0.04
    assert found.overall.unseen_m.median < 0.08
    assert [m for m, _ in found.margins] == list(SIZES)
    assert all(error < 0.12 for _, error in found.margins)
