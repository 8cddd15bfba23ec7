from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from synthetic import RIGHT, SMALL, WRONG, StubPool, SyntheticLane, bowl, flat, make_job, open_journal, pair_us

from sm120tune.accuracy import ErrorMeasure
from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.measure.model_lane import ModelLane
from sm120tune.measure.results import RaceLane, RaceRequest, VerifyRequest
from sm120tune.measure.routing import UNIFORM
from sm120tune.observer import Silent
from sm120tune.problem import DEFAULT_BATCH_SIZES, Gemm, MoEProblem
from sm120tune.provenance import FileProvenance, RowProvenance, RowStatus
from sm120tune.runner import Runner, RunResult
from sm120tune.search.board import halves
from sm120tune.search.race import ESTIMATE_LEAST_M
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.arguments import Variant
from sm120tune.upstream.lookup import BUILT_IN

CRASH = Failure(FailureKind.ILLEGAL_ACCESS, "out of bounds")


@pytest.fixture(autouse=True)
def _no_folder_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)


Settle = Callable[..., dict[int, RowProvenance]]


@pytest.fixture
def lanes() -> Iterator[list[SyntheticLane]]:
    made: list[SyntheticLane] = []
    yield made
    for lane in made:
        lane.stop()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunResult]:
    def run(job: Job, lane: Timer, pool: Any = None) -> RunResult:
        journal = open_journal(tmp_path / "runs", job.identity(), fresh=True)
        runner = Runner(job, pool or StubPool(), [lane], journal, Silent())
        return asyncio.run(asyncio.wait_for(runner.run(), 120))

    return run


Run = Callable[..., RunResult]


def by_m(result: RunResult) -> dict[int, RowProvenance]:
    return {row.m: row for row in result.rows}


def check_written(job: Job, result: RunResult) -> None:
    """Check that the rows make a file: all finite, read back as written."""
    record = FileProvenance(
        "0", job.kind, job.problem, {"name": job.device.name}, {"triton": job.triton_version}, job.source_hash, {},
        dict(result.failures), result.rows,
    )  # fmt: skip
    assert FileProvenance.from_json(json.loads(record.dumps())).rows == result.rows


# Who wins


