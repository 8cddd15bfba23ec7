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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune.quantization import Granularity, Quantization
from sm120tune.upstream.errors import UpstreamError
from sm120tune.upstream.locate import SGLangTree

FUSED_MOE = "fused_moe_kernel"
GROUPED = "fused_moe_kernel_gptq_awq"
ACT_AND_MUL = "act_and_mul_kernel"
QUANTIZE = "_per_token_group_quant_8bit"
_SWAP_AB = "should_enable_swap_ab"
_SM90 = 90


@dataclass(frozen=True)
class Kernels:
    """The jitted kernels of one SGLang tree, and hashes of the source that they came from."""

    fused_moe: Any
    grouped: Any
    """The kernel of grouped int4 and int8 weights."""
    act_and_mul: Any
    source_hash: str
    """SHA-256 over the source of ``fused_moe``, ``act_and_mul`` and what they call; a file of configs belongs to it."""
    grouped_hash: str
    """The same with ``grouped`` in the place of ``fused_moe``."""
    swaps_ab: Callable[[int, int, int], bool]
    """SGLang's own answer for (architecture, BLOCK_SIZE_M, BLOCK_SIZE_N): whether an fp8 launch swaps A and B."""

    def gemm_kernel(self, stored: Quantization) -> Any:
        """Return the kernel that runs weights stored in this way."""
        return self.grouped if stored.granularity is Granularity.GROUP else self.fused_moe

    def hash_for(self, stored: Quantization) -> str:
        """Return the hash that a file of configs for such weights belongs to."""
        return self.grouped_hash if stored.granularity is Granularity.GROUP else self.source_hash


def load_kernels(tree: SGLangTree) -> Kernels:
    """Return the kernels of ``tree``; raises UpstreamError where the file has no such kernels."""
    return _load(tree.kernel_file)


@functools.lru_cache(maxsize=8)
def _load(file: Path) -> Kernels:
    namespace, sources = _functions(file, (FUSED_MOE, GROUPED, ACT_AND_MUL))

    def digest(*roots: str) -> str:
        names = _closure({name: ast.parse(text).body[0] for name, text in sources.items()}, roots)
        return hashlib.sha256("".join(sources[name] for name in sorted(names)).encode()).hexdigest()

    return Kernels(
        namespace[FUSED_MOE],
        namespace[GROUPED],
        namespace[ACT_AND_MUL],
        digest(FUSED_MOE, ACT_AND_MUL),
        digest(GROUPED, ACT_AND_MUL),
        _load_swap_ab(file),
    )


@functools.lru_cache(maxsize=8)
def load_quantize(tree: SGLangTree) -> Any:
    """Return SGLang's Triton kernel that quantizes rows by groups; raises UpstreamError where it is not there."""
    return _functions(tree.quantize_file, (QUANTIZE,))[0][QUANTIZE]


def _parse(file: Path) -> tuple[str, ast.Module]:
    text = file.read_text()
    try:
        return text, ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise UpstreamError(f"{file}: not readable as Python: {error.msg} in line {error.lineno}") from error


def _functions(file: Path, roots: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a namespace with the jitted functions ``roots`` and what they call, and the source of each."""
    text, module = _parse(file)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef) and _is_jit(node)}
    for name in roots:
        if name not in functions:
            raise UpstreamError(f"{file}: no @triton.jit function {name}; this SGLang is not supported")
    kept = _closure(functions, roots)
    used = {node.id for name in kept for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
    body: list[ast.stmt] = [node for node in module.body if _is_needed_import(node, used)]
    body += [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in kept]
    namespace: dict[str, Any] = {"__name__": f"sm120tune_upstream_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"}
    exec(compile(ast.Module(body=body, type_ignores=[]), str(file), "exec"), namespace)
    for name in sorted(kept):
        for unknown in _globals_of(namespace[name].fn) - {*namespace, *dir(builtins)}:
            raise UpstreamError(f"{file}: {name} uses {unknown!r}, which this version of sm120tune does not load")
    return namespace, {name: ast.get_source_segment(text, functions[name]) or "" for name in kept}


def _load_swap_ab(file: Path) -> Callable[[int, int, int], bool]:
    """Return SGLang's decision on swapping A and B, for any architecture; never where this release has none.

    Up to 0.5.8 it asked for an H20 by name; the name that it is given here is no H20's.
    """
    _, module = _parse(file)
    found = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == _SWAP_AB]
    if not found:
        return lambda _arch, _m, _n: False
    arch = [0]
    namespace: dict[str, Any] = {
        "functools": functools,
        "_is_cuda": True,
        "is_batch_invariant_mode_enabled": lambda: False,
        "is_sm90_supported": lambda: arch[0] == _SM90,
        "get_device_name": lambda: "",
    }
    found[0].decorator_list.clear()
    exec(compile(ast.Module(body=[found[0]], type_ignores=[]), str(file), "exec"), namespace)

    def swaps_ab(on: int, block_size_m: int, block_size_n: int) -> bool:
        arch[0] = on
        try:
            return bool(namespace[_SWAP_AB](block_size_m, block_size_n))
        except NameError as error:
            raise UpstreamError(f"{file}: in {_SWAP_AB}, {error}: this version of sm120tune does not know it") from None

    return swaps_ab


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


def _closure(functions: Mapping[str, ast.AST], roots: Iterable[str]) -> set[str]:
    kept: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name not in kept:
            kept.add(name)
            names = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
            pending += [other for other in names if other in functions]
    return kept
