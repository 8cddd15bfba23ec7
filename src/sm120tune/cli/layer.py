"""What the options of a layer's numbers say, for commands where each may be left out."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sm120tune.cli.options import given, given_or, scale_shape
from sm120tune.errors import UserError
from sm120tune.problem import MoEProblem


def experts_and_inter(experts: int | None, inter: int | None) -> tuple[int, int]:
    """Return both; raises UserError for one that was not given."""
    if experts is None or inter is None:
        missing = "--experts" if experts is None else "--inter"
        raise UserError(f"missing {missing}; for example: --experts 256 --tp 8 --inter 2048, or --model GLM-5 --tp 8")
    return experts, inter


@dataclass(frozen=True, kw_only=True)
class LayerNumbers:
    """The values of ``layer_options`` and ``scale_options`` as click parsed them; ``inter`` is before any split."""

    experts: int | None
    tp: int | None
    ep: int | None
    inter: int | None
    hidden: int | None
    topk: int | None
    dtype: str | None
    shared_experts: int | None
    block_shape: str | None
    per_channel: bool
    group_size: int | None
    zero_points: bool
    no_gate: bool

    @property
    def numbers(self) -> list[str]:
        """Which of them were given, as options."""
        names = [field.name for field in fields(LayerNumbers) if given(getattr(self, field.name))]
        return [f"--{name.replace('_', '-')}" for name in names]

    @property
    def shape(self) -> tuple[int, int] | None:
        """SGLang's ``block_shape``; raises UserError for a wrong one and for a block beside a group."""
        return scale_shape(self.block_shape, self.group_size)

    def problem(self, *, experts: int, inter: int, hidden: int, topk: int, dtype: str) -> MoEProblem:
        """Return the layer on one GPU: these experts, inter and dtype, and hidden and topk where not given.

        Raises UserError for what no server could run.
        """
        return MoEProblem.from_parallelism(
            experts=experts,
            tp=given_or(self.tp, 1),
            ep=given_or(self.ep, 1),
            inter=inter,
            hidden=given_or(self.hidden, hidden),
            topk=given_or(self.topk, topk),
            dtype=dtype,
            shared_experts=given_or(self.shared_experts, 0),
            block_shape=self.shape,
            per_channel_quant=self.per_channel,
            zero_points=self.zero_points,
            gated=not self.no_gate,
        )


@dataclass(frozen=True, kw_only=True)
class ModelOrNumbers(LayerNumbers):
    """The values of ``model_options`` beside them."""

    model: str | None
    force: bool

    @property
    def layer(self) -> list[str]:
        """What was given of a layer, as options."""
        return [*(["--model"] if self.model is not None else []), *self.numbers]
