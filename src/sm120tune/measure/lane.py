"""Where times come from, as the runner sees it: one lane per GPU, or one for a model or a recorded table."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar

from sm120tune.accuracy import ErrorMeasure
from sm120tune.compiler import TileFacts
from sm120tune.errors import UserError
from sm120tune.failures import Failure
from sm120tune.measure.results import Estimated, GemmRequest, Measured, RaceLane, RaceRequest, VerifyRequest

TimerName = Literal["cuda", "model", "replay"]
GemmTime = Measured | Estimated

_T = TypeVar("_T")


class Timer(Protocol):
    """Answers requests in the order they were made; futures never raise, a failure is an answer."""

    @property
    def name(self) -> str:
        """What a person calls this lane: the GPU's index and name, or the model's."""

    @property
    def timer(self) -> TimerName:
        """How the times come about."""

    def prepare(self) -> Future[str | Failure]:
        """Get ready; requests may be made before it is done. Returns a line for the person, or an empty one."""

    def time_gemm(self, request: GemmRequest, facts: TileFacts) -> Future[GemmTime | Failure]:
        """Time one GEMM that was compiled to ``facts``."""

    def race(self, request: RaceRequest) -> Future[list[RaceLane] | Failure]:
        """Time several pairs' chains in common rounds."""

    def verify(self, request: VerifyRequest) -> Future[ErrorMeasure | Failure | None]:
        """Compare a pair with the reference; None where nothing can be run."""

    def busy_s(self) -> Future[float]:
        """Seconds of GPU work so far; 0 where nothing is run."""

    def stop(self) -> None:
        """End at once."""


async def started(lane: Timer, said: Future[str | Failure]) -> str:
    """Wait for what :meth:`Timer.prepare` gave; returns its line. Raises UserError where the lane cannot start."""
    answer = await asyncio.wrap_future(said)
    if isinstance(answer, Failure):
        raise UserError(f"{lane.name}: cannot start ({answer})")
    return answer


def answered(value: _T) -> Future[_T]:
    """Return a future that is done."""
    future: Future[_T] = Future()
    future.set_result(value)
    return future


class Offline:
    """The part of a timer that needs a GPU, where there is none: nothing to start, to check or to end."""

    def prepare(self) -> Future[str | Failure]:
        """Nothing to start."""
        return answered("")

    def verify(self, request: VerifyRequest) -> Future[ErrorMeasure | Failure | None]:
        """Nothing can be run."""
        return answered(None)

    def busy_s(self) -> Future[float]:
        """No GPU works here."""
        return answered(0.0)

    def stop(self) -> None:
        """Nothing to end."""


def read_timing(timer: TimerName, data: Mapping[str, Any]) -> GemmTime:
    """Rebuild a time that the journal kept."""
    return Estimated.from_json(dict(data)) if timer == "model" else Measured.from_json(dict(data))
