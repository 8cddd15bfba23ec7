from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from optuna.trial import FrozenTrial, TrialState
from synthetic import SMALL, bowl, every_kind

from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.results import Estimated
from sm120tune.problem import Gemm
from sm120tune.search.board import Half, halves
from sm120tune.search.step import SearchStep, StepSettings
from sm120tune.search_space import Space, SpaceLimits, params_to_pair
from sm120tune.tiles import Tile, TilePair

LIMITS = SpaceLimits(101376)
DEFAULT = TilePair.same(Tile(16, 32, 64, 1))
OTHER = TilePair(Tile(32, 64, 64, 1), Tile(32, 128, 64, 1))

Answer = Callable[[Half, int], float | Failure]


def timed(half: Half, m: int) -> float:
    return bowl(half[0], half[1], m)


def make(
    m: int = 512, trials: int = 40, seeds: tuple[TilePair, ...] = (DEFAULT,), seed: int = 0, share: float = 0.4
) -> SearchStep:
    return SearchStep(Space(SMALL, m, LIMITS), StepSettings(trials, share, seed), seeds)


def answer(step: SearchStep, pair: TilePair, how: Answer = timed) -> FrozenTrial:
    """Time what is missing of a pair and tell it."""
    for half in step.board.missing(pair):
        result = how(half, step.m)
        step.board.put(half, result if isinstance(result, Failure) else Estimated(result, "bandwidth"))
    return step.tell(pair)


