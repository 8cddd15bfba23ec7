from __future__ import annotations

import asyncio
import gc
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from synthetic import StubPool, SyntheticLane, bowl, every_kind, make_job, open_journal, pair_us

from sm120tune import tune as tune_module
from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.pool import CompilePool
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job
from sm120tune.measure.lane import Timer
from sm120tune.measure.results import GemmRequest
from sm120tune.observer import Silent, Standing
from sm120tune.problem import DEFAULT_BATCH_SIZES, Gemm
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.runner import Runner, RunResult
from sm120tune.search.board import halves
from sm120tune.search_space import params_to_pair
from sm120tune.tiles import Tile
from sm120tune.tune import RunOptions, tune

GEMM_KINDS = [
    FailureKind.LAUNCH_ERROR, FailureKind.ILLEGAL_ACCESS, FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY,
]  # fmt: skip
COMPILE_KINDS = [FailureKind.COMPILE_CRASH, FailureKind.COMPILE_TIMEOUT, FailureKind.REGISTERS]


@pytest.fixture(autouse=True)
def _no_folder_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)


class Recorder(Silent):
    """An observer that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.rows: list[RowProvenance] = []
        self.standings: list[Standing] = []
        self.counts: Counter[str] = Counter()
        self.threads: set[int] = set()
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)

    def phase(self, name: str, total: int) -> None:
        self.phases.append(name)
        self.threads.add(threading.get_ident())

    def standing(self, standing: Standing) -> None:
        self.standings.append(standing)
        self.threads.add(threading.get_ident())

    def failures(self, counts: Counter[str]) -> None:
        self.counts = counts

    def row(self, row: RowProvenance) -> None:
        self.rows.append(row)


class Bench:
    """Runs jobs in one folder, with lanes that are ended afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lanes: list[SyntheticLane] = []

    def lane(self, *args: Any, **options: Any) -> SyntheticLane:
        lane = SyntheticLane(*args, **options)
        self.lanes.append(lane)
        return lane

    def run(
        self, job: Job, *lanes: Timer, pool: Any = None, observer: Recorder | None = None, fresh: bool = False
    ) -> RunResult:
        journal = open_journal(self.folder / "runs", job.identity(), fresh=fresh)
        runner = Runner(job, pool or StubPool(), lanes, journal, observer or Recorder())
        return asyncio.run(asyncio.wait_for(runner.run(), 120))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for lane in bench.lanes:
        lane.stop()


def timed_halves(lane: SyntheticLane) -> list[tuple[int, Any, Any]]:
    return [(request.m, request.gemm, request.tile) for request in lane.gemms]


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


class _BrokenLane(SyntheticLane):
    """A lane whose machine fails after a while."""

    def __init__(self, after: int, error: BaseException) -> None:
        super().__init__()
        self._left, self._broken = after, error

    def time_gemm(self, request: GemmRequest, facts: TileFacts) -> Future[Any]:
        self._left -= 1
        if self._left >= 0:
            return super().time_gemm(request, facts)
        future: Future[Any] = Future()
        future.set_exception(self._broken)
        return future


@pytest.mark.parametrize("after", [0, 1, 40])
def test_a_failing_environment_is_one_users_error(
    tmp_path: Path,
    sglang_0_5_23: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    after: int,
) -> None:
    lane = _BrokenLane(after, UserError("the card fell off the bus"))
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


# Resuming


def test_a_second_run_of_the_same_job_times_almost_nothing(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(16, 64, 512), trials=30)
    first, second, fresh = bench.lane(), bench.lane(), bench.lane()
    before = bench.run(job, first)
    after = bench.run(job, second)
    assert after.resumed >= 90
    assert len(second.gemms) < 0.1 * len(first.gemms)
    assert not set(timed_halves(first)) & set(timed_halves(second))
    assert [row.m for row in after.rows] == [row.m for row in before.rows]
    again = bench.run(job, fresh, fresh=True)
    assert again.resumed == 0
    assert len(fresh.gemms) > 0.5 * len(first.gemms)


def test_more_trials_go_on_from_there(bench: Bench, sglang_0_5_23: Path) -> None:
    lanes = [bench.lane(), bench.lane()]
    for lane, trials in zip(lanes, (15, 40), strict=True):
        bench.run(make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=trials), lane)
    assert len(lanes[1].gemms) > 10
    assert not set(timed_halves(lanes[0])) & set(timed_halves(lanes[1]))


