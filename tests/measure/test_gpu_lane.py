from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import gpu_lane_tasks as tasks
import pytest
import torch
from gpu_lane_tasks import Do

from sm120tune.accuracy import ErrorMeasure
from sm120tune.compiler import ActivationVariant, CompileSpec, TileFacts
from sm120tune.compiler.spec import KernelSource
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure import gpu_lane, worker
from sm120tune.measure.gpu_lane import GpuLane
from sm120tune.measure.results import GemmRequest, Measured, RaceRequest, VerifyRequest, What
from sm120tune.measure.routing import UNIFORM
from sm120tune.measure.worker import WorkerSetup
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile, TilePair

PROBLEM = MoEProblem(experts=16, intermediate=256, hidden=512, topk=2, router_experts=16)
TILE = Tile(16, 64, 64, 1)
FACTS = TileFacts(1024, 64, 0, 4)
REAL_TIME_GEMM = worker.time_gemm
LONG = 120
"""Seconds after which something hangs."""


def processes_of(parent: int) -> set[int]:
    """Return the worker processes below a process: those that multiprocessing started to run tasks."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == parent and b"spawn_main" in command and fields[0] != "Z":
                found.add(int(folder.name))
    return found


def ends(condition: Callable[[], bool]) -> bool:
    """Wait until something is so."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def setup(folder: Path, device: str = "3") -> WorkerSetup:
    spec = CompileSpec(folder, "hash", "3.6.0", 120, PROBLEM, ActivationVariant(0))
    return WorkerSetup(device, KernelSource(spec), UNIFORM, 64, 1, 0, folder / "triton")


class Watched:
    """A lane and the lines that it told."""

    def __init__(self, folder: Path, timeout_s: float = 60.0) -> None:
        self.folder = folder
        self.events: list[str] = []
        self.before = processes_of(os.getpid())
        self.lane = GpuLane("GPU 3", setup(folder), self.events.append, timeout_s)

    def ask(self, m: int) -> Future[Any]:
        return self.lane.time_gemm(GemmRequest(m, Gemm.GATE_UP, TILE), FACTS)

    def answer(self, m: int) -> Any:
        return self.ask(m).result(LONG)

    def pids(self, m: int) -> list[int]:
        return [int(line) for line in (self.folder / str(int(m))).read_text().split()]

    def workers(self) -> set[int]:
        return processes_of(os.getpid()) - self.before