def test_a_winner_is_faster_right_and_measured(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane(noise=0.005)
    result = run(job, lane)
    check_written(job, result)
    for m in job.batch_sizes:
        row = by_m(result)[m]
        today = job.today(m).pair
        assert today is not None
        assert row.status is RowStatus.TUNED
        assert row.today == today
        assert row.measured
        assert row.timer == "cuda"
        assert row.error == RIGHT.relative
        assert row.repetitions > 1
        assert row.chosen_us is not None
        assert row.chosen_us == pytest.approx(pair_us(bowl, row.chosen, m), rel=0.02)
        assert row.today_us == pytest.approx(pair_us(bowl, today, m), rel=0.02)
        assert row.chosen_spread_us is not None
        assert 0 < row.chosen_spread_us < 0.02 * row.chosen_us
        true_ratio = pair_us(bowl, row.chosen, m) / pair_us(bowl, today, m)
        assert row.ratio == pytest.approx(true_ratio, rel=0.01)
        assert row.ratio_interval is not None
        assert row.ratio_interval[0] <= true_ratio <= row.ratio_interval[1] < 1
        floor_us, bound = job.floor(m)
        assert row.roofline_share == pytest.approx(floor_us / row.chosen_us)
        assert row.bound == bound
        # The pair that is written is the one that was checked, on data of its own.
        assert [request.pair for request in lane.checks if request.m == m][-1] == row.chosen
    assert len({request.seed for request in lane.checks}) == len(lane.checks)
    lane.stop()


def test_the_last_word_is_a_race_against_today_alone(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    lane = SyntheticLane()
    row = by_m(run(job, lane))[512]
    lane.stop()
    races = [request for request in lane.races if request.m == 512]
    last = races[-1]
    assert set(last.pairs) == {job.today(512).pair, row.chosen}
    alone = [request.rounds for request in races if set(request.pairs) == set(last.pairs)]
    assert row.repetitions == sum(alone) >= 10
    # Everyone who could win was raced beside today's pair before.
    first = races[0]
    assert job.today(512).pair in first.pairs
    assert row.chosen in first.pairs
    assert len(set(first.pairs)) == len(first.pairs) >= 3


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_equal_tiles_leave_todays_pair(sglang_0_5_23: Path, tmp_path: Path, run: Run, noise: float) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(1, 16, 64, 512), trials=15)
    lane = SyntheticLane(flat, name="equal", noise=noise)
    result = run(job, lane)
    lane.stop()
    check_written(job, result)
    for m in job.batch_sizes:
        row = by_m(result)[m]
        assert row.status is RowStatus.KEPT
        assert row.chosen == row.today == job.today(m).pair
        assert row.chosen_us == row.today_us
        assert row.ratio == 1.0


def test_where_today_is_the_optimum_it_stays(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    today = job.today(512).pair
    assert today is not None

    def cost(gemm: Gemm, tile: Tile, m: int) -> float:
        return bowl(gemm, tile, m) if (gemm, tile) not in halves(today) else 1.0

    lane = SyntheticLane(cost)
    row = by_m(run(job, lane))[512]
    lane.stop()
    assert row.status is RowStatus.KEPT
    assert row.chosen == today
    assert row.today_us == 2.0


def test_a_gain_below_what_matters_changes_nothing(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,), trials=10)
    today = job.today(512).pair
    assert today is not None

    def cost(gemm: Gemm, tile: Tile, _m: int) -> float:
        return 100.0 if (gemm, tile) in halves(today) else 99.5

    lane = SyntheticLane(cost)
    row = by_m(run(job, lane))[512]
    lane.stop()
    assert row.status is RowStatus.KEPT
    assert row.chosen == today


def test_a_lucky_search_does_not_win(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    # Alone each new tile looks twice as fast; in the chain it is slower than today's.
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    today = job.today(512).pair
    assert today is not None

    class Lucky(SyntheticLane):
        def _race(self, request: RaceRequest) -> Any:
            lanes = super()._race(request)
            assert not isinstance(lanes, Failure)
            slow = {one.pair: 1.0 if one.pair == today else 3.0 for one in lanes}
            return [RaceLane(one.pair, tuple(slow[one.pair] * us for us in one.samples_us)) for one in lanes]

    lane = Lucky()
    row = by_m(run(job, lane))[512]
    lane.stop()
    assert row.status is RowStatus.KEPT
    assert row.chosen == today


def test_a_time_below_the_cards_floor_is_called_impossible(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(64, 4096), trials=10)

    def cost(gemm: Gemm, tile: Tile, m: int) -> float:
        # At 64 half of what the card's bandwidth allows, at 4096 twice as much time as needed.
        return job.floor(m)[0] * (0.25 if m == 64 else 1.0) * bowl(gemm, tile, m) / bowl(gemm, Tile(16, 64, 128, 1), m)

    lane = SyntheticLane(cost)
    rows = by_m(run(job, lane))
    lane.stop()
    assert rows[64].roofline_share is not None
    assert (rows[64].roofline_share > 1) == ("impossible" in rows[64].note)
    assert rows[64].roofline_share > 1
    assert "impossible" not in rows[4096].note


# What is wrong is never written


def test_a_wrong_winner_is_counted_and_the_next_is_taken(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    first: list[TilePair] = []

    def error(request: VerifyRequest) -> ErrorMeasure:
        first.append(request.pair)
        return WRONG if request.pair == first[0] else RIGHT

    lane = SyntheticLane(error=error)
    result = run(job, lane)
    lane.stop()
    row = by_m(result)[512]
    assert row.status is RowStatus.TUNED
    assert row.chosen != first[0]
    assert row.chosen in first
    assert row.error == RIGHT.relative
    assert result.failures["wrong_result"] == 1
    assert pair_us(bowl, first[0], 512) <= pair_us(bowl, row.chosen, 512)


@pytest.mark.parametrize(
    "error",
    [WRONG, ErrorMeasure(math.inf, math.inf, 1), ErrorMeasure(0.004, 0.9, 0), ErrorMeasure(0.2, 0.004, 0)],
    ids=["wrong", "nan", "one-row", "everywhere"],
)
def test_where_every_result_is_wrong_every_row_is_kept(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, error: ErrorMeasure
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane(error=lambda _request: error)
    result = run(job, lane)
    lane.stop()
    check_written(job, result)
    for row in result.rows:
        assert row.status is RowStatus.KEPT
        assert row.chosen == job.today(row.m).pair
        assert row.error is None
    assert result.failures["wrong_result"] == len(lane.checks) >= 2


@pytest.mark.parametrize("kind", [FailureKind.ILLEGAL_ACCESS, FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY])
def test_a_check_that_fails_keeps_every_row(sglang_0_5_23: Path, tmp_path: Path, run: Run, kind: FailureKind) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane(fault=lambda request: Failure(kind) if isinstance(request, VerifyRequest) else None)
    result = run(job, lane)
    lane.stop()
    assert {row.status for row in result.rows} == {RowStatus.KEPT}
    assert result.failures[kind.value] >= 2


# Failures in the race


def test_one_finalist_that_fails_takes_no_other_along(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    bad: list[TilePair] = []

    def fault(request: Any) -> Failure | None:
        if not isinstance(request, RaceRequest):
            return None
        if not bad:
            # The best of the finalists.
            bad.append(min(request.pairs, key=lambda pair: pair_us(bowl, pair, request.m)))
        return CRASH if bad[0] in request.pairs else None

    lane = SyntheticLane(fault=fault)
    result = run(job, lane)
    lane.stop()
    row = by_m(result)[512]
    assert row.status is RowStatus.TUNED
    assert row.chosen != bad[0]
    assert row.ratio is not None
    assert row.ratio < 1
    assert result.failures["illegal_access"] == 1


def test_a_decision_that_fails_keeps_todays_pair(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,))
    checked: list[TilePair] = []

    def fault(request: Any) -> Failure | None:
        if isinstance(request, VerifyRequest):
            checked.append(request.pair)
        return CRASH if isinstance(request, RaceRequest) and checked else None

    lane = SyntheticLane(fault=fault)
    result = run(job, lane)
    lane.stop()
    row = by_m(result)[512]
    assert checked
    assert row.status is RowStatus.KEPT
    assert row.chosen == job.today(512).pair
    assert result.failures["illegal_access"] == 1


def test_where_no_race_can_be_run_every_row_is_kept(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane(fault=lambda request: CRASH if isinstance(request, RaceRequest) else None)
    result = run(job, lane)
    lane.stop()
    check_written(job, result)
    assert {row.status for row in result.rows} == {RowStatus.KEPT}
    assert result.failures["illegal_access"] >= 2


# Today's pair cannot run


def _compile_fault(job: Job, how: Failure | TileFacts) -> StubPool:
    today = {job.today(m).pair for m in job.batch_sizes}
    tiles = {half for pair in today if pair for half in halves(pair)}

    def fault(spec: CompileSpec) -> Failure | TileFacts | None:
        variant = spec.variant
        return how if (getattr(variant, "gemm", None), getattr(variant, "tile", None)) in tiles else None

    return StubPool(fault)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Failure(FailureKind.COMPILE_CRASH, "pass failed"), "compile_crash: pass failed"),
        (TileFacts(147456, 128, 0, 8), "147,456 of 101,376 B"),
        (TileFacts(1024, 255, 0, 16), "registers"),
    ],
    ids=["compile_crash", "shared_memory", "registers"],
)
def test_a_pair_of_today_that_does_not_fit_is_replaced_and_the_row_says_why(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, how: Failure | TileFacts, said: str
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))
    lane = SyntheticLane()
    result = run(job, lane, _compile_fault(job, how))
    lane.stop()
    check_written(job, result)
    for m in job.batch_sizes:
        row = by_m(result)[m]
        assert row.status is RowStatus.TUNED
        assert "today's pair cannot run" in row.note
        assert said in row.note
        assert row.today_us is None
        assert row.ratio is None
        assert row.chosen_us == pytest.approx(pair_us(bowl, row.chosen, m))
        assert row.error == RIGHT.relative
        # Still right, and still the best of what runs.
        assert row.chosen in [request.pair for request in lane.checks]


def test_a_pair_of_today_that_crashes_is_replaced_and_the_row_says_why(
    sglang_0_5_23: Path, tmp_path: Path, run: Run
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16, 512))

    def fault(request: Any) -> Failure | None:
        return CRASH if isinstance(request, RaceRequest) and job.today(request.m).pair in request.pairs else None

    lane = SyntheticLane(fault=fault)
    result = run(job, lane)
    lane.stop()
    for m in job.batch_sizes:
        row = by_m(result)[m]
        assert row.status is RowStatus.TUNED
        assert "today's pair cannot run: illegal_access" in row.note
        assert row.today_us is None
        assert row.chosen != job.today(m).pair


