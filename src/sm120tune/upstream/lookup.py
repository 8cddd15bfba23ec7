"""Run SGLang's own config lookup and its built-in defaults, for any card, Triton and folder.

SGLang's module is loaded from source with the few names that it imports from the rest of SGLang replaced, so that
"what would the server run today" is SGLang's word and not a re-implementation.
"""

from __future__ import annotations

import ast
import builtins
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.errors import UpstreamError
from sm120tune.upstream.locate import SGLangTree

BUILT_IN = "built-in default"


@dataclass(frozen=True)
class Target:
    """The server's side of a lookup."""

    device_name: str
    """As torch reports it, with blanks."""
    shared_memory_per_block: int
    """Opt-in bytes; SGLang's fp8 default depends on it."""
    triton_version: str


@dataclass(frozen=True)
class Today:
    """What SGLang would run for one M without a new file."""

    pair: TilePair | None
    """None where the server would crash or reject the rows: ``problem`` says how."""
    up_source: str
    down_source: str
    problem: str = ""


class ConfigLookup:
    """SGLang's lookup over one tree (or one SGLANG_MOE_CONFIG_DIR folder) for one target.

    ``stand_ins`` are config files that are read from elsewhere, or with None treated as absent, so that files which
    this tool installed do not count as today's.
    """

    def __init__(
        self,
        tree: SGLangTree,
        target: Target,
        *,
        config_dir: Path | None = None,
        stand_ins: Mapping[Path, Path | None] | None = None,
    ) -> None:
        self.tree = tree
        self.target = target
        self._read: list[str] = []
        """Files that the last lookup opened."""
        self._configs_dir = config_dir / "configs" if config_dir is not None else tree.configs_dir
        elsewhere = {str(path): other for path, other in (stand_ins or {}).items()}
        self._namespace = _load(tree, target, config_dir, elsewhere, self._read)
        self._up_tma = "up_moe_use_tma" in _text(tree.fused_moe_file)

    @property
    def up_tma_supported(self) -> bool:
        """Whether this release understands USE_TMA in an up file (0.5.18 and later)."""
        return self._up_tma

    def file_names(self, problem: MoEProblem) -> tuple[str, str]:
        """Return the names of the up and the ``_down`` file that the server asks for."""
        name = self._function("get_config_file_name")
        shape = list(problem.block_shape) if problem.block_shape else None
        args = (problem.experts, problem.key_n, config_dtype(problem), shape, problem.per_channel_quant)
        return str(name(*args, down_moe=False)), str(name(*args, down_moe=True))

    def rows(self, problem: MoEProblem, *, down: bool) -> dict[int, dict[str, Any]] | None:
        """Return the rows that SGLang's ``get_moe_configs`` finds, or None for its built-in default.

        Raises UpstreamError where the lookup itself fails: a folder name that it cannot parse, a damaged file.
        """
        block_n, block_k = problem.block_shape or (0, 0)
        self._read.clear()
        try:
            rows = self._function("get_moe_configs")(
                problem.experts,
                problem.key_n,
                config_dtype(problem),
                block_n,
                block_k,
                per_channel_quant=problem.per_channel_quant,
                down_moe=down,
            )
            return rows if rows is None else {int(m): dict(row) for m, row in rows.items()}
        except (ValueError, OSError, TypeError, AttributeError) as error:
            where = self._read[-1] if self._read else self._configs_dir
            raise UpstreamError(f"SGLang's own lookup fails at {where}: {error}") from error

    def todays_pair(self, problem: MoEProblem, m: int) -> Today:
        """Return the pair that the server would launch for M tokens.

        Raises UpstreamError only where SGLang's lookup itself fails (a folder name that it cannot parse, a
        damaged file); rows that would crash a launch are reported in the result.
        """
        up_source, down_source = self._sources(problem)
        shape = (problem.experts, problem.hidden, problem.key_n)
        try:
            up, (down, _) = self._function("try_get_optimal_moe_config")(
                (problem.experts, problem.gemm(Gemm.GATE_UP).n, problem.hidden),
                shape,
                problem.topk,
                config_dtype(problem),
                m,
                block_shape=list(problem.block_shape) if problem.block_shape else None,
                per_channel_quant=problem.per_channel_quant,
                return_down_config=True,
            )
        except AssertionError:
            return Today(
                None, up_source, down_source, "up and down rows differ in BLOCK_SIZE_M: this SGLang stops at an assert"
            )
        except (ValueError, OSError) as error:
            raise UpstreamError(f"SGLang's own lookup fails in {self._configs_dir}: {error}") from error
        except (KeyError, TypeError) as error:
            return Today(None, up_source, down_source, f"a row of the files stops this SGLang: {error!r}")
        if "USE_TMA" in up and not self._up_tma:
            return Today(None, up_source, down_source, "USE_TMA in the up file: this SGLang raises KeyError at launch")
        try:
            up_tile = Tile.from_row(up)
            # Without down rows SGLang launches the up row again, and TMA there comes from down rows alone.
            down_tile = Tile.from_row(down if down is not None else {**up, "USE_TMA": False})
            return Today(TilePair(up_tile, down_tile), up_source, down_source)
        except ValueError as error:
            return Today(None, up_source, down_source, str(error))

    def builtin_pair(self, problem: MoEProblem, m: int) -> TilePair:
        """Return SGLang's built-in default for M tokens on the target card."""
        row = self._function("get_default_config")(
            m,
            problem.experts,
            problem.intermediate,
            problem.hidden,
            problem.topk,
            config_dtype(problem),
            False,
            list(problem.block_shape) if problem.block_shape else None,
        )
        return TilePair.same(Tile.from_row(row))

    def file_keys(self, problem: MoEProblem) -> tuple[int, ...]:
        """Return every M that is a key of today's up or down file."""
        keys: set[int] = set()
        for down in (False, True):
            keys.update(self.rows(problem, down=down) or ())
        return tuple(sorted(keys))

    def _sources(self, problem: MoEProblem) -> tuple[str, str]:
        sources: list[str] = []
        for down in (False, True):
            self._function("get_moe_configs").cache_clear()
            rows = self.rows(problem, down=down)
            sources.append(self._read[-1] if rows and self._read else BUILT_IN)
        up, down_file = sources
        # Without down rows SGLang runs the up row for both.
        return up, up if down_file == BUILT_IN else down_file

    def _function(self, name: str) -> Any:
        function = self._namespace.get(name)
        if function is None:
            raise UpstreamError(f"{self.tree.config_file}: no function {name}; this SGLang is not supported")
        return function


