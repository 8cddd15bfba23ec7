from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import triton
from compile_specs import (
    EXIT,
    FACTS,
    FAILS,
    FULL_DISK,
    GOOD,
    HANG,
    KILLED,
    PROBLEM,
    SEGFAULT,
    SLOW,
    act,
    calls,
    spec_of,
)

from sm120tune.compiler import ActivationVariant, CompileSpec, TileFacts
from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.pool import CompilePool
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import Variant

Start = Callable[..., CompilePool]
WAIT_S = 60


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start pools over one cache folder; all are stopped in the end."""
    pools: list[CompilePool] = []

    def begin(workers: int = 2, timeout_s: float = WAIT_S, cache: Path | None = None) -> CompilePool:
        pools.append(CompilePool(CompileCache(cache or tmp_path / "cache"), workers, timeout_s))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.stop()


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, int], CompileSpec]:
    """Let the pool's processes run ``act``; return what makes a request of it."""
    monkeypatch.setattr("sm120tune.compiler.pool.compile_facts", act)
    folder = tmp_path / "calls"
    folder.mkdir()

    def spec(what: int, number: int = 0) -> CompileSpec:
        return CompileSpec(folder, f"source {number}", "3.8.0", what, PROBLEM, ActivationVariant(0))

    return spec


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def kind_of(outcome: Any) -> FailureKind:
    assert isinstance(outcome, Failure), outcome
    return outcome.kind


def test_a_process_that_dies_costs_only_its_request(start: Start, acting: Any) -> None:
    pool = start(workers=2)
    wanted = [GOOD, KILLED, SEGFAULT, EXIT, FAILS, GOOD, KILLED, GOOD]
    specs = [acting(what, number) for number, what in enumerate(wanted)]
    futures = [pool.submit(spec) for spec in specs]
    outcomes = [future.result(WAIT_S) for future in futures]
    for spec, what, outcome in zip(specs, wanted, outcomes, strict=True):
        assert len(calls(spec)) == 1
        if what == GOOD:
            assert outcome == FACTS
        elif what == FAILS:
            assert outcome == Failure(FailureKind.REGISTERS, "too many")
        else:
            assert kind_of(outcome) is (FailureKind.COMPILE_KILLED if what == KILLED else FailureKind.COMPILE_CRASH)
            assert "the compiler process died" in outcome.message
    assert "exit code 7" in outcomes[wanted.index(EXIT)].message
    assert (pool.pending, pool.compiled) == (0, len(wanted))
    # None of them is tried again but those that were killed: that is what a machine does when memory is short.
    assert [pool.submit(spec).result(WAIT_S) for spec in specs] == outcomes
    assert pool.compiled == len(wanted) + wanted.count(KILLED)
    again = start(workers=1)
    assert [again.submit(spec).result(WAIT_S) for spec in specs] == outcomes
    assert again.compiled == wanted.count(KILLED)
    assert [len(calls(spec)) for spec in specs] == [3 if what == KILLED else 1 for what in wanted]


def test_a_full_disk_is_an_error_of_the_machine_and_no_candidates(start: Start, acting: Any) -> None:
    pool = start(workers=1)
    full, good = acting(FULL_DISK), acting(GOOD)
    with pytest.raises(UserError, match=r"cannot write their cache .*: No space left on device; make room"):
        pool.submit(full).result(WAIT_S)
    assert CompileCache(pool._cache.folder).get(full) is None
    assert pool.submit(good).result(WAIT_S) == FACTS
    assert pool.pending == 0


def test_a_cache_that_is_no_folder_is_found_out_before_any_work(start: Start, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "triton").write_text("")
    with pytest.raises(UserError, match="cannot write their cache"):
        start(workers=1)


def test_an_idle_process_that_is_killed_does_not_end_the_pool(start: Start, acting: Any) -> None:
    pool = start(workers=2)
    specs = [acting(GOOD, number) for number in range(4)]
    for spec in specs[:3]:
        assert pool.submit(spec).result(WAIT_S) == FACTS
        (pid,) = calls(spec)
        os.kill(pid, signal.SIGKILL)
        # Long enough for the pool to notice that it has one process less.
        time.sleep(0.5)
    assert pool.submit(specs[3]).result(WAIT_S) == FACTS
    assert pool.compiled == 4


def test_one_that_hangs_is_ended_and_may_be_tried_in_the_next_run(start: Start, acting: Any) -> None:
    pool = start(workers=1, timeout_s=0.5)
    hanging, good = acting(HANG), acting(GOOD)
    began = time.monotonic()
    futures = [pool.submit(hanging), pool.submit(good)]
    outcome = futures[0].result(WAIT_S)
    assert outcome == Failure(FailureKind.COMPILE_TIMEOUT, "not compiled within 0.5 s")
    assert futures[1].result(WAIT_S) == FACTS
    assert time.monotonic() - began < WAIT_S
    (first,) = calls(hanging)
    assert gone(first)
    # In this run it is answered at once, by the next it is tried again.
    assert pool.submit(hanging).result(0) == outcome
    assert len(calls(hanging)) == 1
    again = start(workers=1, timeout_s=0.5)
    assert again.submit(good).result(0) == FACTS
    assert kind_of(again.submit(hanging).result(WAIT_S)) is FailureKind.COMPILE_TIMEOUT
    assert len(calls(hanging)) == 2


