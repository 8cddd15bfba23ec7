"""The analytic model as a timer: everything it answers is an estimate."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from sm120tune.compiler import TileFacts
from sm120tune.devices import DeviceSpec
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.cost_constants import version_for
from sm120tune.measure.lane import GemmTime, Offline, TimerName, answered
from sm120tune.measure.model import estimate_gemm
from sm120tune.measure.results import Estimated, GemmRequest, RaceLane, RaceRequest
from sm120tune.measure.roofline import activation_work
from sm120tune.measure.routing import Routing
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile

_T = TypeVar("_T")


class ModelLane(Offline):
    """Estimates for a card that need not be there, from the binaries that were compiled for it."""

    def __init__(self, problem: MoEProblem, device: DeviceSpec, routing: Routing) -> None:
        self._problem = problem
        self._device = device
        self._routing = routing
        self._facts: dict[tuple[Gemm, Tile], TileFacts] = {}

    @property
    def name(self) -> str:
        """The model's version and the card."""
        return f"model {version_for(self._device)} of {self._device.name}"

    @property
    def timer(self) -> TimerName:
        """Times come from a formula."""
        return "model"

    def time_gemm(self, request: GemmRequest, facts: TileFacts) -> Future[GemmTime | Failure]:
        """Estimate one GEMM from its compiled resources; they are remembered for the race."""
        self._facts[request.gemm, request.tile] = facts
        return answered(self._estimate(request.gemm, request.tile, request.m))

    def race(self, request: RaceRequest) -> Future[list[RaceLane] | Failure]:
        """Return one sample per pair: its GEMMs, and the activation at the card's bandwidth."""
        activation_us = activation_work(self._problem, request.m).bytes / self._device.bandwidth * 1e6
        lanes: list[RaceLane] = []
        for pair in request.pairs:
            times = [
                self._estimate(Gemm.GATE_UP, pair.gate_up, request.m),
                self._estimate(Gemm.DOWN, pair.down, request.m),
            ]
            failed = [time for time in times if isinstance(time, Failure)]
            if failed:
                return answered(failed[0])
            gemms_us = sum(time.us for time in times if isinstance(time, Estimated))
            lanes.append(RaceLane(pair, (gemms_us + activation_us,)))
        return answered(lanes)

    def _estimate(self, gemm: Gemm, tile: Tile, m: int) -> Estimated | Failure:
        facts = self._facts.get((gemm, tile))
        estimate = estimate_gemm(self._problem, gemm, tile, m, self._device, facts, self._routing)
        if estimate.us == float("inf"):
            return Failure(FailureKind(estimate.bound), "does not fit on one SM")
        return Estimated(estimate.us, estimate.bound)
