"""One band of M tuned anew and merged into the pair that is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import SMALL, Cost, StubPool, SyntheticLane, bowl, make_job, pair_us

from sm120tune import tune as module
from sm120tune.errors import UserError
from sm120tune.job import Settings
from sm120tune.measure.routing import BALANCED
from sm120tune.observer import Silent
from sm120tune.problem import DEFAULT_BATCH_SIZES, Gemm
from sm120tune.provenance import FileProvenance, RowStatus, load
from sm120tune.search.ladder import nearest
from sm120tune.tiles import Tile
from sm120tune.tune import Outcome, RunOptions, tune

BAND = (16, 24, 32)
ALL = tuple(m for m in DEFAULT_BATCH_SIZES if m <= 512)

Tuned = Callable[..., tuple[Outcome, SyntheticLane]]


def shifted(gemm: Gemm, tile: Tile, m: int) -> float:
    """Return times with their optimum elsewhere, so that a second run finds other rows."""
    return bowl(gemm, tile, m) * (1 + 0.5 * abs(tile.num_warps - 8) + 0.2 * abs(tile.num_stages - 5))


@pytest.fixture
def tuned(sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Return a function that tunes some M with a made-up card's times, into one output folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "CompilePool", lambda *_args: StubPool())

    def run(sizes: tuple[int, ...], cost: Cost, **changes: object) -> tuple[Outcome, SyntheticLane]:
        lane = SyntheticLane(cost)
        monkeypatch.setattr(module, "make_lanes", lambda *_args: [lane])
        job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=sizes, trials=20)
        job = replace(job, **changes)  # type: ignore[arg-type]
        return tune(job, RunOptions(tmp_path / "out", fresh=True), Silent()), lane

    return run


def blocks(path: Path) -> dict[int, str]:
    """Return the text of each row of a config file, letter by letter."""
    return {int(m): text for text, m in re.findall(r'( *"(\d+)": \{[^}]*\})', path.read_text())}


def pair_files(outcome: Outcome) -> tuple[Path, Path]:
    return outcome.written.up_path, outcome.written.down_path


def record_of(outcome: Outcome) -> FileProvenance:
    return load(outcome.written.provenance_paths[0])


def test_a_band_leaves_every_other_row_as_it_is(tuned: Tuned) -> None:
    first, _ = tuned(ALL, bowl)
    before, rows_before = [blocks(path) for path in pair_files(first)], {row.m: row for row in record_of(first).rows}
    assert rows_before[8].status is rows_before[48].status is RowStatus.TUNED
    second, lane = tuned(BAND, shifted)
    after, rows_after = [blocks(path) for path in pair_files(second)], {row.m: row for row in record_of(second).rows}
    assert list(after[0]) == sorted(after[0]) == list(after[1])
    added = set(after[0]) - set(before[0])
    for old, new in zip(before, after, strict=True):
        assert {m: new[m] for m in old if m not in BAND} == {m: old[m] for m in old if m not in BAND}
    assert any(before[0][m] != after[0][m] or before[1][m] != after[1][m] for m in BAND)
    for m, row in rows_before.items():
        if m not in BAND:
            assert rows_after[m] == row
    # Only the band was searched, and nothing was timed away from it and its seams.
    assert {request.m for request in lane.gemms} == set(BAND)
    assert {request.m for request in lane.races} <= {12, *BAND, 20, 28, 40}
    assert added <= {12, 13, 20, 21, 28, 29, 40, 41}


def test_the_seams_are_checked_with_the_rows_that_stay(tuned: Tuned) -> None:
    first, _ = tuned(ALL, bowl)
    old = {row.m: row.chosen for row in record_of(first).rows}
    second, lane = tuned(BAND, shifted)
    new = {row.m: row.chosen for row in record_of(second).rows}
    raced = {m: [request for request in lane.races if request.m == m] for m in (12, 40)}
    # Below, key 8 of the first run hands over to 16; above, 32 to key 48.
    for m, stays, tuned_anew in ((12, 8, 16), (40, 48, 32)):
        (request,) = raced[m]
        assert {old[stays], new[tuned_anew]} <= set(request.pairs)
        today = make_today(second, m)
        assert today in request.pairs


def make_today(outcome: Outcome, m: int) -> object:
    """Return what SGLang runs at M: the built-in default changes above E."""
    rows = {row.m: row for row in record_of(outcome).rows}
    return rows[1 if m <= SMALL.experts else 24].today


def test_a_row_that_loses_at_the_seam_gets_a_key(tuned: Tuned) -> None:
    first, _ = tuned(ALL, bowl)
    assert 40 not in {row.m for row in record_of(first).rows}
    default = Tile(64, 64, 32, 8, 4, 3)

    def slow_between(gemm: Gemm, tile: Tile, m: int) -> float:
        return shifted(gemm, tile, m) * (10.0 if m == 40 and tile != default else 1.0)

    second, lane = tuned(BAND, slow_between)
    (race,) = [request for request in lane.races if request.m == 40]
    rows = {row.m: row for row in record_of(second).rows}
    assert rows[40].note.startswith("key added")
    # What serves from there on is the fastest of those that were timed.
    costs = {pair: pair_us(slow_between, pair, 40) for pair in race.pairs}
    assert costs[rows[40].chosen] == min(costs.values())


def test_an_earlier_winner_is_tried_again(tuned: Tuned) -> None:
    """With fewer trials a second run may find less; it must not lose what the first had found."""
    first, _ = tuned(BAND, bowl)
    old = {row.m: row.chosen for row in record_of(first).rows}
    _, lane = tuned(BAND, bowl)
    for m in BAND:
        halves = {(request.gemm, request.tile) for request in lane.gemms if request.m == m}
        assert {(Gemm.GATE_UP, old[m].gate_up), (Gemm.DOWN, old[m].down)} <= halves


def test_the_fewest_keys_of_a_band_count_on_the_rows_that_stay(tuned: Tuned) -> None:
    first, _ = tuned(ALL, bowl)
    old = {row.m: row.chosen for row in record_of(first).rows}
    before = [blocks(path) for path in pair_files(first)]
    settings = Settings(trials=20, exhaustive=False, budget_s=None, seed=0, fewest_keys=True)
    second, _ = tuned(BAND, bowl, settings=settings)
    new = {row.m: row.chosen for row in record_of(second).rows}
    # Every other row stays; of the band those go whose M a neighbour serves as well, a row of the first run included.
    assert set(old) - set(BAND) <= set(new)
    assert set(old) - set(new)
    for text, path in zip(before, pair_files(second), strict=True):
        assert {m: row for m, row in blocks(path).items() if m not in BAND} == {
            m: row for m, row in text.items() if m not in BAND
        }
    for m in BAND:
        assert pair_us(bowl, new[nearest(list(new), m)], m) <= 1.02 * pair_us(bowl, old[m], m)


def test_what_cannot_be_merged_is_refused_before_the_work(tuned: Tuned) -> None:
    first, _ = tuned(BAND, bowl)
    before = [path.read_bytes() for path in pair_files(first)]
    for changes, words in (
        ({"routing": BALANCED}, "routing is uniform there and balanced here"),
        ({"problem": replace(SMALL, hidden=1024)}, "problem.hidden is 512 there and 1024 here"),
    ):
        with pytest.raises(UserError, match=words):
            tuned(BAND, bowl, **changes)
    first.written.up_path.write_text("{}")
    with pytest.raises(UserError, match="was changed since it was written"):
        tuned(BAND, bowl)
    assert first.written.down_path.read_bytes() == before[1]


def test_a_band_at_the_end_of_the_ladder_needs_no_room_above(tuned: Tuned, sglang_0_5_23: Path, tmp_path: Path) -> None:
    for sizes, largest in (((16384,), 16384), ((8192,), 12289), (BAND, 41), ((1, 512), 769)):
        job = make_job(sglang_0_5_23, tmp_path / "out", batch_sizes=sizes)
        assert (job.seam_m, job.largest_m) == (largest, largest)