def test_the_same_request_is_compiled_once(start: Start, acting: Any) -> None:
    pool = start(workers=2)
    spec, same = acting(SLOW), acting(SLOW)
    assert spec is not same
    futures = [pool.submit(spec), pool.submit(same), pool.submit(spec)]
    assert (pool.pending, pool.compiled) == (1, 1)
    # Who no longer waits takes nothing away from the others.
    assert not futures[0].cancel()
    assert [future.result(WAIT_S) for future in futures] == [FACTS] * 3
    assert pool.submit(same).result(0) == FACTS
    assert len(calls(spec)) == 1
    assert (pool.pending, pool.compiled) == (0, 1)


def test_stop_ends_the_processes(start: Start, acting: Any) -> None:
    pool = start(workers=2)
    hanging = [acting(HANG, number) for number in range(2)]
    waiting = acting(GOOD, 9)
    futures = [pool.submit(spec) for spec in (*hanging, waiting)]
    end = time.monotonic() + WAIT_S
    while not all(calls(spec) for spec in hanging) and time.monotonic() < end:
        time.sleep(0.05)
    pids = [pid for spec in hanging for pid in calls(spec)]
    assert len(pids) == 2
    pool.stop()
    assert all(gone(pid) for pid in pids)
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)
    assert pool.pending == 0
    with pytest.raises(RuntimeError):
        pool.submit(acting(GOOD, 10))
    # Nothing of it is taken for a fault of the candidates.
    cache = CompileCache(pool._cache.folder)
    assert [cache.get(spec) for spec in (*hanging, waiting)] == [None] * 3


KERNEL_FILE = "kernels/ops/moe/fused_moe_triton_kernels.py"
STORE = "        act_mul_output = act_mul_output.to(OutDtype)\n"
BAD_PTX = (
    '        act_mul_output = tl.inline_asm_elementwise("frobnicate $0, $1;", "=f,f", [act_mul_output.to(tl.float32)], '
    "dtype=tl.float32, is_pure=True, pack=1)\n"
)


def with_bad_ptx(tree: Path, into: Path) -> Path:
    """Return the package of a copy of 0.5.23 whose act_and_mul_kernel ptxas refuses."""
    package = into / "sglang"
    utils = "srt/layers/moe/moe_runner/triton_utils"
    for name in (KERNEL_FILE, f"{utils}/fused_moe_triton_config.py"):
        (package / name).parent.mkdir(parents=True)
        shutil.copyfile(tree / "sglang" / name, package / name)
    text = (package / KERNEL_FILE).read_text()
    place = text.index(STORE, text.index("def act_and_mul_kernel("))
    (package / KERNEL_FILE).write_text(text[:place] + BAD_PTX + text[place:])
    return package


def test_real_compilers(start: Start, sglang_0_5_23: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package = sglang_0_5_23 / "sglang"
    good = spec_of(package, Variant(Gemm.GATE_UP, Tile(16, 32, 64, 1, 4, 3)))
    activation = spec_of(package, ActivationVariant(0))
    refused = spec_of(package, Variant(Gemm.GATE_UP, Tile(16, 96, 64, 1, 4, 3)))
    ptxas = spec_of(with_bad_ptx(sglang_0_5_23, tmp_path), ActivationVariant(0))
    crashing = spec_of(package, Variant(Gemm.DOWN, Tile(256, 64, 64, 1, 4, 2)))
    pool = start(workers=2)
    specs = [good, activation, refused, ptxas, crashing]
    outcomes = {spec: future.result(WAIT_S) for spec, future in [(spec, pool.submit(spec)) for spec in specs]}
    facts = outcomes[good]
    assert isinstance(facts, TileFacts)
    assert facts.shared_bytes == 2 * (16 + 32) * 64 * 2
    assert isinstance(outcomes[activation], TileFacts)
    assert kind_of(outcomes[refused]) is FailureKind.COMPILE_CRASH
    assert "power of 2" in outcomes[refused].message
    # Triton prints the whole PTX on standard output when ptxas fails, and modules on standard error when a pass does.
    assert kind_of(outcomes[ptxas]) is FailureKind.COMPILE_CRASH
    assert "frobnicate" in outcomes[ptxas].message
    if triton.__version__.startswith(("3.5.", "3.6.")):
        assert "PassManager::run failed" in outcomes[crashing].message
    else:
        assert isinstance(outcomes[crashing], TileFacts)
    assert capfd.readouterr() == ("", "")
    # The binaries are in a folder of the pool's own, where the launchers find them.
    assert len(list(pool._cache.triton_folder.glob("*/fused_moe_kernel.cubin"))) >= 1
    assert pool.compiled == len(specs)