def test_where_neither_today_nor_anything_else_runs_the_row_says_so(
    sglang_0_5_23: Path, tmp_path: Path, run: Run
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(16,), trials=10)
    lane = SyntheticLane()
    result = run(job, lane, StubPool(lambda _spec: Failure(FailureKind.COMPILE_CRASH, "pass failed")))
    lane.stop()
    row = by_m(result)[16]
    assert row.status is RowStatus.KEPT
    assert row.today_us is row.chosen_us is row.ratio is None
    assert "today's pair cannot run: compile_crash" in row.note
    assert (lane.gemms, lane.races, lane.checks) == ([], [], [])


# The whole ladder


def config_folder(root: Path, job: Job, up: dict[int, Tile], down: dict[int, Tile] | None = None) -> Path:
    """Write a pair as the server's SGLANG_MOE_CONFIG_DIR would hold it."""
    folder = root / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    folder.mkdir(parents=True)
    for name, rows in zip(job.lookup.file_names(job.problem), (up, down), strict=True):
        if rows is not None:
            (folder / name).write_text(json.dumps({str(m): tile.to_row() for m, tile in rows.items()}))
    return root


def test_the_ladder_has_all_default_keys_those_asked_for_and_todays(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_job(sglang_0_5_23, tmp_path / "out")
    up = {7: Tile(16, 256, 32, 1, 8, 5), 100: Tile(32, 64, 64, 8, 4, 3), 9000: Tile(64, 128, 64, 8, 8, 3)}
    down = {7: Tile(16, 16, 32, 1, 8, 5), 333: Tile(32, 32, 64, 8, 4, 3), 9000: Tile(64, 64, 64, 8, 8, 3)}
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(config_folder(tmp_path / "server", plain, up, down)))
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(5, 512), trials=10)
    lane = SyntheticLane()
    result = run(job, lane)
    lane.stop()
    rows = by_m(result)
    wanted = {*DEFAULT_BATCH_SIZES, 5, 512, *up, *down}
    assert wanted <= set(rows)
    # What was added keeps today's rows where today's keys have them, between the default keys.
    assert all("key added" in rows[m].note for m in set(rows) - wanted)
    assert {m for m in wanted if rows[m].status is RowStatus.TUNED} == {5, 512}
    for m in sorted(wanted):
        row = rows[m]
        assert row.today == job.today(m).pair
        if m not in job.batch_sizes:
            assert row.chosen == job.today(m).pair
            assert row.note == "not tuned"
            assert row.repetitions == 0
            assert not row.measured
    assert rows[9000].chosen == TilePair(up[9000], down[9000])
    assert rows[16384].chosen == TilePair(up[9000], down[9000])


