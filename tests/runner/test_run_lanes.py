from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from runner_bench import Bench, Recorder, timed_halves
from synthetic import bowl, make_job

from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.pool import CompilePool
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.problem import Gemm
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.search.board import halves
from sm120tune.tiles import Tile

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


@pytest.fixture
def compilers(own_cache: Path) -> Iterator[CompilePool]:
    pool = CompilePool(CompileCache(own_cache / "runner"), 2)
    yield pool
    pool.stop()


def test_real_compilers_feed_the_lane(bench: Bench, sglang_0_5_23: Path, compilers: CompilePool) -> None:
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=4)
    lane = bench.lane()
    result = bench.run(job, lane, pool=compilers)
    assert result.compiled >= len(lane.gemms) > 5
    for request, facts in lane.facts.items():
        assert 0 < facts.shared_bytes <= job.limits.shared_memory_per_block
        assert 0 < facts.registers <= 255
        assert facts.num_warps == request.tile.num_warps
    assert len({facts.shared_bytes for facts in lane.facts.values()}) > 1
    row = next(row for row in result.rows if row.m == 64)
    assert row.status is RowStatus.TUNED


def test_what_the_compiler_finds_too_large_is_never_timed(
    bench: Bench, sglang_0_5_23: Path, compilers: CompilePool
) -> None:
    # On a card with little shared memory, today's tile is still within it, many others are not.
    job = make_job(sglang_0_5_23, bench.folder / "out", batch_sizes=(64,), trials=1, shared_memory=14000)
    lane = bench.lane()
    result = bench.run(job, lane, pool=compilers)
    assert result.failures["shared_memory"] > 0
    assert all(facts.shared_bytes <= 14000 for facts in lane.facts.values())
    for row in result.rows:
        if row.status is RowStatus.TUNED:
            for gemm, tile in halves(row.chosen):
                assert any(r.tile == tile and r.gemm is gemm for r in lane.gemms)
