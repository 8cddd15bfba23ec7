"""What Optuna's own samplers reach on recorded tables, at the trials that the product's search has.

    python bench/samplers.py bench/tables/*.parquet --trials 48 --seeds 0,1,2 --sglang PATH

Every sampler drives a pair search per M: one distribution per tile field, BLOCK_SIZE_M shared; the objective is gate_up
plus down with noise of the recorded spread, the same for all samplers at one seed. ``alone`` starts from nothing;
``seeded`` gets what the product's search gets: its seeds, the best pairs of the neighbouring M in ladder order, and the
exchange between its three passes. The choice is the board's best pair by the noisy times.

Optuna's are treated better than the product: only values that some candidate has are offered; a trial is a pair with a
half that was not timed before, all else (known pairs, copies that are the same program, failures) is answered for free,
at most 10 asks per trial; no pair is under way while the next is chosen. A failure is told as FAIL, but to tpe and gp
as the worst time so far: FAIL teaches them nothing and they propose the same pair again (``tpe-fail``). qmc, cma-es, gp
and tpe-group-ord see values as ordered integers, the others as categories. Slow ones have their own --slow-seeds; a
sampler whose package is missing is skipped.

``product`` is the product's runner on the same tables (bench/search_quality.py), ``walk`` the same without its sampler;
both count seeds and failures as trials. ``binaries`` are compiled per table; ``cpu`` is process time in ask and tell.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from search_quality import evaluate, geomean

from sm120tune.devices import find_device
from sm120tune.failures import Failure, FailureKind
from sm120tune.hunt import NEIGHBOUR_SEEDS, PASSES
from sm120tune.job import Settings
from sm120tune.measure.lane import GemmTime
from sm120tune.measure.replay import ReplayLane, best_pair
from sm120tune.measure.results import GemmRequest
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.table import read_table
from sm120tune.resolve import Card, JobRequest, resolve_job
from sm120tune.search.board import Board, Half, halves
from sm120tune.search.step import SearchStep
from sm120tune.search_space import Space, distributions, pair_to_params, params_to_pair
from sm120tune.seeds import Seeds
from sm120tune.tiles import TilePair

ASKS_PER_TRIAL = 10
EXCHANGE_SEEDS = 3
"""Of each neighbour, counted as trials; the product times its neighbours' winners beside its trials."""
SHARES = tuple((share, EXCHANGE_SEEDS if number else NEIGHBOUR_SEEDS) for number, share in enumerate(PASSES))
"""The product's passes: shares of the trials, and how many pairs each neighbour hands over."""


@dataclass(frozen=True)
class Kind:
    """One of Optuna's samplers and how it is set up."""

    sampler: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    ordinal: bool = False
    failure_is_worst: bool = False
    slow: bool = False


KINDS = {
    "random": Kind("RandomSampler"),
    "brute-force": Kind("BruteForceSampler"),
    "qmc": Kind("QMCSampler", {"scramble": True}, ("scipy",), ordinal=True),
    "cma-es": Kind("CmaEsSampler", {"with_margin": True}, ("cmaes",), ordinal=True),
    "tpe": Kind("TPESampler", {"multivariate": False}, failure_is_worst=True),
    "tpe-fail": Kind("TPESampler", {"multivariate": False}, slow=True),
    "tpe-group": Kind("TPESampler", {"multivariate": True, "group": True}),
    "tpe-group-ord": Kind("TPESampler", {"multivariate": True, "group": True}, ordinal=True, slow=True),
    "gp": Kind("GPSampler", {}, ("scipy", "torch"), ordinal=True, failure_is_worst=True, slow=True),
    "walk": Kind(),
    "product": Kind(),
}


@dataclass(frozen=True)
class Task:
    """One search over every M of a table."""

    table: Path
    sampler: str
    seeded: bool
    seed: int
    trials: int
    sglang: Path | None


