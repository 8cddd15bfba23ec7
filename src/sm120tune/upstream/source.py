"""Load SGLang's Triton kernels from their source file without importing SGLang.

The file is parsed, only the ``@triton.jit`` functions that are needed are kept, and that reduced module is
compiled under the original file name and line numbers, so that Triton's ``inspect`` calls find the real source.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune.upstream.errors import UpstreamError
from sm120tune.upstream.locate import SGLangTree

FUSED_MOE = "fused_moe_kernel"
ACT_AND_MUL = "act_and_mul_kernel"


@dataclass(frozen=True)
class Kernels:
    """The jitted kernels of one SGLang tree, and a hash of the source that they came from."""

    fused_moe: Any
    act_and_mul: Any
    source_hash: str
    """SHA-256 over the source of the kernels and what they call; a file of configs belongs to it."""


def load_kernels(tree: SGLangTree) -> Kernels:
    """Return the kernels of ``tree``; raises UpstreamError where the file has no such kernels."""
    return _load(tree.kernel_file)


@functools.lru_cache(maxsize=8)
def _load(file: Path) -> Kernels:
    text = file.read_text()
    try:
        module = ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise UpstreamError(f"{file}: not readable as Python: {error.msg} in line {error.lineno}") from error
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef) and _is_jit(node)}
    for name in (FUSED_MOE, ACT_AND_MUL):
        if name not in functions:
            raise UpstreamError(f"{file}: no @triton.jit function {name}; this SGLang is not supported")
    kept = _closure(functions, (FUSED_MOE, ACT_AND_MUL))
    used = {node.id for name in kept for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
    body: list[ast.stmt] = [node for node in module.body if _is_needed_import(node, used)]
    body += [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in kept]
    namespace: dict[str, Any] = {"__name__": f"sm120tune_upstream_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"}
    exec(compile(ast.Module(body=body, type_ignores=[]), str(file), "exec"), namespace)
    digest = hashlib.sha256()
    for name in sorted(kept):
        for unknown in _globals_of(namespace[name].fn) - {*namespace, *dir(builtins)}:
            raise UpstreamError(f"{file}: {name} uses {unknown!r}, which this version of sm120tune does not load")
        digest.update((ast.get_source_segment(text, functions[name]) or "").encode())
    return Kernels(namespace[FUSED_MOE], namespace[ACT_AND_MUL], digest.hexdigest())


def _is_jit(node: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_needed_import(node: ast.stmt, used: set[str]) -> bool:
    """Whether a top-level import binds a name that the kernels use.

    SGLang's own modules are never imported; torch is left out too unless used, since each compile process would
    spend seconds on it.
    """
    if isinstance(node, ast.ImportFrom):
        if node.module == "__future__":
            return True
        plain = node.level == 0 and (node.module or "").split(".")[0] != "sglang"
        return plain and any((alias.asname or alias.name) in used for alias in node.names)
    return isinstance(node, ast.Import) and any(
        (alias.asname or alias.name.split(".")[0]) in used for alias in node.names
    )


def _globals_of(function: Any) -> set[str]:
    return {code.argval for code in dis.get_instructions(function) if code.opname == "LOAD_GLOBAL"}


def _closure(functions: dict[str, ast.FunctionDef], roots: Iterable[str]) -> set[str]:
    kept: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name not in kept:
            kept.add(name)
            names = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
            pending += [other for other in names if other in functions]
    return kept
