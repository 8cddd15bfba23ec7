"""What the experts of a checkpoint are to SGLang, before any split over GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sm120tune.errors import UserError
from sm120tune.problem import MoEProblem


@dataclass(frozen=True)
class MoEModel:
    """The routed experts of one checkpoint."""

    name: str
    architecture: str
    """The class that SGLang runs: the first of ``architectures`` in the config."""
    experts: int
    """Routed experts, all ranks together, without a fused shared expert."""
    inter: int
    """Intermediate size of one expert, before any split."""
    hidden: int
    topk: int
    """Choices of the router, without a fused shared expert."""
    fused_shared_experts: int
    """Shared experts that SGLang runs as further routed experts under plain tensor parallelism."""
    dtype: str
    block_shape: tuple[int, int] | None = None
    per_channel_quant: bool = False
    zero_points: bool = False
    gated: bool = True
    """Whether an expert has a gate projection beside its up projection."""
    activation: str = "silu"
    served_elsewhere: str | None = None
    """Which kernels SGLang runs instead of its Triton kernel; None where it runs the Triton kernel."""
    notes: tuple[str, ...] = ()
    """What a person should know about how SGLang serves this checkpoint."""
    fused_under_ep: bool = False
    """Whether the shared experts stay fused under expert parallelism: every rank then holds them."""

    def problem(self, *, tp: int = 1, ep: int = 1) -> MoEProblem:
        """Return the layer as one GPU runs it; raises UserError for a split that SGLang refuses.

        The dtype is that of the checkpoint, whether it can be tuned or not.
        """
        fused = self.fused_shared_experts if ep == 1 else 0
        try:
            problem = MoEProblem.from_parallelism(
                experts=self.experts,
                tp=tp,
                ep=ep,
                inter=self.inter,
                hidden=self.hidden,
                topk=self.topk,
                dtype=self.dtype,
                shared_experts=fused,
                block_shape=self.block_shape,
                per_channel_quant=self.per_channel_quant,
                zero_points=self.zero_points,
                gated=self.gated,
            )
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None
        if ep > 1 and self.fused_under_ep:
            fused = self.fused_shared_experts
            problem = replace(problem, experts=problem.experts + fused, topk=problem.topk + fused, shared_experts=fused)
        return problem

    def __str__(self) -> str:
        shape = f" {list(self.block_shape)}" if self.block_shape else ""
        shape += " per channel" if self.per_channel_quant else ""
        return (
            f"{self.name} ({self.architecture}), {self.experts} experts of {self.inter}, hidden {self.hidden}, "
            f"topk {self.topk}, {self.dtype}{shape}"
            + (f", {self._fused_words()}" if self.fused_shared_experts else "")
            + ("" if self.gated else ", no gate projection")
        )

    def _fused_words(self) -> str:
        plural = "" if self.fused_shared_experts == 1 else "s"
        where = "" if self.fused_under_ep else " while ep is 1"
        return f"{self.fused_shared_experts} shared expert{plural} fused{where}"
