"""One tuning job: the problem, the card, SGLang's tree and what SGLang would run there today."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sm120tune.compiler import ActivationVariant, CompileSpec, Limits
from sm120tune.compiler.spec import AnyVariant, KernelSource, QuantizeVariant
from sm120tune.devices import DeviceSpec, LocalGPU
from sm120tune.measure.cost_constants import version_for
from sm120tune.measure.lane import TimerName
from sm120tune.measure.roofline import chain_work, floor_us
from sm120tune.measure.routing import Routing
from sm120tune.measure.table import Table
from sm120tune.problem import DEFAULT_BATCH_SIZES, Gemm, MoEProblem
from sm120tune.quantization import Granularity
from sm120tune.search_space import SPACE_VERSION, VALUES, Space, SpaceLimits, Values, space_hash
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import SGLangTree
from sm120tune.upstream.arguments import Variant, variant_for
from sm120tune.upstream.lookup import BUILT_IN, ConfigLookup, Today


@dataclass(frozen=True)
class Settings:
    """How hard to search."""

    trials: int
    """Pairs per M."""
    exhaustive: bool
    budget_s: float | None
    seed: int
    fewest_keys: bool = False
    """Leave out keys whose M a neighbour's row serves as well."""


@dataclass(frozen=True)
class Job:
    """Everything that is fixed before the work starts."""

    problem: MoEProblem
    device: DeviceSpec
    gpus: tuple[LocalGPU, ...]
    """Empty when the card is not here and a model answers."""
    tree: SGLangTree
    lookup: ConfigLookup
    source_hash: str
    pdl: bool
    """SGLang would launch the GEMMs with programmatic dependent launch."""
    triton_version: str
    batch_sizes: tuple[int, ...]
    routing: Routing
    timer: TimerName
    settings: Settings
    values: Values = field(default_factory=lambda: VALUES)
    """Values of the tile fields that may be tried; a recorded table covers fewer."""
    table: Table | None = None
    """What answers when the timer is a replay."""
    existing: Mapping[int, TilePair] = field(default_factory=dict)
    """Rows of an earlier run that the result is merged into."""
    reach: int | None = None
    """Largest M that may be timed, where it is not the largest of the batch sizes."""
    _today: dict[int, Today] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was looked up: SGLang's lookup reads its files anew each time, and progress asks after every trial."""

    @property
    def limits(self) -> Limits:
        """What one block may use on the card."""
        return Limits(self.device.shared_memory_per_block, self.device.registers_per_sm)

    @property
    def largest_m(self) -> int:
        """The largest M that may be timed."""
        return self.reach or max(self.batch_sizes)

    @property
    def seam_m(self) -> int:
        """The first M that the next key above the batch sizes serves: up to there a tuned row has to hold."""
        last = max(self.batch_sizes)
        above = [key for key in {*DEFAULT_BATCH_SIZES, *self.lookup.file_keys(self.problem)} if key > last]
        return (last + min(above)) // 2 + 1 if above else last

    @property
    def kind(self) -> Literal["measured", "estimated", "replayed"]:
        """Which part of the output folder the result belongs to."""
        return {"cuda": "measured", "model": "estimated", "replay": "replayed"}[self.timer]  # type: ignore[return-value]

    @property
    def source(self) -> KernelSource:
        """What GPU workers launch from."""
        return KernelSource(self.spec(ActivationVariant(0)))

    def spec(self, variant: AnyVariant) -> CompileSpec:
        """Return the compile request of one variant for this card."""
        return CompileSpec(
            self.tree.package, self.source_hash, self.triton_version, self.device.arch, self.problem, variant
        )

    def variant(self, m: int, gemm: Gemm, tile: Tile, *, sorted_intermediate: bool = False) -> Variant:
        """Return the binary that SGLang would run for one GEMM at M."""
        return variant_for(self.problem, gemm, tile, m=m, sorted_intermediate=sorted_intermediate, pdl=self.pdl)

    def chain_specs(self, m: int, pair: TilePair) -> tuple[CompileSpec, ...]:
        """Return the compile requests of everything that a pair's chain launches."""
        sorted_rows = pair.down.USE_TMA
        activation = ActivationVariant(pair.block_size_m if sorted_rows else 0, sorted_rows)
        variants: tuple[AnyVariant, ...] = (
            self.variant(m, Gemm.GATE_UP, pair.gate_up, sorted_intermediate=sorted_rows),
            # Without a gate it is torch's.
            *((activation,) if self.problem.gated else ()),
            self.variant(m, Gemm.DOWN, pair.down, sorted_intermediate=sorted_rows),
            *self._quantize(),
        )
        return tuple(self.spec(variant) for variant in variants)

    def _quantize(self) -> tuple[QuantizeVariant, ...]:
        stored = self.problem.quantization
        own_kernel = stored.operand_bytes == 1 and stored.granularity is not Granularity.TENSOR
        return (QuantizeVariant(self.problem.intermediate),) if own_kernel else ()

    def space(self, m: int) -> Space:
        """Return the candidates at M."""
        return Space(
            self.problem,
            m,
            SpaceLimits(self.device.shared_memory_per_block),
            exhaustive=self.settings.exhaustive,
            values=self.values,
        )

    def today(self, m: int) -> Today:
        """Return what SGLang would run at M without a new file."""
        if m not in self._today:
            self._today[m] = self.lookup.todays_pair(self.problem, m)
        return self._today[m]

    def floor(self, m: int) -> tuple[float, Literal["bandwidth", "compute"]]:
        """Return the roofline of the chain at M in µs, and which roof binds."""
        work = chain_work(self.problem, m, self.routing)
        # Tensor cores run 8-bit operands twice as fast.
        rate = self.device.bf16_flops * (2 if self.problem.quantization.operand_bytes == 1 else 1)
        return floor_us(work, self.device.bandwidth, rate)

    def ladder_keys(self, kept: frozenset[int]) -> tuple[int, ...]:
        """Return every M that the written ladder needs.

        The default sizes, those asked for, and today's keys: a shorter file would serve far larger M with its last
        row. SGLang's built-in default changes above E; where the row below is not a tuned one, keys at E and E+1
        keep the change where it is today. ``kept`` holds those asked for that were not tuned.
        """
        keys = {*DEFAULT_BATCH_SIZES, *self.batch_sizes, *self.lookup.file_keys(self.problem)}
        experts = self.problem.experts
        below = max(key for key in keys if key <= experts)
        tuned = below in self.batch_sizes and below not in kept
        if not tuned and self.today(experts + 1).up_source == BUILT_IN:
            keys |= {experts, experts + 1}
        return tuple(sorted(keys))

    def table_hash(self) -> str:
        """Return what tells one recorded table from another: its circumstances, the date among them."""
        return "" if self.table is None else json.dumps(self.table.meta, sort_keys=True)

    def identity(self) -> dict[str, Any]:
        """Return what makes two runs the same run, for resuming."""
        driver = sorted({gpu.driver for gpu in self.gpus})
        space = {
            "version": SPACE_VERSION,
            "hash": space_hash(self.values),
            "exhaustive": self.settings.exhaustive,
        }
        return {
            "problem": self.problem.to_json(),
            "device": self.device.name,
            "driver": driver,
            "triton": self.triton_version,
            "kernel_source": self.source_hash,
            "space": space,
            "timer": self.timer,
            "answers": {"cuda": "", "model": version_for(self.device), "replay": self.table_hash()}[self.timer],
            "routing": str(self.routing),
            "seed": self.settings.seed,
        }
