from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from runner_bench import Bench, BrokenLane, Recorder, timed_halves
from synthetic import StubPool, bowl, every_kind, make_job, pair_us

from sm120tune import tune as tune_module
from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.results import GemmRequest
from sm120tune.observer import Silent
from sm120tune.problem import DEFAULT_BATCH_SIZES, Gemm
from sm120tune.provenance import RowStatus
from sm120tune.search.board import halves
from sm120tune.tune import RunOptions, tune

GEMM_KINDS = [
    FailureKind.LAUNCH_ERROR, FailureKind.ILLEGAL_ACCESS, FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY,
]  # fmt: skip
COMPILE_KINDS = [FailureKind.COMPILE_CRASH, FailureKind.COMPILE_TIMEOUT, FailureKind.REGISTERS]


# A plain run


def test_a_run_ends_with_a_whole_ladder_of_faster_rows(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(1, 16, 512, 5000))
    lane, pool, observer = bench.lane(), StubPool(), Recorder()
    result = bench.run(job, lane, pool=pool, observer=observer)
    assert [row.m for row in result.rows] == sorted({*DEFAULT_BATCH_SIZES, 5000})
    tuned = {row.m: row for row in result.rows if row.status is RowStatus.TUNED}
    assert set(tuned) == {1, 16, 512, 5000}
    for m, row in tuned.items():
        today = job.today(m).pair
        assert today == row.today
        assert today is not None
        assert pair_us(bowl, row.chosen, m) < 0.9 * pair_us(bowl, today, m)
    assert result.failures == observer.counts
    assert result.compiled == pool.compiled > 0
    assert result.timed == len(lane.gemms)
    assert result.resumed == 0
    assert [row.m for row in observer.rows] == [1, 16, 512, 5000]
    assert observer.phases[0] == "search"
    assert set(result.seconds) >= set(observer.phases) >= {"search", "settle"}
    assert all(seconds >= 0 for seconds in result.seconds.values())
    # The observer is no one's but the runner's own thread.
    assert len(observer.threads) == 1


def test_nothing_is_timed_twice_and_everything_within_the_space(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(1, 64, 512), trials=40)
    lane = bench.lane()
    bench.run(job, lane)
    timed = timed_halves(lane)
    assert len(set(timed)) == len(timed) > 100
    today = {tile for m in job.batch_sizes if (pair := job.today(m).pair) for _, tile in halves(pair)}
    for m, _, tile in timed:
        assert job.space(m).canonical(tile) == tile
        assert tile in today or max(tile.BLOCK_SIZE_N, tile.BLOCK_SIZE_M) <= 256


def test_a_lane_gets_what_the_compiler_said(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=15)
    lane = bench.lane()

    def facts(spec: CompileSpec) -> TileFacts:
        return TileFacts(1000, 100, len(str(spec.variant)), 4)

    bench.run(job, lane, pool=StubPool(facts))
    for request, known in lane.facts.items():
        variant = job.variant(request.m, request.gemm, request.tile)
        assert known == facts(job.spec(variant))


def test_tiles_that_spill_much_are_not_timed_but_those_of_today_are(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=30)
    lane = bench.lane()
    today = job.today(64).pair
    assert today is not None

    def facts(spec: CompileSpec) -> TileFacts:
        tile = getattr(spec.variant, "tile", None)
        return TileFacts(1000, 100, 512 if tile is not None and tile.BLOCK_SIZE_N >= 64 else 504, 4)

    result = bench.run(job, lane, pool=StubPool(facts))
    timed = {tile for _, _, tile in timed_halves(lane)}
    assert result.failures["spills"] > 0
    assert any(tile.BLOCK_SIZE_N < 64 for tile in timed)
    baseline = {tile for pair in (today, job.lookup.builtin_pair(job.problem, 64)) for _, tile in halves(pair)}
    assert {tile for tile in timed if tile.BLOCK_SIZE_N >= 64} == {t for t in baseline if t.BLOCK_SIZE_N >= 64}