def test_another_m_adds_to_the_same_run(bench: Bench, sglang_0_5_23: Path) -> None:
    lanes = [bench.lane(), bench.lane()]
    bench.run(make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,)), lanes[0])
    result = bench.run(make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64, 128)), lanes[1])
    assert result.resumed >= 30
    again = Counter(request.m for request in lanes[1].gemms)
    # What the new M found is tried at the old one, but nothing is done twice.
    assert again[128] > 2 * again[64]
    assert not set(timed_halves(lanes[0])) & set(timed_halves(lanes[1]))


def test_a_run_that_broke_off_goes_on_with_what_was_finished(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64, 512), trials=40)
    broken = _BrokenLane(60, UserError("gone"))
    bench.lanes.append(broken)
    with pytest.raises((UserError, ExceptionGroup)) as caught:
        bench.run(job, broken)
    assert "UserError: gone" in "".join(traceback.format_exception(caught.value))
    journal = open_journal(bench.folder / "runs", job.identity())
    kept = sum(len(journal.trials(m)) for m in job.batch_sizes)
    assert kept > 10
    known = {
        (m, gemm, tile)
        for m in job.batch_sizes
        for trial in journal.trials(m)
        for gemm, tile in halves(params_to_pair(trial.params))
    }
    second = bench.lane()
    result = bench.run(job, second)
    assert result.resumed == kept
    assert not known & set(timed_halves(second))
    assert {row.status for row in result.rows if row.m in job.batch_sizes} == {RowStatus.TUNED}


# Budget


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("budget_s", [0.01, 3.0])
def test_a_budget_ends_the_run_and_the_ladder_is_whole(
    bench: Bench, sglang_0_5_23: Path, exhaustive: bool, budget_s: float
) -> None:
    options: dict[str, Any] = {"batch_sizes": (16, 512), "trials": 100_000, "exhaustive": exhaustive}
    job = make_job(sglang_0_5_23, bench.folder / "out", budget_s=budget_s, **options)
    lane = bench.lane(before=lambda _request: time.sleep(0.01))
    begin = time.monotonic()
    result = bench.run(job, lane)
    assert time.monotonic() - begin < 30
    # The whole space would be thousands.
    assert len(lane.gemms) < 1000
    rows = {row.m: row for row in result.rows}
    assert set(DEFAULT_BATCH_SIZES) <= set(rows)
    for row in rows.values():
        assert row.chosen == job.today(row.m).pair or row.status is RowStatus.TUNED
        assert row.today_us is None or row.m in job.batch_sizes
    # What was found is there for the next time.
    kept = open_journal(bench.folder / "runs", job.identity())
    assert result.timed == 0 or sum(len(kept.trials(m)) for m in job.batch_sizes) > 0


def test_a_budget_counts_from_the_start_of_the_command(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", trials=100_000, budget_s=60.0)
    journal = open_journal(bench.folder / "runs", job.identity())
    lane = bench.lane(before=lambda _request: time.sleep(0.01))
    runner = Runner(job, StubPool(), [lane], journal, Recorder(), began=time.monotonic() - 100)
    result = asyncio.run(asyncio.wait_for(runner.run(), 60))
    assert len(lane.gemms) < 100
    assert set(DEFAULT_BATCH_SIZES) <= {row.m for row in result.rows}


# Lanes


def test_two_lanes_share_the_ladder_in_contiguous_parts(bench: Bench, sglang_0_5_23: Path) -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=sizes, trials=24)
    pause = lambda _request: time.sleep(0.001)  # noqa: E731
    lanes = [bench.lane(name="one", before=pause), bench.lane(name="two", before=pause)]
    result = bench.run(job, *lanes)
    orders = [list(dict.fromkeys(request.m for request in lane.gemms)) for lane in lanes]
    assert set(orders[0]) | set(orders[1]) == set(sizes)
    # Each starts at the beginning of its own part, and the parts lie side by side.
    starts = [order[0] for order in orders]
    assert starts[0] == sizes[0] < starts[1]
    assert min(len(order) for order in orders) >= 2
    for lane in lanes:
        assert lane.races
        assert lane.checks
    assert {row.m for row in result.rows if row.status is RowStatus.TUNED} == set(sizes)
    # Nothing was timed on both, whatever was handed over.
    assert len(set(timed_halves(lanes[0]) + timed_halves(lanes[1]))) == sum(len(lane.gemms) for lane in lanes)


def test_more_lanes_than_sizes_is_no_trouble(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=10)
    lanes = [bench.lane(name=str(number)) for number in range(4)]
    result = bench.run(job, *lanes)
    assert {row.m for row in result.rows if row.status is RowStatus.TUNED} == {64}
    assert sum(bool(lane.gemms) for lane in lanes) == 1


