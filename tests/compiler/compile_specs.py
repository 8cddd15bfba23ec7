"""What the tests of the compiler compile, and the functions that they run in a pool's processes."""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from pathlib import Path

import triton

from sm120tune.compiler import ActivationVariant, CompileSpec, TileFacts
from sm120tune.failures import Failure, FailureKind
from sm120tune.problem import MoEProblem
from sm120tune.upstream import find_sglang
from sm120tune.upstream.arguments import Variant
from sm120tune.upstream.source import load_kernels

PROBLEM = MoEProblem(experts=256, intermediate=256, hidden=2048, topk=8, router_experts=256)
FACTS = TileFacts(shared_bytes=1024, registers=42, spill_bytes=0, num_warps=4)


@functools.cache
def source_hash(package: Path) -> str:
    return load_kernels(find_sglang(package)).source_hash


def spec_of(
    package: Path, variant: Variant | ActivationVariant, arch: int = 120, problem: MoEProblem = PROBLEM
) -> CompileSpec:
    return CompileSpec(package, source_hash(package), triton.__version__, arch, problem, variant)


GOOD, KILLED, SEGFAULT, EXIT, HANG, SLOW, FAILS, FULL_DISK = range(1, 9)


def act(spec: CompileSpec) -> TileFacts | Failure:
    """Stand in for ``compile_facts``: what happens is in ``arch``, and ``package`` is a folder that counts calls."""
    with (spec.package / f"calls-{spec.key}").open("a") as calls:
        calls.write(f"{os.getpid()}\n")
    match spec.arch:
        case 2:
            os.kill(os.getpid(), signal.SIGKILL)
        case 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 4:
            os._exit(7)
        case 5:
            time.sleep(600)
        case 6:
            time.sleep(0.3)
        case 7:
            return Failure(FailureKind.REGISTERS, "too many")
        case 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return FACTS


def calls(spec: CompileSpec) -> list[int]:
    """Return the processes that were asked for a spec, one for each call."""
    file = spec.package / f"calls-{spec.key}"
    return [int(line) for line in file.read_text().splitlines()] if file.is_file() else []
