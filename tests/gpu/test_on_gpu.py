"""The real kernel on a real GPU; skipped where torch sees none."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sm120tune.accuracy import is_correct
from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.spec import ActivationVariant, CompileSpec, KernelSource
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure import worker
from sm120tune.measure.cuda import CudaTimer
from sm120tune.measure.gpu_lane import GpuLane
from sm120tune.measure.launcher import Launcher
from sm120tune.measure.results import GemmRequest, Measured, RaceRequest, VerifyRequest
from sm120tune.measure.routing import UNIFORM, Routing, parse_routing
from sm120tune.measure.stored import quantize_rows
from sm120tune.measure.worker import WorkerSetup
from sm120tune.measure.workload import Workload
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import find_sglang
from sm120tune.upstream.source import load_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL = MoEProblem.from_parallelism(experts=32, tp=1, inter=256, hidden=1024, topk=4)
RAGGED = MoEProblem.from_parallelism(experts=7, tp=1, inter=208, hidden=720, topk=3)
EXPERT_PARALLEL = MoEProblem.from_parallelism(experts=32, tp=4, ep=4, inter=256, hidden=1024, topk=4)
SHARED = MoEProblem.from_parallelism(experts=16, tp=1, inter=256, hidden=512, topk=2, shared_experts=1)
GATELESS = MoEProblem.from_parallelism(experts=16, tp=1, inter=256, hidden=512, topk=3, gated=False)
HALF = MoEProblem.from_parallelism(experts=8, tp=1, inter=256, hidden=512, topk=2, dtype="fp16")

BASE = {"experts": 16, "tp": 1, "inter": 256, "hidden": 1024, "topk": 4}
QUANTIZED = [
    MoEProblem.from_parallelism(**BASE, dtype=dtype, **how)  # type: ignore[arg-type]
    for dtype, how in (
        ("fp8_w8a8", {}),
        ("fp8_w8a8", {"per_channel_quant": True}),
        ("fp8_w8a8", {"block_shape": (128, 128)}),
        ("fp8_w8a8", {"block_shape": (64, 128)}),
        ("int8_w8a8", {"per_channel_quant": True}),
        ("int8_w8a8", {"block_shape": (128, 128)}),
        ("int8_w8a16", {}),
        ("int8_w8a16", {"block_shape": (0, 128)}),
        ("int8_w8a16", {"block_shape": (0, 64), "zero_points": True}),
        ("int4_w4a16", {"block_shape": (0, 128)}),
        ("int4_w4a16", {"block_shape": (0, 64), "zero_points": True}),
        ("int4_w4a16", {"block_shape": (0, 32)}),
    )
]

PLAIN = TilePair.same(Tile(16, 64, 64, 1, 4, 3))
MIXED = TilePair(Tile(32, 64, 128, 8, 4, 2), Tile(32, 128, 64, 1, 8, 3))
DOWN_TMA = TilePair(Tile(32, 64, 64, 1, 4, 3), Tile(32, 64, 64, 1, 4, 3, USE_TMA=True))


def sglang_path() -> Path | None:
    """The tree of SM120TUNE_TEST_SGLANG, else the importable one."""
    path = os.environ.get("SM120TUNE_TEST_SGLANG")
    return Path(path) if path else None


def source(problem: MoEProblem) -> KernelSource:
    import triton

    tree = find_sglang(sglang_path())
    major, minor = torch.cuda.get_device_capability()
    template = CompileSpec(
        tree.package,
        load_kernels(tree).hash_for(problem.quantization),
        triton.__version__,
        10 * major + minor,
        problem,
        ActivationVariant(0),
    )
    return KernelSource(template)


def timer(problem: MoEProblem, max_m: int = 512, routing: Routing = UNIFORM, resident: int | None = None) -> CudaTimer:
    device = torch.device("cuda", 0)
    workload = Workload(problem, routing, max_m=max_m, copies=2, seed=0, device=device, resident=resident)
    return CudaTimer(workload, Launcher(source(problem)), torch.cuda.get_device_properties(0).L2_cache_size)


@pytest.mark.parametrize("problem", [SMALL, RAGGED, EXPERT_PARALLEL, SHARED, HALF, GATELESS], ids=str)
@pytest.mark.parametrize("pair", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("m", [1, 33, 512])
def test_chain_equals_the_reference(problem: MoEProblem, pair: TilePair, m: int) -> None:
    error = timer(problem).verify(VerifyRequest(m, pair, seed=5))
    assert is_correct(error, problem.dtype), error


@pytest.mark.parametrize("problem", QUANTIZED, ids=str)
@pytest.mark.parametrize("pair", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("m", [3, 200])
def test_quantized_chain_equals_the_reference(problem: MoEProblem, pair: TilePair, m: int) -> None:
    error = timer(problem).verify(VerifyRequest(m, pair, seed=5))
    print(f"{problem} M={m}: {error}")
    assert is_correct(error, problem.dtype), error


def test_a_tile_over_the_quantization_block_is_wrong() -> None:
    """The negative control: one scale for two blocks of K."""
    problem = QUANTIZED[2]
    wide = TilePair(Tile(16, 64, 256, 1, 4, 2), Tile(16, 64, 128, 1, 4, 2))
    error = timer(problem).verify(VerifyRequest(64, wide, seed=5))
    assert not is_correct(error, problem.dtype), error


@pytest.mark.parametrize("problem", QUANTIZED, ids=str)
def test_the_triton_quantizer_equals_the_one_of_the_reference(problem: MoEProblem) -> None:
    if problem.quantization.operand_bytes != 1:
        pytest.skip("activations are not quantized")
    one = timer(problem)
    operands = one.workload.operands(64, 0, 64 * problem.topk)
    one.launcher.quantize(operands)
    expected = quantize_rows(operands.activated, problem.quantization)
    assert expected.scales is not None
    assert operands.down_in.scales is not None
    torch.testing.assert_close(operands.down_in.scales, expected.scales)
    same = operands.down_in.codes.float() == expected.codes.float()
    assert same.float().mean() > 0.999


@pytest.mark.parametrize("problem", [SMALL, EXPERT_PARALLEL, SHARED, GATELESS, QUANTIZED[2]], ids=str)
@pytest.mark.parametrize("m", [1, 64, 512])
def test_down_tma_chain_equals_the_reference(problem: MoEProblem, m: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA needs compute capability 9.0")
    error = timer(problem).verify(VerifyRequest(m, DOWN_TMA, seed=6))
    assert is_correct(error, problem.dtype), error


@pytest.mark.parametrize("problem", [SMALL, SHARED, EXPERT_PARALLEL, QUANTIZED[2]], ids=str)
def test_fewer_resident_experts_equal_the_reference(problem: MoEProblem) -> None:
    error = timer(problem, resident=5).verify(VerifyRequest(100, MIXED, seed=9))
    assert is_correct(error, problem.dtype), error


def test_skewed_routing_equals_the_reference() -> None:
    error = timer(SMALL, routing=parse_routing("power:1.2")).verify(VerifyRequest(100, MIXED, seed=7))
    assert is_correct(error, SMALL.dtype), error


def test_a_wrong_launch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a chain whose down GEMM is left out, and one that runs on another routing."""
    one = timer(SMALL)
    real = Launcher.gemm

    def without_down(self: Launcher, gemm: Gemm, *args: object, **kwargs: object) -> None:
        if gemm is Gemm.GATE_UP:
            real(self, gemm, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "gemm", without_down)
    error = one.verify(VerifyRequest(64, PLAIN, seed=8))
    assert error.nan_rows == 64
    assert not is_correct(error, SMALL.dtype)


