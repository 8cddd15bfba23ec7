"""Layers that share a file, on made-up cards whose times differ between the layers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import RIGHT, SMALL, WRONG, Cost, StubPool, SyntheticLane, bowl, make_job, pair_us

import sm120tune.tune as module
from sm120tune.accuracy import ErrorMeasure
from sm120tune.compiler import CompileSpec
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.results import VerifyRequest
from sm120tune.observer import Silent
from sm120tune.problem import Gemm
from sm120tune.provenance import RowProvenance, RowStatus, load
from sm120tune.search.board import halves
from sm120tune.tiles import Tile
from sm120tune.tune import Outcome, RunOptions, tune
from sm120tune.tune_shared import tune_shared
from sm120tune.upstream.arguments import Variant

NARROW = SMALL
WIDE = replace(SMALL, hidden=1024, topk=4)
SIZES = (16, 64, 512)

Errors = Callable[[VerifyRequest], ErrorMeasure]
Run = Callable[..., tuple[Outcome, list[Job]]]


def few_warps(gemm: Gemm, tile: Tile, m: int) -> float:
    return bowl(gemm, tile, m) * (1 + 0.6 * (tile.num_warps == 8))


def many_warps(gemm: Gemm, tile: Tile, m: int) -> float:
    """Return times with the opposite wish, but a weaker one."""
    return bowl(gemm, tile, m) * (1 + 0.2 * (tile.num_warps == 4))


@pytest.fixture
def tune_both(sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that tunes two layers with the times of each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "CompilePool", lambda *_args: StubPool())

    def shared(
        costs: Mapping[int, Cost], errors: Mapping[int, Errors] | None = None, sizes: tuple[int, ...] = SIZES
    ) -> tuple[Outcome, list[Job]]:
        def lanes(job: Job, *_args: object) -> list[SyntheticLane]:
            hidden = job.problem.hidden
            return [SyntheticLane(costs[hidden], error=(errors or {}).get(hidden, lambda _request: RIGHT))]

        monkeypatch.setattr(module, "make_lanes", lanes)
        jobs = [
            make_job(sglang_0_5_23, tmp_path / "out", problem=problem, batch_sizes=sizes, trials=24)
            for problem in (NARROW, WIDE)
        ]
        return tune_shared(jobs, RunOptions(tmp_path / "out", fresh=True), Silent()), jobs

    return shared


def tuned(outcome: Outcome) -> dict[int, RowProvenance]:
    return {row.m: row for row in outcome.result.rows if row.status is RowStatus.TUNED}


def test_the_row_with_the_best_worst_case_is_taken(tune_both: Run) -> None:
    costs = {NARROW.hidden: few_warps, WIDE.hidden: many_warps}
    outcome, jobs = tune_both(costs)
    rows = tuned(outcome)
    assert set(rows) == set(SIZES)
    for m, row in rows.items():
        # The layer for which the wrong number of warps costs more has its way.
        assert (row.chosen.gate_up.num_warps, row.chosen.down.num_warps) == (4, 4)
        ratios = []
        for job in jobs:
            today = job.today(m).pair
            assert today is not None
            cost = costs[job.problem.hidden]
            ratios.append(pair_us(cost, row.chosen, m) / pair_us(cost, today, m))
        assert max(ratios) < 0.99
        assert row.ratio == pytest.approx(max(ratios))
        assert row.chosen_us is not None
        assert row.today_us is not None
        assert row.chosen_us / row.today_us == pytest.approx(row.ratio)
        for job, ratio in zip(jobs, ratios, strict=True):
            assert f"{ratio:.3f} for hidden={job.problem.hidden} topk={job.problem.topk}" in row.note


def test_the_provenance_lists_every_layer(tune_both: Run) -> None:
    outcome, _ = tune_both({NARROW.hidden: bowl, WIDE.hidden: bowl})
    record = load(outcome.written.provenance_paths[0])
    assert record.problems == (NARROW, WIDE)
    assert record == load(outcome.written.provenance_paths[1])
    assert outcome.result.timed > 0
    assert statistics.fmean(row.error or 0.0 for row in tuned(outcome).values()) == pytest.approx(RIGHT.relative)


def test_a_row_that_one_layer_loses_by_is_today_s(tune_both: Run, sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out")
    today = {m: pair for m in SIZES if (pair := job.today(m).pair) is not None}

    def content(gemm: Gemm, tile: Tile, m: int) -> float:
        pair = today[m]
        return 10.0 if tile == (pair.gate_up if gemm is Gemm.GATE_UP else pair.down) else 11.0

    outcome, _ = tune_both({NARROW.hidden: bowl, WIDE.hidden: content})
    assert not tuned(outcome)
    kept = {row.m: row for row in outcome.result.rows if row.m in SIZES}
    assert {m: row.chosen for m, row in kept.items()} == today
    assert all(row.today_us == row.chosen_us and row.repetitions for row in kept.values())
    assert all(row.note == "no other pair is as fast in every layer" for row in kept.values())


def test_where_nothing_is_known_of_todays_pair_in_one_layer_it_stays(
    tune_both: Run, sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = make_job(sglang_0_5_23, tmp_path / "out").today(64).pair
    assert today is not None

    def fault(spec: CompileSpec) -> Failure | None:
        own = isinstance(spec.variant, Variant) and spec.variant.tile == today.gate_up and spec.problem == WIDE
        return Failure(FailureKind.COMPILE_KILLED, "exit code -9") if own else None

    monkeypatch.setattr(module, "CompilePool", lambda *_args: StubPool(fault))
    outcome, jobs = tune_both({NARROW.hidden: bowl, WIDE.hidden: bowl})
    rows = {row.m: row for row in outcome.result.rows}
    left = [m for m in SIZES if jobs[0].today(m).pair == today]
    assert 64 in left
    for m in left:
        assert (rows[m].status, rows[m].chosen) == (RowStatus.KEPT, today)
        assert "compile_killed: exit code -9" in rows[m].note
    assert {m for m in SIZES if m not in left} <= set(tuned(outcome))


def test_a_pair_that_is_wrong_for_one_layer_is_never_written(tune_both: Run) -> None:
    outcome, jobs = tune_both({NARROW.hidden: bowl, WIDE.hidden: bowl}, {WIDE.hidden: lambda _request: WRONG})
    assert not tuned(outcome)
    assert outcome.result.failures["wrong_result"] >= len(SIZES)
    rows = {row.m: row for row in outcome.result.rows}
    assert rows[64].chosen == jobs[0].today(64).pair
    assert f"{WIDE}: wrong_result" in rows[64].note


def test_a_key_between_is_today_s_where_one_layer_loses_there(tune_both: Run) -> None:
    def cliff(gemm: Gemm, tile: Tile, m: int) -> float:
        """Return times by which all but today's short rows are bad from 200 to 400 tokens."""
        return bowl(gemm, tile, m) * (20 if tile.BLOCK_SIZE_K > 32 and 200 < m < 400 else 1)

    outcome, jobs = tune_both({NARROW.hidden: bowl, WIDE.hidden: cliff}, sizes=(64, 512))
    rows = {row.m: row for row in outcome.result.rows}
    added = [m for m, row in rows.items() if row.note.startswith("key added")]
    assert added
    for m in added:
        assert rows[m].status is RowStatus.KEPT
        assert rows[m].chosen == jobs[0].today(m).pair