def set_tasks(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the workers run the tasks of this test."""
    patch.setenv(tasks.FOLDER, str(folder))
    for name in ("prepare", "time_gemm", "race", "verify", "busy_s"):
        patch.setattr(worker, name, getattr(tasks, name))


def end(watched: Watched) -> None:
    """Stop a lane and check that nothing is left of it."""
    watched.lane.stop()
    assert ends(lambda: not watched.workers()), "a worker was left behind"


@pytest.fixture(scope="module")
def one_lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Yield a lane for all tests that it must survive."""
    folder = tmp_path_factory.mktemp("lane")
    with pytest.MonkeyPatch.context() as patch:
        set_tasks(patch, folder)
        watched = Watched(folder)
        yield watched
        end(watched)


@pytest.fixture
def shared(one_lane: Watched) -> Watched:
    """Return the common lane with nothing told and nothing marked."""
    one_lane.events.clear()
    for path in one_lane.folder.glob("[0-9]*"):
        path.unlink()
    return one_lane


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    """Return what makes a lane of its own for a test."""
    set_tasks(monkeypatch, tmp_path)
    made: list[Watched] = []

    def make(**options: Any) -> Watched:
        made.append(Watched(tmp_path, **options))
        return made[-1]

    yield make
    for watched in made:
        end(watched)


def gone(watched: Watched, worker_id: int) -> bool:
    """Say whether a worker has ended."""
    return worker_id not in watched.workers()


def works(watched: Watched) -> None:
    """Check that a lane goes on answering."""
    assert watched.answer(Do.WORK) == Measured(tasks.US, 0.1, 5, What.GATE_UP)


Make = Callable[..., Watched]


def test_a_worker_is_set_up_before_cuda_and_answers(shared: Watched) -> None:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert (shared.lane.name, shared.lane.timer) == ("GPU 3", "cuda")
    assert shared.lane.prepare().result(LONG) == f"3 {shared.folder / 'triton'}"
    assert shared.lane.busy_s().result(LONG) == 2.5
    works(shared)
    # One process does it all, and it is not this one.
    assert shared.workers() == set(shared.pids(Do.WORK)) == {int((shared.folder / "prepare").read_text())}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before

    pairs = (TilePair.same(TILE), TilePair.same(Tile(16, 32, 64, 1)))
    lanes = shared.lane.race(RaceRequest(1, pairs, 5)).result(LONG)
    assert not isinstance(lanes, Failure)
    assert [lane.pair for lane in lanes] == list(pairs)
    assert shared.lane.verify(VerifyRequest(1, pairs[0], 7)).result(LONG) == ErrorMeasure(0.001, 0.002, 0)
    assert shared.events == []


def test_a_lost_context_is_the_candidates_fault_and_costs_one_worker(shared: Watched) -> None:
    answer = shared.answer(Do.LOSE_CONTEXT)
    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.ILLEGAL_ACCESS
    # Never tried again.
    assert len(shared.pids(Do.LOSE_CONTEXT)) == 1
    assert len(shared.events) == 1
    assert shared.events[0].startswith("GPU 3: illegal access at M=2 gate_up 16x64x64")
    works(shared)
    assert shared.pids(Do.WORK) != shared.pids(Do.LOSE_CONTEXT)


def test_a_worker_killed_from_outside_is_replaced_and_the_request_repeated(shared: Watched) -> None:
    assert shared.answer(Do.DIE_ONCE) == Measured(tasks.US, 0.1, 5, What.GATE_UP)
    assert len(set(shared.pids(Do.DIE_ONCE))) == 2
    assert len(shared.events) == 1
    assert "signal 9" in shared.events[0]
    assert "trying once more" in shared.events[0]
    works(shared)


@pytest.mark.parametrize(("what", "how"), [(Do.DIE, "signal 9"), (Do.EXIT, "exit code 3")])
def test_a_second_death_is_blamed_on_the_candidate(shared: Watched, what: Do, how: str) -> None:
    answer = shared.answer(what)
    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.LAUNCH_ERROR
    assert how in answer.message
    assert len(shared.pids(what)) == 2
    assert len(shared.events) == 2
    assert "left out" in shared.events[1]
    works(shared)


def test_a_request_that_hangs_is_ended(make: Make) -> None:
    watched = make(timeout_s=2.0)
    works(watched)
    hanging = watched.pids(Do.WORK)[0]
    answer = watched.answer(Do.HANG)
    assert answer == Failure(FailureKind.TIMEOUT, "not done within 2 s")
    assert watched.pids(Do.HANG) == [hanging]
    assert len(watched.events) == 1
    assert "nothing for 2 s at M=6" in watched.events[0]
    works(watched)
    assert ends(lambda: hanging not in watched.workers())


def test_a_failure_is_an_answer_like_any_other(shared: Watched) -> None:
    assert shared.answer(Do.FAIL) == Failure(FailureKind.REGISTERS, "an answer like any other")
    works(shared)
    assert shared.events == []
    assert shared.pids(Do.FAIL) == shared.pids(Do.WORK)


def test_a_fault_of_our_own_is_not_blamed_on_a_candidate(shared: Watched) -> None:
    with pytest.raises(ValueError, match="a fault of our own"):
        shared.answer(Do.RAISE)
    works(shared)


def test_many_requests_at_once_are_answered_each_with_its_own(shared: Watched) -> None:
    wanted = [Do.WORK, Do.LOSE_CONTEXT, Do.WORK, Do.FAIL, Do.DIE_ONCE, Do.WORK, Do.DIE, Do.FAIL, Do.WORK]
    answers = [future.result(LONG) for future in [shared.ask(what) for what in wanted]]
    kinds = [answer.kind.value if isinstance(answer, Failure) else "us" for answer in answers]
    assert kinds == [
        "us", "illegal_access", "us", "registers", "us", "us", "launch_error", "registers", "us",
    ]  # fmt: skip
    assert [len(shared.pids(what)) for what in (Do.WORK, Do.LOSE_CONTEXT, Do.FAIL, Do.DIE_ONCE, Do.DIE)] == [
        4,
        1,
        2,
        2,
        2,
    ]


def test_a_race_that_loses_the_context_is_one_failure(shared: Watched) -> None:
    answer = shared.lane.race(RaceRequest(Do.LOSE_CONTEXT, (TilePair.same(TILE),), 5)).result(LONG)
    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.ILLEGAL_ACCESS
    assert "M=2 race of 1" in shared.events[0]


def test_a_cancelled_waiter_leaves_the_request_alone(shared: Watched) -> None:
    future = shared.ask(Do.WORK)
    assert not future.cancel()
    assert isinstance(future.result(LONG), Measured)


def test_a_worker_that_dies_between_two_requests_is_replaced(make: Make) -> None:
    watched = make()
    for _ in range(2):
        works(watched)
        idle = watched.pids(Do.WORK)[-1]
        os.kill(idle, signal.SIGKILL)
        assert ends(partial(gone, watched, idle))
    works(watched)
    assert len(set(watched.pids(Do.WORK))) == 3


def test_an_interrupt_from_the_keyboard_is_the_parents_business(shared: Watched) -> None:
    works(shared)
    os.kill(shared.pids(Do.WORK)[0], signal.SIGINT)
    works(shared)
    assert len(set(shared.pids(Do.WORK))) == 1


def test_a_worker_is_renewed_now_and_then(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lane, "_TASKS_PER_PROCESS", 2)
    watched = make()
    for future in [watched.ask(Do.WORK) for _ in range(3)]:
        assert isinstance(future.result(LONG), Measured)
    assert len(set(watched.pids(Do.WORK))) == 2
    assert watched.events == []


def test_stopping_ends_a_worker_that_hangs_and_every_waiter(make: Make) -> None:
    watched = make()
    hanging, waiting = watched.ask(Do.HANG), watched.ask(Do.WORK)
    assert ends(lambda: (watched.folder / str(int(Do.HANG))).exists())
    watched.lane.stop()
    assert ends(lambda: not watched.workers())
    for future in (hanging, waiting, watched.ask(Do.WORK)):
        assert future.result(LONG) == Failure(FailureKind.LAUNCH_ERROR, "stopped")
    assert not (watched.folder / str(int(Do.WORK))).exists()
    assert watched.events == []
    watched.lane.stop()


def test_stopping_answers_what_the_pool_forgot(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pebble says nothing of a request that it had taken and not begun."""
    watched = make()
    forgotten: Future[Any] = Future()
    monkeypatch.setattr(watched.lane, "_task", lambda *_args: forgotten)
    request = watched.ask(Do.WORK)
    watched.lane.stop()
    assert request.result(0) == Failure(FailureKind.LAUNCH_ERROR, "stopped")
    # Nor does a late answer do any harm.
    forgotten.set_result("late")
    assert request.result(0) == Failure(FailureKind.LAUNCH_ERROR, "stopped")


def test_a_lane_that_was_never_used_can_be_stopped(make: Make) -> None:
    make().lane.stop()


def test_a_worker_that_cannot_start_is_no_endless_wait(make: Make, tmp_path: Path) -> None:
    (tmp_path / "triton").write_text("a file where the cache folder should be")
    watched = make()
    answer = watched.lane.prepare().result(LONG)
    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.LAUNCH_ERROR
    assert "died twice" in answer.message


# The real worker's own guard


def test_errors_of_cuda_and_triton_are_told_apart(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "time_gemm", tasks.guarded)
    watched = make()
    answers = [watched.ask(m) for m in tasks.ERRORS]
    kinds = {m: future.result(LONG) for m, future in zip(tasks.ERRORS, answers, strict=True)}
    assert {m: failure.kind for m, failure in kinds.items()} == {
        1: FailureKind.ILLEGAL_ACCESS,
        2: FailureKind.ILLEGAL_ACCESS,
        3: FailureKind.ILLEGAL_ACCESS,
        4: FailureKind.SHARED_MEMORY,
        5: FailureKind.REGISTERS,
        6: FailureKind.OUT_OF_MEMORY,
        7: FailureKind.LAUNCH_ERROR,
        8: FailureKind.LAUNCH_ERROR,
    }
    assert all("\n" not in failure.message for failure in kinds.values())
    assert "147456" in kinds[4].message
    # What the compiler printed goes along.
    assert kinds[7].message == "RuntimeError: PassManager::run failed (ptxas error: something)"
    # Only the three that destroy the context cost a worker.
    assert len(watched.events) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_real_worker_fails_as_any_candidate_does(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "time_gemm", REAL_TIME_GEMM)
    answer = make().answer(1)
    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.LAUNCH_ERROR
    assert "\n" not in answer.message
