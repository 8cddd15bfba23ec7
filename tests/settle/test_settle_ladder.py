from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from settling import Run, by_m, check_written
from synthetic import SMALL, StubPool, SyntheticLane, bowl, flat, make_job

from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.job import Job
from sm120tune.measure.model_lane import ModelLane
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import DEFAULT_BATCH_SIZES, MoEProblem
from sm120tune.provenance import RowStatus
from sm120tune.search.race import ESTIMATE_LEAST_M
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.arguments import Variant
from sm120tune.upstream.lookup import BUILT_IN

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


def test_an_estimate_changes_no_row_of_a_file_but_one_that_cannot_run(
    sglang_0_5_23: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(64, 4096), trials=20, timer="model")
    slow = Tile(16, 32, 64, 1, num_warps=4, num_stages=2)
    too_large = Tile(256, 256, 128, 1, num_warps=8, num_stages=4)
    rows = {64: slow, 4096: too_large}
    folder = config_folder(tmp_path / "served", job, rows, rows)
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(folder))
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(64, 4096), trials=20, timer="model")
    assert job.today(64).pair == TilePair.same(slow)

    def facts(spec: CompileSpec) -> TileFacts | None:
        own = isinstance(spec.variant, Variant) and spec.variant.tile == too_large
        return TileFacts(job.device.shared_memory_per_block + 1, 128, 0, 8) if own else None

    found = by_m(run(job, ModelLane(job.problem, job.device, UNIFORM), StubPool(facts)))
    assert (found[64].status, found[64].chosen) == (RowStatus.KEPT, TilePair.same(slow))
    assert "a file for this card" in found[64].note
    assert found[4096].status is RowStatus.TUNED
    assert "cannot run" in found[4096].note
    # Beside the built-in default the same M gains.
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR")
    job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=(64,), trials=20, timer="model")
    assert by_m(run(job, ModelLane(job.problem, job.device, UNIFORM)))[64].status is RowStatus.TUNED


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