def test_a_slow_lane_is_helped(bench: Bench, sglang_0_5_23: Path) -> None:
    sizes = tuple(range(1, 25))
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=sizes, trials=4)
    slow = bench.lane(name="slow", before=lambda _request: time.sleep(0.02))
    quick = bench.lane(name="quick")
    bench.run(job, slow, quick)
    counts = [len({request.m for request in lane.gemms}) for lane in (slow, quick)]
    assert counts[1] > counts[0]


def test_a_lane_says_how_it_started(bench: Bench, sglang_0_5_23: Path) -> None:
    observer = Recorder()
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=3)
    bench.run(job, bench.lane(name="GPU 0", ready="a card, 3 GiB"), observer=observer)
    assert observer.events == ["GPU 0: a card, 3 GiB"]


def test_a_lane_that_cannot_start_ends_the_run(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64, 512), trials=100_000)
    broken = bench.lane(name="GPU 1", ready=Failure(FailureKind.OUT_OF_MEMORY, "2 GiB too many"))
    with pytest.raises((UserError, ExceptionGroup)) as caught:
        bench.run(job, bench.lane(name="GPU 0"), broken)
    assert "UserError: GPU 1: cannot start (out_of_memory: 2 GiB too many)" in "".join(
        traceback.format_exception(caught.value)
    )


# Between the keys


def served(rows: Sequence[RowProvenance], m: int) -> RowProvenance:
    """Return the row that SGLang takes for M."""
    return min(rows, key=lambda row: (abs(row.m - m), row.m))


def test_a_tuned_row_that_is_slower_between_the_keys_gets_a_key_beside_it(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(256, 512))
    today = job.today(300).pair
    assert today == job.today(512).pair

    def cost(gemm: Gemm, tile: Tile, m: int) -> float:
        # Only at the keys themselves do new tiles pay.
        return bowl(gemm, tile, m) if m in job.batch_sizes else 1.0 if tile == today.gate_up else 2.0  # type: ignore[union-attr]

    rows = bench.run(job, bench.lane(cost)).rows
    by_m = {row.m: row for row in rows}
    assert by_m[256].status is by_m[512].status is RowStatus.TUNED
    added = [row for row in rows if row.m not in job.ladder_keys(frozenset())]
    assert [row.m for row in added if 256 < row.m < 512] != []
    for row in added:
        assert row.chosen == today
        assert row.status is RowStatus.KEPT
        assert "key added" in row.note
    # Where the two rows met, today's pair serves now.
    assert served(rows, 384).chosen == served(rows, 385).chosen == today


def test_no_key_is_added_where_the_rows_serve_well_between_them(bench: Bench, sglang_0_5_23: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(256, 512))
    lane = bench.lane(lambda gemm, tile, _m: bowl(gemm, tile, 512))
    rows = bench.run(job, lane).rows
    assert tuple(row.m for row in rows) == job.ladder_keys(frozenset())
    # It was looked at.
    assert any(request.m == 384 for request in lane.races)


# The real compilers


def test_real_compilers_feed_the_lane(bench: Bench, sglang_0_5_23: Path, own_cache: Path) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=4)
    pool = CompilePool(CompileCache(own_cache / "runner"), 2)
    lane = bench.lane()
    try:
        result = bench.run(job, lane, pool=pool)
    finally:
        pool.stop()
    assert result.compiled >= len(lane.gemms) > 5
    for request, facts in lane.facts.items():
        assert 0 < facts.shared_bytes <= job.limits.shared_memory_per_block
        assert 0 < facts.registers <= 255
        assert facts.num_warps == request.tile.num_warps
    assert len({facts.shared_bytes for facts in lane.facts.values()}) > 1
    row = next(row for row in result.rows if row.m == 64)
    assert row.status is RowStatus.TUNED


def test_what_the_compiler_finds_too_large_is_never_timed(bench: Bench, sglang_0_5_23: Path, own_cache: Path) -> None:
    # On a card with little shared memory, today's tile is still within it, many others are not.
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=1, shared_memory=14000)
    pool = CompilePool(CompileCache(own_cache / "runner"), 2)
    lane = bench.lane()
    try:
        result = bench.run(job, lane, pool=pool)
    finally:
        pool.stop()
    assert result.failures["shared_memory"] > 0
    assert all(facts.shared_bytes <= 14000 for facts in lane.facts.values())
    for row in result.rows:
        if row.status is RowStatus.TUNED:
            for gemm, tile in halves(row.chosen):
                assert any(r.tile == tile and r.gemm is gemm for r in lane.gemms)
