from __future__ import annotations

import itertools

import pytest

from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.results import Estimated, Measured, What
from sm120tune.problem import Gemm
from sm120tune.search.board import Board, Half, halves
from sm120tune.tiles import Tile, TilePair

CRASH = Failure(FailureKind.COMPILE_CRASH, "pass failed")


def tile(block_m: int, block_n: int) -> Tile:
    return Tile(block_m, block_n, 64, 1)


def put(board: Board, half: Half, us: float) -> None:
    board.put(half, Estimated(us, "bandwidth"))


def filled() -> Board:
    """Return a board with two tiles a GEMM at each of two BLOCK_SIZE_M."""
    board = Board()
    for gemm, block_m, block_n, us in [
        (Gemm.GATE_UP, 16, 32, 5.0), (Gemm.GATE_UP, 16, 64, 4.0),
        (Gemm.GATE_UP, 32, 32, 1.0), (Gemm.GATE_UP, 32, 64, 2.0),
        (Gemm.DOWN, 16, 32, 3.0), (Gemm.DOWN, 16, 64, 6.0), (Gemm.DOWN, 32, 32, 9.0), (Gemm.DOWN, 32, 64, 8.0),
    ]:  # fmt: skip
        put(board, (gemm, tile(block_m, block_n)), us)
    return board


def test_halves_are_the_two_gemms() -> None:
    pair = TilePair(tile(16, 32), tile(16, 64))
    assert halves(pair) == ((Gemm.GATE_UP, pair.gate_up), (Gemm.DOWN, pair.down))


def test_score_is_the_sum_of_both_gemms() -> None:
    board = filled()
    assert board.score(TilePair(tile(16, 64), tile(16, 32))) == 7.0
    assert board.score(TilePair.same(tile(32, 64))) == 10.0


def test_a_pair_is_unknown_until_both_halves_are_known() -> None:
    board = Board()
    pair = TilePair(tile(16, 32), tile(16, 64))
    assert board.missing(pair) == halves(pair)
    assert board.score(pair) is None
    put(board, (Gemm.GATE_UP, pair.gate_up), 3.0)
    assert board.missing(pair) == ((Gemm.DOWN, pair.down),)
    assert board.score(pair) is None
    put(board, (Gemm.DOWN, pair.down), 4.0)
    assert board.missing(pair) == ()
    assert board.score(pair) == 7.0
    # The same tile in the other GEMM is another kernel.
    assert board.get((Gemm.DOWN, pair.gate_up)) is None


@pytest.mark.parametrize("broken", list(Gemm))
def test_a_pair_with_a_failed_half_has_its_failure(broken: Gemm) -> None:
    board = filled()
    board.put((broken, tile(16, 64)), CRASH)
    assert board.score(TilePair.same(tile(16, 64))) == CRASH
    other = Gemm.DOWN if broken is Gemm.GATE_UP else Gemm.GATE_UP
    best = board.best_pairs(100)
    assert best
    assert all(tile(16, 64) != dict(halves(pair))[broken] for pair in best)
    assert any(tile(16, 64) == dict(halves(pair))[other] for pair in best)
    assert tile(16, 64) not in board.best_tiles(broken, 16, 10)


def test_best_pairs_share_block_m_and_come_best_first() -> None:
    board = filled()
    pairs = board.best_pairs(100)
    scores = [board.score(pair) for pair in pairs]
    assert scores == sorted(scores)  # type: ignore[type-var]
    every = {
        TilePair(tile(block_m, up), tile(block_m, down))
        for block_m in (16, 32)
        for up, down in itertools.product((32, 64), repeat=2)
    }
    assert set(pairs) == every
    assert pairs[0] == TilePair(tile(16, 64), tile(16, 32))
    assert board.best_pairs(2) == pairs[:2]


def test_best_of_one_gemm() -> None:
    board = filled()
    assert board.best_us(Gemm.GATE_UP) == 1.0
    assert board.best_us(Gemm.DOWN) == 3.0
    assert board.best_tiles(Gemm.GATE_UP, 16, 1) == [tile(16, 64)]
    assert board.best_tiles(Gemm.DOWN, 32, 5) == [tile(32, 64), tile(32, 32)]
    assert board.best_tiles(Gemm.DOWN, 64, 5) == []


def test_an_empty_or_all_failed_board_has_no_best() -> None:
    board = Board()
    assert board.best_pairs(5) == []
    assert board.best_us(Gemm.DOWN) is None
    board.put((Gemm.GATE_UP, tile(16, 32)), CRASH)
    put(board, (Gemm.DOWN, tile(16, 32)), 1.0)
    assert board.best_pairs(5) == []
    assert board.best_us(Gemm.GATE_UP) is None
    assert len(board) == 2


def test_failures_are_counted_by_kind() -> None:
    board = filled()
    for block_n, kind in [(16, FailureKind.TIMEOUT), (128, FailureKind.TIMEOUT), (256, FailureKind.REGISTERS)]:
        board.put((Gemm.DOWN, tile(16, block_n)), Failure(kind))
    assert board.failures() == {"timeout": 2, "registers": 1}


def test_a_later_result_replaces_an_earlier_one() -> None:
    board = filled()
    board.put((Gemm.GATE_UP, tile(16, 64)), Measured(0.5, 0.1, 5, What.GATE_UP))
    assert board.best_us(Gemm.GATE_UP) == 0.5
    board.put((Gemm.GATE_UP, tile(16, 64)), CRASH)
    assert board.best_us(Gemm.GATE_UP) == 1.0
    assert len(board) == 8