def test_such_a_pair_is_merged_with_none_of_one_layer(tune_both: Run, tmp_path: Path) -> None:
    _, jobs = tune_both({NARROW.hidden: bowl, WIDE.hidden: bowl})
    with pytest.raises(UserError, match="the list of layers that share it"):
        tune(jobs[0], RunOptions(tmp_path / "out"), Silent())
    again, _ = tune_both({NARROW.hidden: bowl, WIDE.hidden: bowl}, sizes=(128,))
    record = load(again.written.provenance_paths[0])
    assert {16, 64, 128, 512} <= {row.m for row in record.rows if row.status is RowStatus.TUNED}


def test_an_estimating_lane_is_told_every_binary_of_the_race(
    sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each phase has lanes of its own: one that knows no binary would estimate from guessed registers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "CompilePool", lambda *_args: StubPool())
    made: list[SyntheticLane] = []

    def lanes(_job: Job, *_args: object) -> list[SyntheticLane]:
        made.append(SyntheticLane(timer="model"))
        return made[-1:]

    monkeypatch.setattr(module, "make_lanes", lanes)
    jobs = [
        make_job(sglang_0_5_23, tmp_path / "out", problem=problem, batch_sizes=(64,), trials=8, timer="model")
        for problem in (NARROW, WIDE)
    ]
    tune_shared(jobs, RunOptions(tmp_path / "out", fresh=True), Silent())
    searched, raced = made[:2], made[2:4]
    assert all(lane.gemms for lane in searched)
    for lane in raced:
        told = {(request.gemm, request.tile) for request in lane.gemms}
        assert {half for race in lane.races for pair in race.pairs for half in halves(pair)} <= told