def test_times_are_positive_and_ordinary_after_a_check() -> None:
    one = timer(SMALL)
    one.verify(VerifyRequest(64, PLAIN, seed=8))
    for gemm in Gemm:
        result = one.time_gemm(GemmRequest(64, gemm, PLAIN.gate_up))
        assert 0 < result.us < 10_000
        assert result.repetitions >= 5
    assert torch.isfinite(one.workload.operands(64, 0, 256).activated).all()


def test_a_hopeless_tile_is_stopped_early() -> None:
    one = timer(SMALL)
    result = one.time_gemm(GemmRequest(512, Gemm.GATE_UP, PLAIN.gate_up, stop_above_us=0.001))
    assert result.stopped_early
    assert result.repetitions <= 2


def test_a_race_times_every_lane_in_every_round() -> None:
    lanes = timer(SMALL).race(RaceRequest(64, (PLAIN, MIXED, DOWN_TMA), rounds=7))
    assert [lane.pair for lane in lanes] == [PLAIN, MIXED, DOWN_TMA]
    assert all(len(lane.samples_us) == 7 and min(lane.samples_us) > 0 for lane in lanes)


def test_chain_time_is_about_the_sum_of_its_parts() -> None:
    """A chain that forgot a launch would be faster than its slower GEMM alone."""
    one = timer(SMALL)
    (lane,) = one.race(RaceRequest(512, (PLAIN,), rounds=9))
    parts = [one.time_gemm(GemmRequest(512, gemm, PLAIN.gate_up)).us for gemm in Gemm]
    assert sorted(lane.samples_us)[4] > 0.9 * max(parts)


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[tuple[GpuLane, list[str]]]:
    events: list[str] = []
    setup = WorkerSetup("0", source(SMALL), UNIFORM, 64, 1, 0, CompileCache(tmp_path).triton_folder)
    one = GpuLane("GPU 0", setup, events.append, timeout_s=120)
    yield one, events
    one.stop()


def illegal_access(request: GemmRequest) -> Measured | Failure:
    """Write far outside any allocation, through the worker's own guard."""

    def task(one: CudaTimer) -> Measured:
        import triton
        import triton.language as tl

        @triton.jit
        def poke(pointer, offset: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            tl.store(pointer + offset + tl.arange(0, 128), 1.0)

        poke[(1,)](torch.zeros(128, device="cuda"), 1 << 40)
        torch.cuda.synchronize()
        raise AssertionError("an illegal access went unnoticed")

    return worker._guarded(task)  # type: ignore[no-any-return]


def test_an_illegal_access_costs_one_worker(lane: tuple[GpuLane, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    one, events = lane
    tile = Tile(16, 64, 64, 1)
    facts = None
    before = one.time_gemm(GemmRequest(8, Gemm.DOWN, tile), facts).result()  # type: ignore[arg-type]
    assert isinstance(before, Measured)
    broken = one._submit("an illegal access", 120, illegal_access, GemmRequest(8, Gemm.DOWN, tile)).result()
    assert isinstance(broken, Failure)
    assert broken.kind is FailureKind.ILLEGAL_ACCESS
    after = one.time_gemm(GemmRequest(8, Gemm.DOWN, tile), facts).result()  # type: ignore[arg-type]
    assert isinstance(after, Measured)
    assert math.isclose(after.us, before.us, rel_tol=0.5)
    assert any("illegal access" in event for event in events)
