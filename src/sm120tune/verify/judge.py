"""Runs SGLang's call with the pair and without, at one M after another. In the child."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from sm120tune.accuracy import ErrorMeasure
from sm120tune.errors import UserError
from sm120tune.measure.expected import expected_output
from sm120tune.measure.roofline import chain_work
from sm120tune.measure.routing import parse_routing
from sm120tune.measure.workload import Operands, Workload
from sm120tune.quantization import Granularity
from sm120tune.reference import measure_error
from sm120tune.upstream.running import RunningSGLang
from sm120tune.verify.messages import REPEATS, Answer, Request, Side
from sm120tune.verify.stopwatch import Call, Recording, Stopwatch

_WARM_UP_ROUNDS = 2


class Judge:
    """One problem's tensors, and SGLang's call over them."""

    def __init__(self, request: Request, sglang: RunningSGLang, stopwatch: Stopwatch) -> None:
        self._request = request
        self._sglang = sglang
        self._stopwatch = stopwatch
        self._routing = parse_routing(request.routing)
        self._workload = Workload(
            request.problem,
            self._routing,
            max_m=max(request.batch_sizes),
            copies=request.copies,
            seed=request.seed,
            device=stopwatch.device,
        )

    def answers(self) -> Iterator[Answer]:
        """Yield both sides at every M."""
        for m in self._request.batch_sizes:
            yield self._answer(m)

    def _answer(self, m: int) -> Answer:
        folders = (self._request.without, self._request.with_pair)
        sides = [self._once(m, folder) for folder in folders]
        running = [index for index, side in enumerate(sides) if not side.failure]
        repeats = [self._repeat(m, repeat, [folders[index] for index in running]) for repeat in range(REPEATS)]
        for lane, index in enumerate(running):
            samples = tuple(tuple(repeat[lane]) for repeat in repeats)
            sides[index] = Side(**{**vars(sides[index]), "repeats": samples})
        return Answer(m, *sides)

    def _once(self, m: int, folder: str | None) -> Side:
        """Run one side on fresh data: whether it runs, what it reads, how far its result is off."""
        self._sglang.use(folder)
        try:
            error = self._error(m)
            up_rows, down_rows = (self._sglang.rows(down=down) for down in (False, True))
        except (torch.cuda.OutOfMemoryError, UserError):
            raise
        except Exception as problem:
            failure = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
            return Side(said=tuple(self._sglang.said), failure=failure)
        return Side(error=error, said=tuple(self._sglang.said), up_rows=up_rows, down_rows=down_rows)

    def _error(self, m: int) -> ErrorMeasure:
        operands = self._workload.fresh(m, 0, self._request.seed + 7919 * m)
        out = self._call(operands)()
        return measure_error(out, expected_output(operands, operands.route.ids, as_call=True))

    def _repeat(self, m: int, repeat: int, folders: list[str | None]) -> list[list[float]]:
        """Return the samples of each folder, round by round in turning order, over a routing rotation of its own."""
        work = chain_work(self._request.problem, m, self._routing)
        count = self._workload.rotation(m, self._stopwatch.l2_bytes, work.bytes)
        calls = [self._call(self._workload.operands(m, repeat * count + index, 0)) for index in range(count)]
        recordings: list[Recording] = []
        samples: list[list[float]] = [[] for _ in folders]
        try:
            for folder in folders:
                self._sglang.use(folder)
                recordings.append(self._stopwatch.record(calls))
            for turn in range(_WARM_UP_ROUNDS + self._request.rounds):
                for lane in [(turn + i) % len(folders) for i in range(len(folders))]:
                    time_us = recordings[lane].replay_us()
                    if turn >= _WARM_UP_ROUNDS:
                        samples[lane].append(time_us)
        finally:
            for recording in recordings:
                recording.close()
        return samples

    def _call(self, operands: Operands) -> Call:
        route, static = operands.route, None
        if self._request.problem.quantization.granularity is Granularity.TENSOR:
            static = operands.hidden.scales
        return partial(self._sglang.call, operands.tokens, operands.w1, operands.w2, route.weights, route.ids, static)