def config_dtype(problem: MoEProblem) -> str | None:
    """Return the dtype selector of SGLang's file names: none for bf16 and fp16."""
    return None if problem.dtype in {"bf16", "fp16"} else problem.dtype


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


class _Unknown:
    """Stands for a name that SGLang's module imports and sm120tune does not know: only its use is an error."""

    def __init__(self, name: str, file: Path) -> None:
        self._message = f"{file}: the lookup uses {name!r}, which this version of sm120tune does not know"

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise UpstreamError(self._message)

    def __bool__(self) -> bool:
        raise UpstreamError(self._message)

    def __getattr__(self, name: str) -> Any:
        raise UpstreamError(self._message)


class _Log:
    """SGLang's logger offers levels of its own (``warning_once``); what it says is not shown here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: None


def _stubs(target: Target) -> dict[str, Any]:
    server_args = types.SimpleNamespace(enable_deterministic_inference=False)
    return {
        "get_device_name": lambda *_args: target.device_name,
        "is_hip": lambda: False,
        "get_global_server_args": lambda: server_args,
        "get_exec": lambda: types.SimpleNamespace(deterministic=server_args),
        "get_config": lambda: None,
    }


class _StripSGLangImports(ast.NodeTransformer):
    """Drop imports from SGLang at every level and remember the names that they would bind."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        """Keep what is not SGLang's of ``import sglang…, other``."""
        kept = [alias for alias in node.names if alias.name.split(".")[0] != "sglang"]
        self.names.update(alias.asname or "sglang" for alias in node.names if alias not in kept)
        return ast.copy_location(ast.Import(kept) if kept else ast.Pass(), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        """Replace ``from sglang… import name`` by nothing."""
        if node.level == 0 and (node.module or "").split(".")[0] != "sglang":
            return node
        self.names.update(alias.asname or alias.name for alias in node.names)
        return ast.copy_location(ast.Pass(), node)


def _load(
    tree: SGLangTree, target: Target, config_dir: Path | None, elsewhere: Mapping[str, Path | None], read: list[str]
) -> dict[str, Any]:
    file = tree.config_file
    stripper = _StripSGLangImports()
    module = ast.fix_missing_locations(stripper.visit(ast.parse(file.read_text(), filename=str(file))))
    stubs = _stubs(target)

    def recording_open(path: Any, *args: Any, **kwargs: Any) -> Any:
        found = str(elsewhere.get(str(path)) or path)
        read.append(found)
        return builtins.open(found, *args, **kwargs)

    namespace: dict[str, Any] = {
        "__name__": "sm120tune_upstream_lookup",
        "__file__": str(file),
        "open": recording_open,
        **{name: stubs.get(name, _Unknown(name, file)) for name in stripper.names},
    }
    exec(compile(module, str(file), "exec"), namespace)
    namespace["logger"] = _Log()
    namespace["triton"] = types.SimpleNamespace(__version__=target.triton_version)
    namespace["os"] = _os_with(config_dir, elsewhere)
    if "_get_cuda_shared_memory_per_block_optin" in namespace:
        namespace["_get_cuda_shared_memory_per_block_optin"] = lambda: target.shared_memory_per_block
    return namespace


def _os_with(config_dir: Path | None, elsewhere: Mapping[str, Path | None]) -> Any:
    """Return the ``os`` that SGLang's module sees: one environment variable set or unset, some files absent."""
    environ = {k: v for k, v in os.environ.items() if k != "SGLANG_MOE_CONFIG_DIR"}
    if config_dir is not None:
        environ["SGLANG_MOE_CONFIG_DIR"] = str(config_dir)
    path = types.SimpleNamespace(**{name: getattr(os.path, name) for name in os.path.__all__})
    path.exists = lambda p: elsewhere.get(str(p), p) is not None and os.path.exists(p)
    return types.SimpleNamespace(environ=environ, path=path, listdir=os.listdir, getenv=environ.get)
