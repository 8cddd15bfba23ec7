"""What is to be compiled: one kernel variant of one SGLang tree for one architecture."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from sm120tune.compiler.facts import TileFacts
from sm120tune.failures import Failure, FailureKind
from sm120tune.problem import MoEProblem
from sm120tune.upstream.arguments import Variant

_SCHEMA = 1


@dataclass(frozen=True, order=True)
class ActivationVariant:
    """One binary of SGLang's ``act_and_mul_kernel``."""

    block_size_m: int
    """Only used when the intermediate is sorted: rows per expert id."""
    sorted_intermediate: bool = False


@dataclass(frozen=True, order=True)
class QuantizeVariant:
    """One binary of SGLang's Triton kernel that quantizes the rows of A."""

    columns: int


AnyVariant = Variant | ActivationVariant | QuantizeVariant


@dataclass(frozen=True)
class Limits:
    """What one block may use on the target card."""

    shared_memory_per_block: int
    registers_per_sm: int


@dataclass(frozen=True)
class CompileSpec:
    """Everything that a compile process needs; hashable and picklable."""

    package: Path
    """SGLang's package folder."""
    source_hash: str
    triton_version: str
    arch: int
    problem: MoEProblem
    variant: AnyVariant

    @property
    def key(self) -> str:
        """Content hash that names the cached outcome; where SGLang lies does not count, its source does."""
        content = {
            "schema": _SCHEMA,
            "source": self.source_hash,
            "triton": self.triton_version,
            "arch": self.arch,
            "problem": self.problem.to_json(),
            "kind": type(self.variant).__name__,
            "variant": dataclasses.asdict(self.variant),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class KernelSource:
    """Which kernels to launch: the picklable part of a compile request that all variants share."""

    template: CompileSpec
    """Any spec of this problem; its variant is replaced."""

    def spec(self, variant: AnyVariant) -> CompileSpec:
        """Return the compile request of one variant."""
        return dataclasses.replace(self.template, variant=variant)


def over_limit(shared_bytes: int, registers: int, num_warps: int, limits: Limits) -> Failure | None:
    """Return why a binary cannot be launched on a card with these limits, or None when it can."""
    if shared_bytes > limits.shared_memory_per_block:
        return Failure(FailureKind.SHARED_MEMORY, f"needs {shared_bytes:,} of {limits.shared_memory_per_block:,} B")
    block_registers = registers * 32 * num_warps
    if block_registers > limits.registers_per_sm:
        return Failure(FailureKind.REGISTERS, f"needs {block_registers:,} of {limits.registers_per_sm:,} registers")
    return None


def within_limits(outcome: TileFacts | Failure, limits: Limits) -> TileFacts | Failure:
    """Return a compilation's outcome, or a failure where the binary cannot be launched on a card with these limits."""
    if isinstance(outcome, Failure):
        return outcome
    return over_limit(outcome.shared_bytes, outcome.registers, outcome.num_warps, limits) or outcome
