"""What is tuned: one MoE layer's shape on one GPU, and the arithmetic that leads to it.

Nothing here knows a device or SGLang's folders.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sm120tune._jsonfile import Fields
from sm120tune.errors import UserError
from sm120tune.quantization import Quantization

DEFAULT_BATCH_SIZES = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384,
)  # fmt: skip
"""SGLang's 18 sizes of M plus the two prefill chunks that its own list stops short of."""


LARGEST = 2**20
"""No dimension and no batch is larger; beyond it a slip of the hand asks for memory that no machine has."""


class Gemm(enum.StrEnum):
    """The two grouped GEMMs of an MoE layer, in launch order."""

    GATE_UP = "gate_up"
    DOWN = "down"


@dataclass(frozen=True)
class GemmShape:
    """``C[rows, n] = A[rows, k] @ B[e, n, k].T`` for one GEMM of the layer."""

    n: int
    k: int
    top_k: int
    """How many routed rows share one row of A: topk for gate_up, 1 for down."""
    mul_routed_weight: bool


@dataclass(frozen=True)
class MoEProblem:
    """One MoE layer as one GPU runs it.

    ``experts`` and ``topk`` count a fused shared expert; ``router_experts`` are those the router chooses over
    (all ranks' under expert parallelism), without it.
    """

    experts: int
    """E: expert matrices resident on this GPU."""
    intermediate: int
    """N: columns of the down weight on this GPU (``w2.shape[2]``)."""
    hidden: int
    topk: int
    router_experts: int
    dtype: str = "bf16"
    shared_experts: int = 0
    block_shape: tuple[int, int] | None = None
    per_channel_quant: bool = False
    zero_points: bool = False
    gated: bool = True
    """Whether an expert has a gate projection beside its up projection; without one squared ReLU is its activation."""

    @classmethod
    def from_parallelism(  # noqa: PLR0913 - one keyword for each option of the command line
        cls,
        *,
        experts: int,
        tp: int,
        inter: int,
        ep: int = 1,
        hidden: int,
        topk: int,
        dtype: str = "bf16",
        shared_experts: int = 0,
        block_shape: tuple[int, int] | None = None,
        per_channel_quant: bool = False,
        zero_points: bool = False,
        gated: bool = True,
    ) -> MoEProblem:
        """Derive E and N as SGLang's server does.

        Plain TP: E = experts + shared, N = inter / tp. Expert parallelism: E = experts / ep,
        N = inter / (tp / ep). Raises UserError for arithmetic that no server could run, a quantization block that
        does not divide N among it.
        """
        for name, value in (
            ("--experts", experts), ("--tp", tp), ("--ep", ep), ("--inter", inter), ("--hidden", hidden),
            ("--topk", topk),
        ):  # fmt: skip
            check_size(name, value)
        Quantization(dtype, block_shape, per_channel_quant, zero_points)
        if shared_experts < 0:
            raise UserError(f"--shared-experts must be 0 or more, not {shared_experts}")
        if topk > experts:
            raise UserError(f"--topk {topk} is more than --experts {experts}; a token cannot choose that many")
        if tp % ep:
            raise UserError(f"--tp {tp} is not divisible by --ep {ep}; SGLang splits the tp ranks into ep groups")
        if experts % ep:
            raise UserError(f"--experts {experts} is not divisible by --ep {ep}")
        if shared_experts and ep > 1:
            raise UserError(
                f"--shared-experts {shared_experts} with --ep {ep}: under expert parallelism SGLang fuses shared "
                "experts for Qwen3-Next alone, which --model knows; drop one of the two"
            )
        moe_tp = tp // ep
        if inter % moe_tp:
            raise UserError(
                f"--inter {inter} is not divisible by {moe_tp} (tp {tp} / ep {ep}); "
                "it is the whole moe_intermediate_size of the model, choose a tp that divides it"
            )
        intermediate = inter // moe_tp
        if block_shape is not None:
            given = f"--inter {inter} at tp {tp} / ep {ep}"
            if block_shape[0]:
                _check_block_shape(block_shape, intermediate, moe_tp, given)
            for name, size in (
                (f"--hidden {hidden}", hidden),
                (f"{given} gives N={intermediate}, which", intermediate),
            ):
                if size % block_shape[1]:
                    # A row would not end with a whole group: SGLang's quantizers refuse it.
                    raise UserError(f"{name} is not divisible by the quantization group of {block_shape[1]}")
        return cls(
            experts=experts // ep + shared_experts,
            intermediate=intermediate,
            hidden=hidden,
            topk=topk + shared_experts,
            router_experts=experts,
            dtype=dtype,
            shared_experts=shared_experts,
            block_shape=block_shape,
            per_channel_quant=per_channel_quant,
            zero_points=zero_points,
            gated=gated,
        )

    @property
    def routed_topk(self) -> int:
        """Choices of the router itself, without the fused shared experts."""
        return self.topk - self.shared_experts

    @property
    def expert_parallel(self) -> bool:
        """Whether the router can choose experts of other ranks (their ids become -1 here)."""
        return self.router_experts > self.experts - self.shared_experts

    @functools.cached_property
    def quantization(self) -> Quantization:
        """How weights and activations are stored."""
        return Quantization(self.dtype, self.block_shape, self.per_channel_quant, self.zero_points)

    @property
    def key_n(self) -> int:
        """N in the file name: ``w2.shape[2]``, which for int4 counts bytes of two weights each."""
        return self.intermediate // 2 if self.dtype == "int4_w4a16" else self.intermediate

    def gemm(self, gemm: Gemm) -> GemmShape:
        """Return the shape of one of the two GEMMs."""
        if gemm is Gemm.GATE_UP:
            projections = 2 if self.gated else 1
            return GemmShape(projections * self.intermediate, k=self.hidden, top_k=self.topk, mul_routed_weight=False)
        return GemmShape(n=self.hidden, k=self.intermediate, top_k=1, mul_routed_weight=True)

    def padded_rows(self, m: int, block_size_m: int) -> int:
        """EM: entries of SGLang's ``sorted_token_ids`` buffer for M tokens.

        ``numel + (E+1)*(BLOCK_SIZE_M-1)``, or ``numel*BLOCK_SIZE_M`` when ``numel < E+1``, rounded up to 4
        (SGLang's ``moe_align_block_size``).
        """
        numel = m * self.topk
        rows = numel * block_size_m if numel < self.experts + 1 else numel + (self.experts + 1) * (block_size_m - 1)
        return (rows + 3) // 4 * 4

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; the provenance and the run identity are made from it."""
        return {
            "experts": self.experts,
            "intermediate": self.intermediate,
            "hidden": self.hidden,
            "topk": self.topk,
            "router_experts": self.router_experts,
            "dtype": self.dtype,
            "shared_experts": self.shared_experts,
            "block_shape": list(self.block_shape) if self.block_shape else None,
            "per_channel_quant": self.per_channel_quant,
            **({"zero_points": True} if self.zero_points else {}),
            **({} if self.gated else {"gated": False}),
        }

    @classmethod
    def from_json(cls, data: object, where: str = "problem.") -> MoEProblem:
        """Rebuild a problem from :meth:`to_json`.

        Raises ValueError naming the field, ``where`` before its name, for what :meth:`from_parallelism` never makes.
        """
        file = Fields(data, where)
        shape = None
        if file.take("block_shape") is not None:
            numbers = file.items("block_shape")
            if [type(n) for n in numbers] != [int, int] or not all(0 <= n <= LARGEST for n in numbers):
                raise ValueError(f"{where}block_shape must be two integers up to {LARGEST:,}, not {numbers!r:.60}")
            shape = (numbers[0], numbers[1])
        result = cls(
            **{name: file.integer(name, least=1, most=LARGEST) for name in _SIZES},
            shared_experts=file.integer("shared_experts", most=LARGEST),
            dtype=file.text("dtype"),
            block_shape=shape,
            per_channel_quant=file.flag("per_channel_quant"),
            zero_points=file.flag("zero_points") if file.has("zero_points") else False,
            gated=file.flag("gated") if file.has("gated") else True,
        )
        file.finish()
        if not 1 <= result.routed_topk <= result.router_experts:
            raise ValueError(
                f"{where}topk {result.topk} less {result.shared_experts} shared_experts must be at least 1 and at most "
                f"router_experts {result.router_experts}"
            )
        if not 1 <= result.experts - result.shared_experts <= result.router_experts:
            raise ValueError(
                f"{where}experts {result.experts} less {result.shared_experts} shared_experts must be at least 1 and "
                f"at most router_experts {result.router_experts}"
            )
        try:
            _ = result.quantization
        except UserError as error:
            raise ValueError(f"{where[:-1]} is none that could be tuned: {error}") from None
        return result

    def _scales_text(self) -> str:
        zeros = " with zero points" if self.zero_points else ""
        if self.block_shape is not None:
            n, k = self.block_shape
            return f" block {n}x{k}" if n else f" group {k}{zeros}"
        return " channel-wise" if self.per_channel_quant else ""

    def __str__(self) -> str:
        return (
            f"E={self.experts} N={self.intermediate} hidden={self.hidden} topk={self.topk} {self.dtype}"
            + self._scales_text()
            + ("" if self.gated else " without gate")
            + (f" router={self.router_experts}" if self.expert_parallel else "")
            + (f" shared={self.shared_experts}" if self.shared_experts else "")
        )


def _check_block_shape(block_shape: tuple[int, int], intermediate: int, moe_tp: int, given: str) -> None:
    """Raise UserError where SGLang's loader would: a block's scale cannot be split between ranks.

    N must be a multiple of the block's n (a column split of gate and up) and, when there is more than one rank, of
    its k (a row split of down): ``create_weights`` of fp8.py, blockwise_int8.py and compressed_tensors_w8a8_fp8_moe.py
    in ``sglang/srt/layers/quantization``, SGLang 0.5.23.
    """
    block_n, block_k = block_shape
    for block, must_divide in ((block_n, True), (block_k, moe_tp > 1)):
        if must_divide and block and intermediate % block:
            raise UserError(
                f"{given} gives N={intermediate}, which is not divisible by {block} of the quantization block "
                f"[{block_n}, {block_k}]; SGLang refuses to load that, use a smaller tp or a larger ep"
            )


_SIZES = ("experts", "intermediate", "hidden", "topk", "router_experts")


def check_size(option: str, value: int) -> None:
    """Raise UserError for a dimension or a number of tokens that no layer has."""
    if value < 1:
        raise UserError(f"{option} must be at least 1, not {value}")
    if value > LARGEST:
        raise UserError(f"{option} {value} is more than any model has ({LARGEST:,} is the limit)")


def check_batch_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the values of M in ascending order; raises UserError for M < 1 or a value given twice."""
    if not sizes:
        raise UserError("--batch-sizes is empty; give at least one M, for example --batch-sizes 1,64")
    seen: set[int] = set()
    for m in sizes:
        if not 1 <= m <= LARGEST:
            raise UserError(f"--batch-sizes has {m}; every M must be at least 1 and at most {LARGEST:,}")
        if m in seen:
            raise UserError(f"--batch-sizes has {m} twice")
        seen.add(m)
    return tuple(sorted(seen))
