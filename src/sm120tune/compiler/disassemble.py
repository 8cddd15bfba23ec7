"""Run the disassembler that ships with Triton on a compiled kernel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sm120tune.compiler.build import build, captured_output, use_cache_folder
from sm120tune.compiler.facts import cubin_path
from sm120tune.compiler.sass import MachineCode, read_sass
from sm120tune.compiler.spec import CompileSpec

_TOOL_TIMEOUT_S = 60


class NoDisassemblyError(RuntimeError):
    """The tool is not there, or does not understand the binary; the text says which."""


def machine_code(spec: CompileSpec, triton_folder: Path) -> MachineCode:
    """Read what a variant that compiles consists of; its binary comes from Triton's cache folder where it is there.

    Raises NoDisassemblyError.
    """
    with _cache_folder(triton_folder), captured_output():
        compiled = build(spec)
    return read_machine_code(compiled)


def read_machine_code(compiled: Any) -> MachineCode:
    """Read what Triton's ``CompiledKernel`` consists of; raises NoDisassemblyError."""
    cubin = cubin_path(compiled)
    tool = _tool()
    try:
        done = subprocess.run(
            [tool, "-c", str(cubin)], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoDisassemblyError(f"{tool} does not run: {error}") from None
    try:
        return read_sass(done.stdout)
    except ValueError as error:
        raise NoDisassemblyError(f"nvdisasm on {cubin.name}: {(done.stderr or str(error)).strip()[:200]}") from None


def _tool() -> str:
    from triton import __version__, knobs

    try:
        return str(knobs.nvidia.nvdisasm.path)
    except (AttributeError, RuntimeError):
        raise NoDisassemblyError(f"Triton {__version__} has no nvdisasm; TRITON_NVDISASM_PATH can name one") from None


@contextmanager
def _cache_folder(folder: Path) -> Iterator[None]:
    """Use a cache folder of Triton's in this process meanwhile."""
    before = dict(os.environ)
    try:
        use_cache_folder(folder)
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