class Clock:
    """Counts calls and adds up their process time."""

    cpu_s, calls = 0.0, 0

    def time(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call, timed."""
        begin = time.process_time()
        result = call(*args)
        self.cpu_s += time.process_time() - begin
        self.calls += 1
        return result


class Search:
    """One of Optuna's samplers at one M."""

    def __init__(self, kind: Kind, space: Space, seed: int, time_half: Callable[[Half], GemmTime | Failure]) -> None:
        self.board, self.clock = Board(), Clock()
        self.trials = self.asks = 0
        self._kind, self._seed, self._time_half = kind, seed, time_half
        occur = {(name, getattr(tile, name)) for tile in space.tiles() for name in space.values}
        values = {name: tuple(v for v in choices if (name, v) in occur) for name, choices in space.values.items()}
        self._space = replace(space, values=values)
        self._values = {name: values[name.rpartition(".")[2]] for name in distributions(values)}
        self._distributions: dict[str, BaseDistribution] = dict(distributions(values))
        if kind.ordinal:
            self._distributions = {name: IntDistribution(0, len(v) - 1) for name, v in self._values.items()}
        self._queue: list[TilePair] = []
        self._seen: set[TilePair] = set()
        self._worst: float | None = None
        self._study = optuna.create_study()

    def go(self, trials: int, seeds: Iterable[TilePair]) -> None:
        """Tell seeds, then ask and tell, until this many pairs were tried."""
        self._queue += map(self._canonical, seeds)
        while self._queue and self.trials < trials:
            self._tell_seed(self._queue.pop(0))
        if self.asks == 0:
            options = dict(self._kind.options)
            if self._kind.sampler == "CmaEsSampler" and self._worst:  # it learns from no trials but its own
                options["x0"] = self._study.best_params
            self._study.sampler = getattr(optuna.samplers, self._kind.sampler)(seed=self._seed, **options)
        while self.trials < trials and self.asks < ASKS_PER_TRIAL * trials:
            self.asks += 1
            trial = self.clock.time(self._study.ask, self._distributions)
            params = {k: self._values[k][v] if self._kind.ordinal else v for k, v in trial.params.items()}
            self.clock.time(self._study.tell, trial, *self._result(self._canonical(params_to_pair(params))))

    def _tell_seed(self, pair: TilePair) -> None:
        params = pair_to_params(pair, self._space.values)
        if params is None or pair in self._seen:
            return
        if self._kind.ordinal:
            params = {name: self._values[name].index(value) for name, value in params.items()}
        value, state = self._result(pair)
        trial = create_trial(state=state, value=value, params=params, distributions=self._distributions)
        self.clock.time(self._study.add_trial, trial)

    def _result(self, pair: TilePair) -> tuple[float | None, TrialState]:
        self._seen.add(pair)
        if self._space.allows(pair.gate_up) and self._space.allows(pair.down):
            missing = self.board.missing(pair)
            for half in missing:
                self.board.put(half, self._time_half(half))
            score = self.board.score(pair)
            if isinstance(score, float):
                self.trials += bool(missing)
                self._worst = max(score, self._worst or score)
                return score, TrialState.COMPLETE
        told = self._worst if self._kind.failure_is_worst else None
        return told, TrialState.FAIL if told is None else TrialState.COMPLETE

    def _canonical(self, pair: TilePair) -> TilePair:
        return TilePair(self._space.canonical(pair.gate_up), self._space.canonical(pair.down))


class Known:
    """A table and everything about it that does not depend on the seed."""

    def __init__(self, path: Path, sglang: Path | None) -> None:
        self.table = table = read_table(path)
        self.rows = {row.key: row for row in table.rows}
        settings = Settings(trials=1, exhaustive=False, budget_s=None, seed=0)
        how = parse_routing(table.routing), settings, sglang, Path("none"), table
        request = JobRequest(table.problem, table.sizes, *how)
        self.job = resolve_job(request, Card(find_device(table.device_name), (), "replay"))
        self.seeds = {m: Seeds(self.job).at(m) for m in table.sizes}

    def time_half(self, lane: ReplayLane, m: int, half: Half) -> GemmTime | Failure:
        """Return a half's noisy time or its failure."""
        row = self.rows.get((*half, m))
        outcome = Failure(FailureKind.LAUNCH_ERROR, "not in the table") if row is None else row.outcome()
        return outcome if isinstance(outcome, Failure) else lane.time_gemm(GemmRequest(m, *half), outcome).result()

    def regret(self, m: int, board: Board) -> float:
        """Return the recorded time of a board's choice over the best, infinite without a choice."""
        sums = [sum(self.rows[(*half, m)].us or math.inf for half in halves(pair)) for pair in board.best_pairs(1)]
        return min(sums, default=math.inf) / best_pair(self.table, m)[0]


known = functools.lru_cache(Known)


def run_product(task: Task) -> dict[str, Any]:
    """Run the product's search, or its walk alone, on a table."""
    asks, tells, ask, tell = Clock(), Clock(), SearchStep.ask, SearchStep.tell
    own: dict[str, Any] = {"_ask_sampler": lambda _step: None} if task.sampler == "walk" else {}
    own |= {"ask": lambda step: asks.time(ask, step), "tell": lambda step, pair: tells.time(tell, step, pair)}
    with mock.patch.multiple(SearchStep, **own):
        found = evaluate(known(task.table, task.sglang).table, task.trials, task.seed, task.sglang)
    return {**found, "trials": tells.calls, "asks": tells.calls, "cpu": asks.cpu_s + tells.cpu_s}


def run(task: Task) -> dict[str, Any]:
    """Search every M of a table, in ladder order; returns the regret of each and what it took."""
    kind = KINDS[task.sampler]
    if not kind.sampler:
        return run_product(task)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    it = known(task.table, task.sglang)
    lane = ReplayLane(it.table, task.seed)
    steps: dict[int, Search] = {}
    for share, count in SHARES if task.seeded else SHARES[-1:]:
        for m in it.table.sizes:
            nearest = (max((k for k in steps if k < m), default=None), min((k for k in steps if k > m), default=None))
            pairs = [pair for k in nearest if k is not None for pair in steps[k].board.best_pairs(count)]
            if m not in steps:
                steps[m] = Search(kind, it.job.space(m), task.seed + m, functools.partial(it.time_half, lane, m))
                pairs += it.seeds[m]
            steps[m].go(max(1, round(share * task.trials)), pairs if task.seeded else ())
    return {
        "regret": {m: it.regret(m, step.board) for m, step in steps.items()},
        "binaries": len({half for step in steps.values() for half in step.board.known()}),
        "trials": sum(step.trials for step in steps.values()),
        "asks": sum(step.asks for step in steps.values()),
        "cpu": sum(step.clock.cpu_s for step in steps.values()),
    }


def summary(outcomes: list[dict[str, Any]]) -> dict[str, float]:
    """Return the columns of a sampler's line."""
    regrets = [value for outcome in outcomes for value in outcome["regret"].values()]
    return {
        "geomean": geomean(regrets),
        "p90": statistics.quantiles(regrets, n=10, method="inclusive")[-1],
        "worst": max(regrets),
        "binaries": statistics.fmean(outcome["binaries"] for outcome in outcomes),
        **{key: sum(outcome[key] for outcome in outcomes) / len(regrets) for key in ("trials", "asks", "cpu")},
        "searches": len(regrets),
    }


def main() -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--slow-seeds", "--gp-seeds", default="0", help="for slow samplers")
    parser.add_argument("--samplers", default=",".join(KINDS), help="default: all")
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--json", type=Path, help="write every run and the summary here")
    args = parser.parse_args()
    tasks: list[Task] = []
    for name in (names := args.samplers.split(",")):
        if (kind := KINDS.get(name)) is None:
            parser.error(f"no sampler {name!r}")
        if missing := [need for need in kind.needs if not importlib.util.find_spec(need)]:
            print(f"{name} skipped: not installed: {', '.join(missing)} (pip install {' '.join(missing)})", flush=True)
            continue
        seeds = [int(seed) for seed in (args.slow_seeds if kind.slow else args.seeds).split(",")]
        choices = itertools.product(args.tables, [name], (False, True) if kind.sampler else (True,), seeds)
        tasks += [Task(*choice, args.trials, args.sglang) for choice in choices]
    # For the workers: the same sums everywhere, no fight for cores, no word about experimental and deprecated options.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = list(zip(tasks, pool.map(run, tasks), strict=True))
    lines: list[dict[str, Any]] = []
    columns = "geomean | p90 | worst | binaries | trials/M | asks/M | cpu s/M | searches"
    print(f"| sampler | start | {columns} |\n|---|---|{'---:|' * 8}")
    form = "{geomean:.4f} | {p90:.3f} | {worst:.3f} | {binaries:.0f} | {trials:.1f} | {asks:.0f} | {cpu:.3f}"
    for start, name in itertools.product(("alone", "seeded"), names):
        found = [out for task, out in outcomes if (task.sampler, task.seeded) == (name, start == "seeded")]
        if found:
            lines.append({"sampler": name, "start": start, **summary(found)})
            print(f"| {name} | {start} | {form.format(**lines[-1])} | {lines[-1]['searches']} |")
    if args.json:
        document = {"summary": lines, "runs": [{**asdict(task), **outcome} for task, outcome in outcomes]}
        args.json.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