def drive(step: SearchStep, how: Answer = timed, *, depth: int = 1, limit: int = 10_000) -> list[TilePair]:
    """Ask and tell until nothing comes any more, keeping up to ``depth`` pairs open; return all pairs in order."""
    asked: list[TilePair] = []
    waiting: list[TilePair] = []
    while len(asked) < limit:
        pair = step.ask() if len(waiting) < depth else None
        if pair is not None:
            asked.append(pair)
            waiting.append(pair)
        elif waiting:
            # Out of order, as real answers come.
            answer(step, waiting.pop(len(waiting) // 2), how)
        else:
            return asked
    raise AssertionError(f"still asking after {limit} pairs")


# Seeds


def test_seeds_come_first_in_their_order() -> None:
    step = make(seeds=(OTHER, DEFAULT))
    assert [step.ask(), step.ask()] == [OTHER, DEFAULT]


def test_seeds_are_taken_once_and_in_canonical_form() -> None:
    grouped = replace(DEFAULT.gate_up, GROUP_SIZE_M=64)
    step = make(m=1, seeds=(DEFAULT, TilePair.same(grouped), DEFAULT))
    assert step.ask() == DEFAULT
    answer(step, DEFAULT)
    step.add_seeds([DEFAULT, TilePair.same(grouped)])
    following = drive(step)
    assert following
    assert DEFAULT not in following
    assert TilePair.same(grouped) not in following


def test_seeds_outside_the_space_are_left_out() -> None:
    tma = TilePair(DEFAULT.gate_up, replace(DEFAULT.down, USE_TMA=True))
    odd = TilePair.same(Tile(16, 48, 64, 1))
    step = make(trials=2, seeds=(odd, tma, OTHER))
    # A pair with TMA comes in without it.
    assert drive(step) == [DEFAULT, OTHER]


def test_seeds_count_as_trials_and_wait_for_more() -> None:
    step = make(trials=1, seeds=(DEFAULT, OTHER))
    assert drive(step) == [DEFAULT]
    assert step.finished
    step.allow(2)
    assert not step.finished
    assert drive(step) == [OTHER]
    assert step.told == 2


def test_late_seeds_come_first_once_more_trials_are_allowed() -> None:
    step = make(trials=3)
    drive(step)
    assert step.finished
    step.add_seeds([OTHER])
    assert step.finished
    step.allow(4)
    assert drive(step) == [OTHER]
    assert step.finished


def test_a_step_that_gave_up_stays_so() -> None:
    step = make(trials=3, seeds=(DEFAULT,))
    step.give_up()
    step.allow(10)
    assert step.ask() is None
    assert step.finished


# Proposals


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("m", [1, 512])
def test_no_pair_is_proposed_twice_and_all_are_within_the_cuts(m: int, share: float, depth: int) -> None:
    step = make(m=m, trials=40, seed=depth, share=share)
    asked = drive(step, depth=depth)
    assert len(set(asked)) == len(asked)
    for pair in asked[1:]:
        assert step.space.allows(pair.gate_up)
        assert step.space.allows(pair.down)
    assert step.told == len(asked) <= 40
    assert step.in_flight == 0
    assert step.finished


def test_the_trials_are_used_up_where_there_is_enough_to_try() -> None:
    for trials in (1, 5, 50):
        assert len(drive(make(trials=trials), depth=8)) == trials


def test_each_proposal_would_tell_something_new() -> None:
    step = make(trials=80)
    while (pair := step.ask()) is not None:
        assert step.board.missing(pair)
        answer(step, pair)


def test_the_sampler_leaves_the_neighbourhood_and_a_walk_alone_does_not() -> None:
    def far(share: float) -> int:
        step = make(trials=20, share=share)
        seen = [DEFAULT]
        count = 0
        for pair in drive(step)[1:]:
            near = {
                (gemm, tile)
                for other in seen
                for gemm, known in halves(other)
                for tile in (known, *step.space.neighbours(known))
            }
            count += not set(halves(pair)) <= near
            seen.append(pair)
        return count

    assert far(0.0) == 0
    assert far(0.5) > 4


def test_a_search_finds_better_than_it_was_given() -> None:
    for m in (8, 512):
        start = sum(bowl(gemm, tile, m) for gemm, tile in halves(DEFAULT))
        step = make(m=m, trials=60)
        drive(step, depth=8)
        best = step.board.score(step.board.best_pairs(1)[0])
        assert isinstance(best, float)
        assert best < 0.8 * start


def test_the_same_seed_proposes_the_same() -> None:
    one, same, other = (drive(make(trials=40, seed=seed)) for seed in (5, 5, 6))
    assert one == same
    assert one != other


@pytest.mark.parametrize("seed", [2**32 - 1, 2**32, 2**63, 2**80])
def test_any_seed_will_do(seed: int) -> None:
    assert len(drive(make(trials=12, seed=seed))) == 12


def test_a_tiny_space_ends_by_itself() -> None:
    space = Space(SMALL, 1, SpaceLimits(4096))
    tiles = space.tiles()
    assert 0 < len(tiles) < 20
    step = SearchStep(space, StepSettings(100_000), [TilePair.same(tiles[0])])
    asked = drive(step, depth=8)
    assert step.finished
    assert 5 < len(set(asked)) == len(asked) <= len(tiles) ** 2
    assert {tile for pair in asked for _, tile in halves(pair)} <= set(tiles)


def test_an_empty_space_ends_at_once() -> None:
    step = SearchStep(Space(SMALL, 1, SpaceLimits(1024)), StepSettings(10), [])
    assert drive(step) == []
    assert step.finished


def test_giving_up_ends_the_proposals_but_not_what_is_under_way() -> None:
    step = make(trials=1000, seeds=(DEFAULT, OTHER))
    first = step.ask()
    assert first is not None
    step.give_up()
    assert step.ask() is None
    assert step.in_flight == 1
    assert not step.finished
    answer(step, first)
    assert step.ask() is None
    assert step.finished


# Failures


def broken(half: Half, m: int) -> float | Failure:
    return every_kind(half, list(FailureKind)) or bowl(half[0], half[1], m)


@pytest.mark.parametrize("depth", [1, 8])
def test_failing_halves_never_end_a_search(depth: int) -> None:
    step = make(trials=60, seeds=(DEFAULT, OTHER))
    asked = drive(step, broken, depth=depth)
    assert len(asked) == len(set(asked)) == 60
    best = step.board.best_pairs(5)
    assert best
    for pair in best:
        assert isinstance(step.board.score(pair), float)
    assert sum(step.board.failures().values()) > 5


def test_a_search_where_everything_fails_ends() -> None:
    step = make(trials=40)
    asked = drive(step, lambda _half, _m: Failure(FailureKind.COMPILE_CRASH), depth=8)
    assert len(set(asked)) == len(asked) <= 40
    assert step.finished
    assert step.board.best_pairs(3) == []


# Trials for the journal


def test_a_trial_holds_the_pair_and_what_is_known_of_its_halves() -> None:
    step = make(seeds=(OTHER, DEFAULT))
    step.ask()
    trial = answer(step, OTHER)
    assert trial.state is TrialState.COMPLETE
    assert params_to_pair(trial.params) == OTHER
    assert trial.value == step.board.score(OTHER)
    for gemm, tile in halves(OTHER):
        assert trial.user_attrs[gemm.value] == {"timing": {"us": bowl(gemm, tile, 512), "bound": "bandwidth"}}


def test_a_failed_trial_says_which_half_failed_and_why() -> None:
    step = make()
    step.ask()
    failure = Failure(FailureKind.REGISTERS, "too many")
    trial = answer(step, DEFAULT, lambda half, m: failure if half[0] is Gemm.DOWN else timed(half, m))
    assert trial.state is TrialState.FAIL
    assert Failure.from_json(trial.user_attrs["down"]["failure"]) == failure
    assert "timing" in trial.user_attrs["gate_up"]


def test_telling_what_was_not_asked_is_an_error() -> None:
    with pytest.raises(KeyError):
        make().tell(OTHER)


# Exhaustive


@pytest.mark.parametrize(("m", "limit"), [(1, 101376), (64, 12288)])
def test_an_exhaustive_search_covers_the_space_exactly_once(m: int, limit: int) -> None:
    space = Space(SMALL, m, SpaceLimits(limit), exhaustive=True)
    step = SearchStep(space, StepSettings(trials=1), [DEFAULT, OTHER])
    asked = drive(step, depth=8)
    assert len(asked) == len(set(asked))
    for gemm in Gemm:
        tiles = [dict(halves(pair))[gemm] for pair in asked]
        assert set(space.tiles()) <= set(tiles)
    same = [pair.gate_up for pair in asked if pair.gate_up == pair.down]
    assert sorted(same) == sorted(space.tiles())
    assert step.finished
    best = step.board.best_pairs(1)[0]
    for gemm, tile in halves(best):
        us = bowl(gemm, tile, m)
        assert us == min(bowl(gemm, other, m) for other in space.tiles() if other.BLOCK_SIZE_M == tile.BLOCK_SIZE_M)


def test_an_exhaustive_search_can_be_given_up() -> None:
    step = SearchStep(Space(SMALL, 64, LIMITS, exhaustive=True), StepSettings(trials=1), [])
    first = step.ask()
    assert first is not None
    step.give_up()
    assert step.ask() is None
    answer(step, first)
    assert step.finished