def test_a_row_of_today_that_stops_the_server_is_replaced(
    sglang_0_5_15: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_job(sglang_0_5_15, tmp_path / "out")
    rejected = {64: Tile(16, 64, 64, 1, USE_TMA=True)}
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(config_folder(tmp_path / "server", plain, rejected)))
    job = make_job(sglang_0_5_15, tmp_path / "out", batch_sizes=(64,), trials=10)
    assert job.today(64).pair is None
    lane = SyntheticLane()
    rows = by_m(run(job, lane))
    lane.stop()
    assert rows[64].status is RowStatus.TUNED
    assert rows[64].today is None
    assert "today's pair cannot run" in rows[64].note
    # Not asked for: SGLang's own default is better than a file that stops the server.
    assert rows[128].chosen == job.lookup.builtin_pair(job.problem, 128)
    assert "today's pair cannot run" in rows[128].note


HUNDRED = MoEProblem(experts=100, intermediate=256, hidden=512, topk=4, router_experts=100)


def nearest(rows: Iterable[int], m: int) -> int:
    """Return the key that SGLang takes for M."""
    return min(rows, key=lambda key: abs(key - m))


@pytest.mark.parametrize(
    ("problem", "asked", "tuned_at"),
    [
        # E = 100 lies between the keys 96 and 128, and the built-in default changes at 100.
        pytest.param(HUNDRED, (96,), None, id="kept-below"),
        pytest.param(HUNDRED, (512,), 512, id="not-asked-below"),
        # With 16 experts the change is at a key.
        pytest.param(SMALL, (16,), None, id="kept-at-E"),
        pytest.param(SMALL, (512,), 512, id="not-asked-at-E"),
        pytest.param(SMALL, (1, 2, 4), None, id="kept-far-below"),
    ],
)
def test_where_nothing_was_tuned_near_e_the_defaults_change_stays_where_it_is(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, problem: MoEProblem, asked: tuple[int, ...], tuned_at: int | None
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", problem=problem, batch_sizes=asked, trials=10)
    lane = SyntheticLane(flat if tuned_at is None else bowl)
    rows = by_m(run(job, lane))
    lane.stop()
    assert {m for m, row in rows.items() if row.status is RowStatus.TUNED} == ({tuned_at} if tuned_at else set())
    for m in range(1, 1000):
        row = rows[nearest(rows, m)]
        if row.status is RowStatus.KEPT:
            assert row.chosen == job.today(m).pair


@pytest.mark.parametrize(("problem", "asked"), [(HUNDRED, 96), (HUNDRED, 100), (SMALL, 16)])
def test_a_tuned_row_below_the_change_of_the_default_serves_beyond_it(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, problem: MoEProblem, asked: int
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", problem=problem, batch_sizes=(asked,), trials=10)
    lane = SyntheticLane()
    rows = by_m(run(job, lane))
    lane.stop()
    assert rows[asked].status is RowStatus.TUNED
    assert {*DEFAULT_BATCH_SIZES, asked} <= set(rows)
    # Nothing else keeps the change in its place; where the row does not hold up to the next key, a key says so.
    others = [row for m, row in rows.items() if m not in {*DEFAULT_BATCH_SIZES, asked}]
    assert all(row.note.startswith("key added") and row.m > asked for row in others)


@pytest.mark.parametrize("experts", [1, 3, 16, 60, 100, 160, 161, 256, 257, 385, 513])
def test_a_ladder_of_nothing_but_kept_rows_changes_nothing_at_any_m(
    sglang_0_5_23: Path, tmp_path: Path, experts: int
) -> None:
    problem = MoEProblem(experts, intermediate=256, hidden=512, topk=1, router_experts=experts)
    job = make_job(sglang_0_5_23, tmp_path / "out", problem=problem, batch_sizes=DEFAULT_BATCH_SIZES)
    rows = {m: job.today(m).pair for m in job.ladder_keys(frozenset(DEFAULT_BATCH_SIZES))}
    for m in (*range(1, 1100), 2000, 5000, 100_000):
        assert rows[nearest(rows, m)] == job.today(m).pair


def test_no_extra_key_where_a_file_decides(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_job(sglang_0_5_23, tmp_path / "out")
    folder = config_folder(tmp_path / "server", plain, {1: Tile(16, 64, 64, 1), 4096: Tile(64, 64, 64, 8)})
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(folder))
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(512,), trials=10)
    assert job.today(17).up_source != BUILT_IN
    lane = SyntheticLane(flat)
    rows = by_m(run(job, lane))
    lane.stop()
    assert set(rows) == set(DEFAULT_BATCH_SIZES)


# Estimates


def test_estimates_are_marked_and_change_nothing_where_the_model_is_unproven(
    sglang_0_5_23: Path, tmp_path: Path, run: Run
) -> None:
    small = ESTIMATE_LEAST_M - 1
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(1, small, 64, 4096), trials=20, timer="model")
    result = run(job, ModelLane(job.problem, job.device, UNIFORM))
    check_written(job, result)
    rows = by_m(result)
    for m in job.batch_sizes:
        assert not rows[m].measured
        assert rows[m].timer == "model"
        assert rows[m].error is None
        assert rows[m].chosen_us is not None
    for m in (1, small):
        assert rows[m].status is RowStatus.KEPT
        assert rows[m].chosen == job.today(m).pair
        assert str(ESTIMATE_LEAST_M) in rows[m].note
    assert rows[4096].status is RowStatus.TUNED
    assert rows[4096].ratio is not None
    assert rows[4096].ratio < 0.95


def test_an_estimate_takes_no_tile_that_spills(sglang_0_5_23: Path, tmp_path: Path, run: Run) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(4096,), trials=20, timer="model")
    lane = ModelLane(job.problem, job.device, UNIFORM)
    best = by_m(run(job, lane, StubPool()))[4096]
    assert best.status is RowStatus.TUNED

    def a_few_bytes(spec: CompileSpec) -> TileFacts | None:
        own = isinstance(spec.variant, Variant) and spec.variant.tile in (best.chosen.gate_up, best.chosen.down)
        return TileFacts(20_000, 128, 4, spec.variant.tile.num_warps) if own else None  # type: ignore[union-attr]

    other = by_m(run(replace(job), ModelLane(job.problem, job.device, UNIFORM), StubPool(a_few_bytes)))[4096]
    assert other.chosen.gate_up != best.chosen.gate_up
    assert other.chosen.down != best.chosen.down
