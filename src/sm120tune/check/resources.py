"""What one launch takes of the card: by compiling it, else at least by a formula."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sm120tune.compiler import CompileSpec, Limits
from sm120tune.compiler.cache import CompileCache, Outcome
from sm120tune.compiler.pool import CompilePool
from sm120tune.compiler.spec import over_limit
from sm120tune.devices import DeviceSpec
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import DTYPES
from sm120tune.state import cache_root
from sm120tune.tiles import Tile
from sm120tune.upstream import SGLangTree
from sm120tune.upstream.arguments import launch_flags, variant_for
from sm120tune.upstream.source import load_kernels

_OPERAND_BYTES = {
    "bf16": (2, 2),
    "fp16": (2, 2),
    "float32": (4, 4),
    "fp8_w8a8": (1, 1),
    "int8_w8a8": (1, 1),
    "int8_w8a16": (2, 1),
    # Two packed weights share a byte and their loads are not staged: only A counts.
    "int4_w4a16": (2, 0),
}
"""Bytes of one element of A and of B as they lie in shared memory, at least."""


_STAGED_MULTIPLE = 16
"""Rows of another number of elements are loaded without staging."""

_LEAST_COPY = 4
"""Bytes of the smallest asynchronous copy: an operand with less for each thread is not staged."""


def staged_bytes(tile: Tile, dtype: str) -> int:
    """Return a lower bound of the shared memory of a launch: the staged operands alone.

    ``(num_stages - 1) * (BLOCK_SIZE_M * bytes of A + BLOCK_SIZE_N * bytes of B) * BLOCK_SIZE_K``: on SM120 exact for
    bf16 and for int8 and fp8 without blocks; with blocks up to 1,024 B more are needed, on SM90 more still.
    """
    a_bytes, b_bytes = _OPERAND_BYTES[dtype]
    stage = sum(
        rows * tile.BLOCK_SIZE_K * size
        for rows, size in ((tile.BLOCK_SIZE_M, a_bytes), (tile.BLOCK_SIZE_N, b_bytes))
        if rows * tile.BLOCK_SIZE_K * size >= _LEAST_COPY * 32 * tile.num_warps
    )
    return (tile.num_stages - 1) * stage


@dataclass(frozen=True)
class Launch:
    """One GEMM of one layer at some M."""

    problem: MoEProblem
    gemm: Gemm
    tile: Tile
    sorted_intermediate: bool = False
    m: int = 1


@dataclass(frozen=True)
class Use:
    """What a launch takes of one block's limits, and why it cannot run where it cannot."""

    shared_bytes: int | None
    """None where nothing could be compiled."""
    exact: bool
    """From a binary; otherwise ``shared_bytes`` is a lower bound."""
    registers: int | None = None
    spill_bytes: int | None = None
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "shared_bytes": self.shared_bytes,
            "exact": self.exact,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "failure": self.failure.to_json() if self.failure else None,
        }

    def __str__(self) -> str:
        if self.shared_bytes is None:
            return self.failure.kind.value if self.failure else "unknown"
        if not self.exact:
            return f">= {self.shared_bytes:,} B"
        spills = f" spills {self.spill_bytes} B" if self.spill_bytes else ""
        return f"{self.shared_bytes:,} B {self.registers} regs{spills}"


class Pending:
    """An answer that may still be compiling."""

    def __init__(self, answer: Use | Future[Outcome], limits: Limits) -> None:
        self._answer = answer
        self._limits = limits

    def result(self) -> Use:
        """Wait for the answer."""
        if isinstance(self._answer, Use):
            return self._answer
        outcome = self._answer.result()
        if isinstance(outcome, Failure):
            return Use(None, exact=True, failure=outcome)
        over = over_limit(outcome.shared_bytes, outcome.registers, outcome.num_warps, self._limits)
        return Use(outcome.shared_bytes, True, outcome.registers, outcome.spill_bytes, over)


class Resources:
    """Answers for launches on any card; compile processes start with the first launch that needs them."""

    def __init__(self, tree: SGLangTree | None, workers: int) -> None:
        self._tree = tree
        """Whose kernel is compiled; without one everything is a lower bound."""
        self._workers = workers
        self._pool: CompilePool | None = None

    @property
    def compiled(self) -> int:
        """Variants that were compiled rather than found in the cache."""
        return self._pool.compiled if self._pool is not None else 0

    @property
    def waiting(self) -> int:
        """Variants that are waiting or being compiled."""
        return self._pool.pending if self._pool is not None else 0

    def compiles(self, problem: MoEProblem) -> bool:
        """Whether a layer's launches are compiled rather than bounded by the formula.

        Not without an SGLang, for float32, or for int4 whose group is not known: no file name tells it.
        """
        if self._tree is None:
            return False
        try:
            return problem.quantization.dtype in DTYPES
        except UserError:
            return False

    def ask(self, launch: Launch, device: DeviceSpec) -> Pending:
        """Begin to find out what a launch takes; raises UpstreamError for a kernel that is not understood."""
        limits = Limits(device.shared_memory_per_block, device.registers_per_sm)
        if self._tree is None or not self.compiles(launch.problem):
            return Pending(_bound(launch, limits), limits)
        return Pending(self._started().submit(compile_spec(self._tree, launch, device)), limits)

    def stop(self) -> None:
        """End the compile processes."""
        if self._pool is not None:
            self._pool.stop()

    def _started(self) -> CompilePool:
        if self._pool is None:
            self._pool = CompilePool(CompileCache(cache_root() / "compile"), self._workers)
        return self._pool


def compile_spec(tree: SGLangTree, launch: Launch, device: DeviceSpec) -> CompileSpec:
    """Return the compile request of the binary that SGLang would launch; raises UpstreamError like :meth:`ask`."""
    import triton

    kernels, stored = load_kernels(tree), launch.problem.quantization
    variant = variant_for(
        launch.problem,
        launch.gemm,
        launch.tile,
        m=launch.m,
        sorted_intermediate=launch.sorted_intermediate,
        pdl=launch_flags(kernels.gemm_kernel(stored), device.arch).pdl,
    )
    source_hash = kernels.hash_for(stored)
    return CompileSpec(tree.package, source_hash, triton.__version__, device.arch, launch.problem, variant)


def _bound(launch: Launch, limits: Limits) -> Use:
    staged = launch.problem.gemm(launch.gemm).k % _STAGED_MULTIPLE == 0
    needed = staged_bytes(launch.tile, launch.problem.dtype) if staged else 0
    failure = None
    if needed > limits.shared_memory_per_block:
        text = f"needs at least {needed:,} of {limits.shared_memory_per_block:,} B"
        failure = Failure(FailureKind.SHARED_MEMORY, text)
    return Use(needed, exact=False, failure=failure)
