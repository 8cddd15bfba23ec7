"""Exact resources of a compiled kernel, read from the binary itself."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_USAGE = re.compile(r"Function\s+(\S+?):\s*\n\s*REG:(\d+)\s+STACK:(\d+)")
_TOOL_TIMEOUT_S = 30


class UnreadableBinaryError(RuntimeError):
    """A cubin that the tool which ships with Triton cannot read."""


@dataclass(frozen=True)
class TileFacts:
    """What one block of a compiled kernel uses."""

    shared_bytes: int
    """Dynamic shared memory per block, as the launcher will ask for it."""
    registers: int
    """Registers per thread."""
    spill_bytes: int
    """Local-memory stack per thread; anything above 0 is spilled to memory."""
    num_warps: int

    def to_json(self) -> dict[str, int]:
        """Return a JSON object with the four figures."""
        return {
            "shared_bytes": self.shared_bytes,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "num_warps": self.num_warps,
        }


def read_facts(compiled: Any) -> TileFacts:
    """Return the resources of a ``CompiledKernel``.

    Shared memory comes from Triton's metadata, registers and stack from the cubin through ``cuobjdump
    --dump-resource-usage`` (it ships inside Triton's wheel). Raises UnreadableBinaryError when the tool's answer is
    not understood.
    """
    registers, stack = _resource_usage(cubin_path(compiled))
    return TileFacts(
        shared_bytes=int(compiled.metadata.shared),
        registers=registers,
        spill_bytes=stack,
        num_warps=int(compiled.metadata.num_warps),
    )


def cubin_path(compiled: Any) -> Path:
    """Return where Triton's cache holds the binary of a ``CompiledKernel``."""
    return Path(next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin")))


def _resource_usage(cubin: Path) -> tuple[int, int]:
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    done = subprocess.run(
        [tool, "--dump-resource-usage", str(cubin)],
        capture_output=True,
        text=True,
        timeout=_TOOL_TIMEOUT_S,
        check=False,
    )
    found = _USAGE.search(done.stdout)
    if found is None:
        raise UnreadableBinaryError(
            f"cuobjdump says nothing of registers for {cubin.name}: {(done.stderr or done.stdout)[:200]}"
        )
    return int(found.group(2)), int(found.group(3))
