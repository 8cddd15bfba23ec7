"""Compile one variant with Triton, for a GPU that need not be there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm120tune.compiler.facts import TileFacts, UnreadableBinaryError, read_facts
from sm120tune.compiler.spec import ActivationVariant, CompileSpec, QuantizeVariant
from sm120tune.failures import Failure, FailureKind
from sm120tune.upstream.arguments import activation_arguments, gemm_arguments, launch_flags, quantize_arguments
from sm120tune.upstream.locate import find_sglang
from sm120tune.upstream.scales import quantization_group
from sm120tune.upstream.source import Kernels, load_kernels, load_quantize
from sm120tune.upstream.values import Argument, Constant, Descriptor, Dynamic, Pointer, Real, Scalar

_WARP_SIZE = 32
_ALIGNMENT = 16
_DAMAGED = (ValueError, KeyError, StopIteration, FileNotFoundError, TypeError, AttributeError)
"""What Triton raises on a cache entry that is not whole; it checks nothing itself."""
_OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
"""Errors that say nothing of the candidate: whatever is compiled next fails as well."""


def arguments_of(spec: CompileSpec, kernels: Kernels) -> tuple[Any, dict[str, Argument]]:
    """Return the kernel of a variant and its bound arguments."""
    variant = spec.variant
    stored = spec.problem.quantization
    match variant:
        case ActivationVariant(block_size_m=block_size_m, sorted_intermediate=is_sorted):
            kernel = kernels.act_and_mul
            return kernel, activation_arguments(kernel, spec.problem, block_size_m, is_sorted)
        case QuantizeVariant(columns=columns):
            kernel = load_quantize(find_sglang(spec.package))
            return kernel, quantize_arguments(kernel, stored, columns)
        case _:
            return kernels.gemm_kernel(stored), gemm_arguments(kernels, spec.problem, variant, spec.arch)


def build(spec: CompileSpec, *, fresh: bool = False) -> Any:
    """Return Triton's ``CompiledKernel`` for a variant, from Triton's cache where it is there and sound.

    A damaged cache entry is removed and compiled again; ``fresh`` removes any. Raises what Triton raises when the
    candidate itself cannot be compiled.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    kernels = load_kernels(find_sglang(spec.package))
    kernel, arguments = arguments_of(spec, kernels)
    source = ast_source(kernel, arguments)
    target = GPUTarget("cuda", spec.arch, _WARP_SIZE)
    options = _options(spec, kernel)
    if fresh:
        _drop_cache_entry(source, target, options)
    try:
        compiled = triton_compile(source, target=target, options=options)
        if not _is_whole_elf(compiled.kernel):
            raise ValueError("cut-off binary")
    except _DAMAGED:
        _drop_cache_entry(source, target, options)
        compiled = triton_compile(source, target=target, options=options)
    return compiled


def _is_whole_elf(binary: bytes) -> bool:
    """Whether the tables that an ELF header announces, which a cubin has at its end, are there."""
    if len(binary) < 64 or not binary.startswith(b"\x7fELF"):
        return False
    segments, sections = struct.unpack_from("<2Q", binary, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<4H", binary, 54)
    end: int = max(segments + segment_size * segment_count, sections + section_size * section_count)
    return len(binary) >= end


def ast_source(kernel: Any, arguments: Mapping[str, Argument]) -> Any:
    """Return the ``ASTSource`` whose types and hints are those of Triton's JIT, less the two that depend on M."""
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    divisible = [["tt.divisibility", _ALIGNMENT]]
    for index, (name, argument) in enumerate(arguments.items()):
        match argument:
            case Pointer(dtype=dtype):
                signature[name] = f"*{dtype}"
                hints[(index,)] = divisible
            case Descriptor(dtype=dtype, block=block):
                signature[name] = f"tensordesc<{dtype}{list(block)}>"
            case Scalar(value=1):
                signature[name] = "constexpr"
                constants[name] = 1
            case Scalar(value=value):
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % _ALIGNMENT == 0:
                    hints[(index,)] = divisible
            case Dynamic():
                signature[name] = "i32"
            case Real():
                signature[name] = "fp32"
            case Constant(value=value):
                signature[name] = "constexpr"
                constants[name] = value
    return ASTSource(kernel, signature, constants, hints)


def _options(spec: CompileSpec, kernel: Any) -> dict[str, Any]:
    variant = spec.variant
    if isinstance(variant, ActivationVariant):
        return {}
    if isinstance(variant, QuantizeVariant):
        group = quantization_group(spec.problem.quantization, variant.columns)
        # As SGLang chooses them.
        return {"num_warps": min(max((1 << (group - 1).bit_length()) // 256, 1), 8), "num_stages": 1}
    options: dict[str, Any] = {"num_warps": variant.tile.num_warps, "num_stages": variant.tile.num_stages}
    if launch_flags(kernel, spec.arch).pdl:
        options["launch_pdl"] = True
    return options


def _drop_cache_entry(source: Any, target: Any, options: Mapping[str, Any]) -> None:
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_manager

    try:
        from triton.runtime.cache import get_cache_key
    except ImportError:
        from triton.compiler.compiler import get_cache_key
    try:
        from triton.runtime.cache import get_cache_invalidating_env_vars
    except ImportError:
        from triton._C.libtriton import get_cache_invalidating_env_vars
    import hashlib

    backend = make_backend(target)
    parsed = backend.parse_options(dict(options))
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    shutil.rmtree(manager.cache_dir, ignore_errors=True)


def compile_facts(spec: CompileSpec) -> TileFacts | Failure:
    """Compile a variant and read its resources; every failure of the candidate comes back classified.

    Raises OSError where the machine fails: no space, no permission.
    """
    with captured_output() as noise:
        try:
            try:
                return read_facts(build(spec))
            except UnreadableBinaryError:
                return read_facts(build(spec, fresh=True))
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
                raise
            return _classify(error, noise())


def _classify(error: Exception, noise: str) -> Failure:
    text = f"{type(error).__name__}: {error}".strip()
    kind = FailureKind.COMPILE_CRASH
    if "register allocation" in f"{text} {noise}".lower():
        kind = FailureKind.REGISTERS
    head, *rest = text.splitlines()
    lines = [line.strip() for line in (*rest, *noise.splitlines())]
    details = [line for line in lines if "error" in line.lower() and line not in head]
    if not details and rest:
        # A CompilationError quotes the source; what is wrong with it comes last, or with the error behind it.
        details = [line for line in _root(error).splitlines()[::-1] if line.strip()]
    return Failure(kind, head[:200] + (f" ({details[0].strip()[:160]})" if details else ""))


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


@contextlib.contextmanager
def captured_output() -> Iterator[Any]:
    """Send the file descriptors 1 and 2 to a temporary file meanwhile.

    MLIR prints whole dumps to the one when a pass fails, Triton the PTX to the other when ptxas does. Yields a
    function that returns what was written so far.
    """
    with tempfile.TemporaryFile() as sink:
        _flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)

        def text() -> str:
            _flush()
            size = os.fstat(sink.fileno()).st_size
            return os.pread(sink.fileno(), min(size, 65536), 0).decode(errors="replace")

        try:
            yield text
        finally:
            _flush()
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def use_cache_folder(folder: Path) -> None:
    """Point Triton at a cache folder of our own, so that no stale entry of another program is met."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    # Neither changes the machine code; together they save a sixth of each compilation.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"