def test_slow_tiles_are_given_up_early_but_never_the_best(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(512,), trials=30)
    lane = bench.lane()
    bench.run(job, lane)
    limits = [request for request in lane.gemms if request.stop_above_us is not None]
    assert limits
    for request in limits:
        best = min(bowl(r.gemm, r.tile, r.m) for r in lane.gemms if r.gemm is request.gemm)
        assert request.stop_above_us is not None
        assert request.stop_above_us > best


def test_an_exhaustive_run_times_every_tile_once_and_finds_the_optimum(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(16,), exhaustive=True, shared_memory=12288)
    lane = bench.lane()
    result = bench.run(job, lane)
    tiles = job.space(16).tiles()
    timed = timed_halves(lane)
    assert len(set(timed)) == len(timed)
    for gemm in Gemm:
        assert {tile for _, which, tile in timed if which is gemm} >= set(tiles)
    row = next(row for row in result.rows if row.m == 16)
    best = min(
        sum(min(bowl(gemm, tile, 16) for tile in tiles if tile.BLOCK_SIZE_M == block_m) for gemm in Gemm)
        for block_m in {tile.BLOCK_SIZE_M for tile in tiles}
    )
    assert pair_us(bowl, row.chosen, 16) == pytest.approx(best)


# Failures


def test_failures_of_every_kind_are_counted_and_never_chosen(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(16, 512), trials=60)

    def fault(request: Any) -> Failure | None:
        if isinstance(request, GemmRequest):
            return every_kind((request.gemm, request.tile), GEMM_KINDS, 0.3)
        return None

    def compile_fault(spec: CompileSpec) -> Failure | TileFacts | None:
        tile = getattr(spec.variant, "tile", None)
        if tile is None:
            return None
        failure = every_kind(tile, COMPILE_KINDS, 0.3)
        # Too large for the card: compiled without complaint.
        return TileFacts(200_000, 100, 0, 4) if every_kind((tile, "big"), COMPILE_KINDS, 0.1) else failure

    lane = bench.lane(fault=fault)
    observer = Recorder()
    result = bench.run(job, lane, pool=StubPool(compile_fault), observer=observer)
    assert set(result.failures) == {kind.value for kind in (*GEMM_KINDS, *COMPILE_KINDS, FailureKind.SHARED_MEMORY)}
    assert set(observer.counts) == set(result.failures)
    for row in result.rows:
        if row.status is RowStatus.TUNED:
            for gemm, tile in halves(row.chosen):
                assert fault(GemmRequest(row.m, gemm, tile)) is None
                assert compile_fault(job.spec(job.variant(row.m, gemm, tile))) is None
    for request in lane.gemms:
        assert compile_fault(job.spec(job.variant(request.m, request.gemm, request.tile))) is None


@pytest.mark.parametrize("kind", list(FailureKind))
def test_where_every_candidate_fails_every_row_is_kept(bench: Bench, sglang_0_5_23: Path, kind: FailureKind) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(16, 512), trials=20)
    result = bench.run(job, bench.lane(fault=lambda _request: Failure(kind, "all of them")))
    assert {row.status for row in result.rows} == {RowStatus.KEPT}
    assert [row.m for row in result.rows if row.m in DEFAULT_BATCH_SIZES] == list(DEFAULT_BATCH_SIZES)
    assert result.failures[kind.value] >= 20


@pytest.mark.parametrize("after", [0, 1, 40])
def test_a_failing_environment_is_one_users_error(
    tmp_path: Path,
    sglang_0_5_23: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    after: int,
) -> None:
    lane = BrokenLane(after, UserError("the card fell off the bus"))
    monkeypatch.setattr(tune_module, "ModelLane", lambda *_args: lane)
    monkeypatch.setattr(tune_module, "CompilePool", lambda *_args: StubPool())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = make_job(sglang_0_5_23, tmp_path / "out", timer="model", batch_sizes=(16, 512))
    with pytest.raises(UserError, match="the card fell off the bus") as caught:
        tune(job, RunOptions(tmp_path / "out"), Silent())
    assert type(caught.value) is UserError
    assert lane.stopped
    assert not (tmp_path / "out").exists()
    # Nor does asyncio complain of tasks that nobody asked.
    del caught
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
