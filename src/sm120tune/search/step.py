"""The search at one M: seeds, a coordinate walk and an Optuna study, behind ask and tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from sm120tune.problem import Gemm
from sm120tune.search.board import Board, Timing, halves, result_from_json, result_to_json
from sm120tune.search_space import Space, distributions, pair_to_params, params_to_pair
from sm120tune.tiles import Tile, TilePair

_WALK_BLOCK_SIZES = 2
_MAX_REPEATS_PER_ASK = 25
_STARTUP_TRIALS = 8
_SAMPLER_SEEDS = 2**32
"""Optuna's sampler takes no larger seed."""


@dataclass(frozen=True)
class StepSettings:
    """How much one M may try."""

    trials: int
    """Pairs that are compiled and timed; repeats are free."""
    sampler_share: float = 0.1
    """Least share of the trials that Optuna's sampler proposes; bench/search_quality.py is where it comes from.

    The walk alone reaches as much on the recorded tables with fewer binaries; the sampler is the way out of a local
    optimum that no recorded table has.
    """
    seed: int = 0


class SearchStep:
    """Proposes pairs at one M until its trials are used up or nothing is left to try.

    Ask for pairs, time what :meth:`Board.missing` says, put the times on the board, tell the pair. Repeated and
    impossible proposals of the sampler are answered here, without compiling.
    """

    def __init__(self, space: Space, settings: StepSettings, seeds: Iterable[TilePair]) -> None:
        self.space = space
        self.board = Board()
        self._distributions = distributions(space.values)
        self._settings = settings
        self._queue: list[TilePair] = []
        self._asked: set[TilePair] = set()
        self._open: dict[TilePair, optuna.Trial | None] = {}
        self._told = 0
        self._sampled = 0
        self._walked: set[TilePair] = set()
        self._exhausted = False
        self._stopped = False
        self._study = optuna.create_study(
            direction="minimize",
            sampler=optuna.samplers.TPESampler(
                seed=settings.seed % _SAMPLER_SEEDS, n_startup_trials=_STARTUP_TRIALS, constant_liar=True
            ),
        )
        self._grid: Iterator[Tile] | None = iter(space.tiles()) if space.exhaustive else None
        self.add_seeds(seeds)

    @property
    def m(self) -> int:
        """Tokens."""
        return self.space.m

    @property
    def in_flight(self) -> int:
        """Pairs asked for and not told yet."""
        return len(self._open)

    @property
    def told(self) -> int:
        """Pairs finished, resumed ones included."""
        return self._told

    @property
    def finished(self) -> bool:
        """Whether nothing is under way and nothing more will be proposed."""
        return not self._open and (self._stopped or self._exhausted or self._spent())

    def add_seeds(self, pairs: Iterable[TilePair]) -> None:
        """Queue pairs to try first: today's, shipped rows, neighbours' winners."""
        for pair in pairs:
            # TMA is no part of the space: such a pair comes in without it, and may get it back in the race.
            up, down = (replace(tile, USE_TMA=False) for tile in (pair.gate_up, pair.down))
            seed = TilePair(self.space.canonical(up), self.space.canonical(down))
            if (
                seed not in self._asked
                and seed not in self._queue
                and pair_to_params(seed, self.space.values) is not None
            ):
                self._queue.append(seed)
                self._exhausted = False

    def resume(self, trials: Iterable[FrozenTrial], read_timing: Callable[[Mapping[str, Any]], Timing]) -> None:
        """Take over finished trials of an earlier run, with the times of their halves."""
        for trial in trials:
            pair = params_to_pair(trial.params)
            if pair not in self._asked:
                for half in halves(pair):
                    known = trial.user_attrs.get(half[0].value)
                    if known is not None:
                        self.board.put(half, result_from_json(known, read_timing))
                self._asked.add(pair)
                self._told += 1
                self._study.add_trial(trial)

    def allow(self, trials: int) -> None:
        """Let the step go on until this many pairs are told."""
        self._settings = replace(self._settings, trials=trials)
        self._exhausted = False

    def ask(self) -> TilePair | None:
        """Return a pair that has not been proposed before, or None when there is none for now."""
        if self._stopped:
            return None
        if self._grid is not None:
            return self._ask_grid(self._grid)
        if self._spent():
            return None
        if self._queue:
            return self._open_pair(self._queue.pop(0), None)
        if self._sampled < self._settings.sampler_share * (self._told + len(self._open)):
            return self._ask_sampler() or self._ask_walk()
        return self._ask_walk() or self._ask_sampler()

    def tell(self, pair: TilePair) -> FrozenTrial:
        """Close a pair whose halves are on the board; returns the trial for the journal."""
        trial = self._open.pop(pair)
        self._told += 1
        self._exhausted = False
        score = self.board.score(pair)
        state = TrialState.COMPLETE if isinstance(score, float) else TrialState.FAIL
        value = score if isinstance(score, float) else None
        frozen = create_trial(
            state=state,
            value=value,
            params=pair_to_params(pair, self.space.values) or {},
            distributions=dict(self._distributions),
            user_attrs=_half_attrs(self.board, pair),
        )
        if trial is not None:
            self._study.tell(trial, value, state)
        else:
            self._study.add_trial(frozen)
        return frozen

    def give_up(self) -> None:
        """Propose nothing more: the time is up."""
        self._stopped = True

    def _spent(self) -> bool:
        return self._grid is None and self._told + len(self._open) >= self._settings.trials

    def _open_pair(self, pair: TilePair, trial: optuna.Trial | None) -> TilePair:
        self._asked.add(pair)
        self._open[pair] = trial
        return pair

    def _ask_grid(self, grid: Iterator[Tile]) -> TilePair | None:
        for tile in grid:
            pair = TilePair.same(tile)
            if pair not in self._asked:
                return self._open_pair(pair, None)
        self._exhausted = True
        return None

    def _ask_walk(self) -> TilePair | None:
        """Return a neighbour of the best pairs: one field of one GEMM changed, the other GEMM at its best."""
        for pair in self.board.best_pairs(_WALK_BLOCK_SIZES):
            if pair in self._walked:
                continue
            for tile in self.space.neighbours(pair.gate_up):
                other = TilePair(tile, pair.down)
                if other not in self._asked and self.board.get((Gemm.GATE_UP, tile)) is None:
                    return self._open_pair(other, None)
            for tile in self.space.neighbours(pair.down):
                other = TilePair(pair.gate_up, tile)
                if other not in self._asked and self.board.get((Gemm.DOWN, tile)) is None:
                    return self._open_pair(other, None)
            self._walked.add(pair)
        return None

    def _ask_sampler(self) -> TilePair | None:
        for _ in range(_MAX_REPEATS_PER_ASK):
            trial = self._study.ask(dict(self._distributions))
            pair = params_to_pair(trial.params)
            known = self.board.score(pair)
            if isinstance(known, float):
                self._study.tell(trial, known)
            elif known is not None or pair in self._asked or not self._allowed(pair):
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._sampled += 1
                return self._open_pair(pair, trial)
        if not self._open:
            self._exhausted = True
        return None

    def _allowed(self, pair: TilePair) -> bool:
        return self.space.allows(pair.gate_up) and self.space.allows(pair.down)


def _half_attrs(board: Board, pair: TilePair) -> dict[str, Any]:
    """Return what the board knows of a pair's halves, for the journal."""
    results = {half[0].value: board.get(half) for half in halves(pair)}
    return {name: result_to_json(result) for name, result in results.items() if result is not None}
