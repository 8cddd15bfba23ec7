"""``explain`` with the compiler's own answer: the resources of single tiles, and what their machine code does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from sm120tune.check.resources import Launch, Resources, compile_spec
from sm120tune.compiler.cache import CompileCache
from sm120tune.compiler.disassemble import NoDisassemblyError, machine_code
from sm120tune.compiler.sass import MachineCode
from sm120tune.devices import DeviceSpec
from sm120tune.errors import UserError
from sm120tune.explain import Explained, best_tile, explain
from sm120tune.measure.occupancy import StoredFacts
from sm120tune.measure.routing import Routing
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.state import cache_root
from sm120tune.tiles import Tile
from sm120tune.upstream import SGLangTree


@dataclass(frozen=True)
class Binaries:
    """What SGLang would run for one layer at M; compiled by ``resources``, which the caller stops."""

    tree: SGLangTree
    """Whose kernel ``resources`` compiles too."""
    resources: Resources
    problem: MoEProblem
    m: int
    device: DeviceSpec
    sorted_intermediate: bool = False
    """Whether the down row that serves M has USE_TMA."""

    @property
    def versions(self) -> dict[str, str]:
        """What the binaries are made with and from."""
        import triton

        return {"triton": triton.__version__, "sglang": self.tree.version}

    def facts(self, gemm: Gemm, tile: Tile) -> StoredFacts:
        """Return a tile's resources; raises UserError where it does not compile or is too large for the card."""
        use = self.resources.ask(self._launch(gemm, tile), self.device).result()
        if use.failure is not None:
            what = f"{use.failure.kind.value}, {use.failure.message}"
            raise UserError(f"{gemm} {tile} cannot run on {self.device.name}: {what}")
        assert use.shared_bytes is not None
        assert use.registers is not None
        assert use.spill_bytes is not None
        return StoredFacts(use.shared_bytes, use.registers, use.spill_bytes)

    def code(self, gemm: Gemm, tile: Tile) -> MachineCode:
        """Return what the machine code of a tile does that :meth:`facts` has; raises NoDisassemblyError."""
        spec = compile_spec(self.tree, self._launch(gemm, tile), self.device)
        return machine_code(spec, CompileCache(cache_root() / "compile").triton_folder)

    def _launch(self, gemm: Gemm, tile: Tile) -> Launch:
        return Launch(self.problem, gemm, tile, self.sorted_intermediate, self.m)


@dataclass(frozen=True)
class Asked:
    """What is to be explained: a layer at M on a card, with its binaries or without."""

    problem: MoEProblem
    m: int
    device: DeviceSpec
    routing: Routing
    binaries: Binaries | None
    tell: Callable[[str], None]
    """Takes one line on what could not be found out."""

    def row_and_best(self, gemm: Gemm, tile: Tile) -> tuple[Explained, Explained]:
        """Return what is known of a row's tile and of the one that the model expects to be the fastest.

        Raises UserError where the row cannot run.
        """
        facts_of = None if self.binaries is None else functools.partial(self.binaries.facts, gemm)
        row = self._explained(gemm, tile)
        best = best_tile(self.problem, gemm, self.m, self.device, self.routing, tile.BLOCK_SIZE_M, facts_of)
        other = self._explained(gemm, best)
        # The row's own tile is known to the model too.
        return row, min(row, other, key=lambda one: one.us)

    def _explained(self, gemm: Gemm, tile: Tile) -> Explained:
        facts = code = None
        if self.binaries is not None:
            facts = self.binaries.facts(gemm, tile)
            try:
                code = self.binaries.code(gemm, tile)
            except NoDisassemblyError as error:
                self.tell(f"note: nothing is known of the machine code: {error}")
        return explain(self.problem, gemm, tile, self.m, self.device, self.routing, facts, code)
