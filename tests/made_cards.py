"""A made-up card for the tests of calibration: its times follow the cost model's formula with constants of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from synthetic import Fault, SyntheticLane, no_fault

from sm120tune.accuracy import ErrorMeasure
from sm120tune.calibrate.file import Calibration, Origin
from sm120tune.calibrate.fitted import Model
from sm120tune.calibrate.timed import Checked, GemmResult, TimedTile
from sm120tune.compiler import TileFacts
from sm120tune.devices import DEFAULT_DEVICE_NAME, DeviceSpec, LocalGPU, find_device
from sm120tune.failures import Failure, FailureKind
from sm120tune.job import Job, Settings
from sm120tune.measure.cost_constants import (
    CalibratedSpec,
    CardClass,
    Constants,
    card_class,
    formula_version,
    model_version,
)
from sm120tune.measure.model import estimate_gemm
from sm120tune.measure.occupancy import StoredFacts
from sm120tune.measure.results import GemmRequest, Measured, VerifyRequest, What
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.resolve import Card, JobRequest, resolve_job
from sm120tune.tiles import Tile

LAYER = MoEProblem(experts=128, intermediate=768, hidden=2048, topk=8, router_experts=128)
CLASS = card_class(120)
TRUTH = replace(
    CLASS.constants,
    launch_us=4.5,
    bandwidth_share=0.7,
    l2_gb_s=75.0,
    load_us=0.5,
    block_us=3.0,
    tensor_share=0.6,
)
"""What the made-up card really has; each is 1.2 to 2 times its class's."""


def with_constants(device: DeviceSpec, constants: Constants) -> CalibratedSpec:
    """Return the card with other constants than its class's."""
    fitted = CardClass("made up", constants, None, CLASS.margins)
    return CalibratedSpec(**vars(device), fitted=fitted, calibration="made-up")


class FormulaLane(SyntheticLane):
    """Times of the formula with other constants, and noise that depends on the request alone."""

    def __init__(
        self,
        job: Job,
        constants: Constants = TRUTH,
        *,
        spread: float = 0.02,
        fault: Fault = no_fault,
        error: Callable[[VerifyRequest], ErrorMeasure] | None = None,
        ready: str | Failure = "",
    ) -> None:
        more = {} if error is None else {"error": error}
        super().__init__(fault=fault, ready=ready, **more)
        self._job, self._spread = job, spread
        self._card = with_constants(job.device, constants)
        self._resources: dict[tuple[Gemm, Tile, int], TileFacts] = {}
        self._cost = self._us

    def time_gemm(self, request: GemmRequest, facts: TileFacts):  # type: ignore[no-untyped-def]  # noqa: ANN201
        self._resources[request.gemm, request.tile, request.m] = facts
        return super().time_gemm(request, facts)

    def _us(self, gemm: Gemm, tile: Tile, m: int) -> float:
        facts = self._resources[gemm, tile, m]
        stored = StoredFacts(facts.shared_bytes, facts.registers, facts.spill_bytes)
        us = estimate_gemm(self._job.problem, gemm, tile, m, self._card, stored, self._job.routing).us
        rng = np.random.default_rng(zlib.crc32(f"{gemm} {tile} {m}".encode()))
        return us * float(np.exp(rng.normal(0.0, self._spread)))


def make_calibration_job(
    sglang: Path,
    *,
    sizes: Sequence[int] = (1, 64, 4096, 16384),
    problem: MoEProblem = LAYER,
    card: DeviceSpec | None = None,
) -> Job:
    """Return a job as ``calibrate`` makes it, of a card that is said to be here."""
    spec = card or find_device(DEFAULT_DEVICE_NAME)
    settings = Settings(trials=1, exhaustive=True, budget_s=None, seed=0)
    request = JobRequest(problem, tuple(sizes), UNIFORM, settings, sglang, Path("none"))
    return replace(resolve_job(request, Card(spec, (), "model")), timer="cuda")


def local_gpu(spec: DeviceSpec) -> LocalGPU:
    """Return a GPU of this machine that is not here."""
    return LocalGPU(0, "0", "GPU-made-up", spec, "580.1", spec.memory_bytes, spec.memory_bytes, 0, 0)


def calibration_of(spec: DeviceSpec) -> Calibration:
    """Return a calibration of a card, with the made-up card's constants and two tiles' times."""
    facts = StoredFacts(24576, 64, 0)
    failed = GemmResult(facts, Failure(FailureKind.TIMEOUT, "not done within 60 s"))
    times = (
        TimedTile(
            Tile(16, 64, 64, 1),
            64,
            {
                Gemm.GATE_UP: GemmResult(facts, Measured(30.5, 0.25, 9, What.GATE_UP)),
                Gemm.DOWN: GemmResult(facts, Measured(15.25, 0.125, 9, What.DOWN, stopped_early=True)),
            },
            Checked(True, 0.0039),
        ),
        TimedTile(Tile(32, 64, 64, 1), 64, {Gemm.GATE_UP: failed, Gemm.DOWN: failed}, None),
    )
    origin = Origin(
        tool_version="0.1.0",
        date="2026-11-30T00:00:00+00:00",
        timer="cuda",
        device=spec,
        driver="580.1",
        clocks={"sm_mhz": 2400.0},
        versions={"torch": "2.11.0", "triton": "3.6.0", "sglang": "0.5.15"},
        kernel_source_hash="0" * 64,
        problem=LAYER,
        routing="uniform",
        seed=0,
    )
    model = Model(
        formula=formula_version(),
        start=CLASS.name,
        start_version=model_version(),
        constants=TRUTH,
        refitted=("launch_us", "l2_gb_s"),
        left={"tensor_share_fp8": "the times do not depend on it"},
        correction=None,
        margins=((1, 0.2), (64, 0.05), (4096, 0.12)),
    )
    return Calibration(origin, model, {"all": {}, "by_m": {}}, times)
