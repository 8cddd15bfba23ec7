"""Which experts the tokens choose: synthetic and recorded routings, reproducible from a seed.

Expert ids are local to this GPU, as the MoE kernel sees them. Under expert parallelism this GPU is rank 0: it holds
the router's first experts, and a choice of any other becomes -1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sm120tune.errors import UserError
from sm120tune.measure.recorded_routing import digest_of, draw, recorded_ids
from sm120tune.problem import MoEProblem

_LARGEST_DRAW = 2**30
"""Numbers behind one routing: 4 GiB."""

MAX_ALPHA = 10.0
"""Above it one expert takes every token, and the popularities of the others vanish in float32."""

ROUTING_CHOICES = "uniform, balanced, power:ALPHA (for example power:1.2) or file:PATH (recorded topk_ids, .npy or .pt)"
"""For help texts and errors."""


@dataclass(frozen=True)
class Routing:
    """How tokens spread over the router's experts; ``str()`` gives the text that :func:`parse_routing` reads.

    ``uniform``: every token draws distinct experts, all equally likely. ``balanced``: min(topk * M, E) experts are
    touched, as evenly as possible. ``power``: an expert's popularity falls with its rank as ``rank ** -alpha``.
    ``file``: consecutive tokens of a recording.
    """

    kind: Literal["uniform", "balanced", "power", "file"]
    alpha: float = 0.0
    path: str = ""
    digest: str = ""

    def __str__(self) -> str:
        if self.kind == "file":
            return f"file:{self.path}#{self.digest}"
        if self.kind != "power":
            return self.kind
        short = f"{self.alpha:g}"
        return f"power:{short if float(short) == self.alpha else repr(self.alpha)}"


UNIFORM = Routing("uniform")
BALANCED = Routing("balanced")


def parse_routing(text: str) -> Routing:
    """Read a routing from the command line; raises UserError that lists the choices."""
    if text == "uniform":
        return UNIFORM
    if text == "balanced":
        return BALANCED
    kind, _, value = text.partition(":")
    if kind == "file":
        return _recorded(value)
    if kind != "power":
        raise UserError(f"--routing {text!r} is unknown; choose {ROUTING_CHOICES}")
    try:
        alpha = float(value)
    except ValueError:
        alpha = math.nan
    if not 0 < alpha <= MAX_ALPHA:
        raise UserError(f"--routing {text!r}: ALPHA must be a number above 0 and at most {MAX_ALPHA:g}")
    return Routing("power", alpha)


def _recorded(value: str) -> Routing:
    path, _, expected = value.partition("#")
    digest = digest_of(path)
    if expected and digest != expected:
        raise UserError(f"--routing file:{value}: the file has changed since, its content is now #{digest}")
    return Routing("file", path=path, digest=digest)


Ids = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]


def check_fits(problem: MoEProblem, routing: Routing) -> None:
    """Raise UserError where a whole recording, not only the tokens that some M draws, is of another layer."""
    if routing.kind != "file":
        return
    ids = recorded_ids(routing.path)
    if ids.shape[1] != problem.routed_topk or ids.max() >= problem.router_experts:
        raise UserError(
            f"--routing {routing} has {ids.shape[1]} choices a token and ids up to {ids.max()}; this layer has "
            f"{problem.routed_topk} of {problem.router_experts} experts"
        )


def topk_ids(problem: MoEProblem, m: int, routing: Routing, seed: int) -> Ids:
    """Return the local expert ids that M tokens chose: int32 ``[M, topk]``, -1 for an expert of another rank.

    A token's ids are distinct. The last ``shared_experts`` columns are the fused shared experts, the same for every
    token. The same (problem, M, routing, seed) always gives the same ids. Raises UserError for M < 1 or a token that
    must choose more experts than there are.
    """
    chosen, _ = _route(problem, m, routing, seed)
    local = _local_experts(problem)
    shared = np.broadcast_to(np.arange(local, local + problem.shared_experts), (m, problem.shared_experts))
    return np.concatenate([np.where(chosen < local, chosen, -1), shared], axis=1).astype(np.int32)


def topk_weights(problem: MoEProblem, m: int, routing: Routing, seed: int) -> Weights:
    """Return the weights that belong to :func:`topk_ids`: positive, float32 ``[M, topk]``.

    A softmax over the token's routed choices, so those sum to 1 (other ranks' choices included); a shared expert
    weighs 1, since the router does not scale it. Raises UserError as :func:`topk_ids` does.
    """
    _, logits = _route(problem, m, routing, seed)
    # Temperature 2: a choice whose weight is next to nothing would hide an error in its rows from verification.
    routed = np.exp((logits - logits.max(axis=1, keepdims=True)) / 2)
    routed /= routed.sum(axis=1, keepdims=True)
    shared = np.ones((m, problem.shared_experts), dtype=np.float32)
    return np.concatenate([routed, shared], axis=1, dtype=np.float32)


@functools.lru_cache(maxsize=256)
def tokens_per_expert(problem: MoEProblem, m: int, routing: Routing, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return how many routed rows each local expert gets: int64 ``[E]``, cached and read-only."""
    ids = topk_ids(problem, m, routing, seed)
    counts = np.bincount(ids[ids >= 0], minlength=problem.experts).astype(np.int64)
    counts.setflags(write=False)
    return counts


def _local_experts(problem: MoEProblem) -> int:
    """Return how many of the router's experts live on this GPU."""
    return problem.experts - problem.shared_experts


def _popularity(router_experts: int, alpha: float) -> npt.NDArray[np.float64]:
    """Return ``rank ** -alpha`` for ranks 1 to R."""
    return np.arange(1, router_experts + 1, dtype=np.float64) ** -alpha


def _balanced_order(problem: MoEProblem, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the router's experts in the order in which balanced routing deals them out, int64 ``[R]``.

    Local and other ranks' experts are interleaved, local first, so that any stretch of the order holds this GPU's
    share of it and a single token already gives this GPU work.
    """
    local = _local_experts(problem)
    remote = problem.router_experts - local
    position = np.concatenate([np.arange(local) / local, (np.arange(remote) + 0.5) / max(1, remote)])
    ids = np.concatenate([rng.permutation(local), local + rng.permutation(remote)])
    return ids[np.argsort(position, kind="stable")]


@functools.lru_cache(maxsize=2)
def _route(
    problem: MoEProblem, m: int, routing: Routing, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the router's choices (int64 ``[M, routed_topk]``, global ids) and their logits (float32).

    The last two are kept: ids and weights are asked for one after the other.
    """
    router, topk = problem.router_experts, problem.routed_topk
    if m < 1:
        raise UserError(f"M must be at least 1, not {m}")
    if not 1 <= topk <= router:
        raise UserError(f"a token cannot choose {topk} of {router} experts")
    if m * router > _LARGEST_DRAW:
        raise UserError(
            f"M={m} tokens over {router} experts are more than can be drawn; "
            "check --experts, or give smaller --batch-sizes"
        )
    rng = np.random.default_rng([seed % 2**64, m])
    if routing.kind == "file":
        check_fits(problem, routing)
        return draw(routing.path, m, rng), rng.standard_normal((m, topk), dtype=np.float32)
    if routing.kind == "balanced":
        order = _balanced_order(problem, rng)
        slots = np.arange(m * topk).reshape(m, topk)
        return order[slots % router], rng.standard_normal((m, topk), dtype=np.float32)
    # The topk first arrivals of exponential clocks with the popularities as rates are topk draws without
    # replacement; minus the logarithm of an arrival is the Gumbel noise around the expert's logit.
    arrivals = rng.standard_exponential((m, router), dtype=np.float32)
    if routing.kind == "power":
        # The popular experts depend on the seed alone: they stay popular from one M to the next.
        ranks = np.random.default_rng([seed % 2**64, 0]).permutation(router)
        arrivals /= _popularity(router, routing.alpha).astype(np.float32)[ranks]
    first = np.argpartition(arrivals, topk - 1, axis=1)[:, :topk]
    times = np.take_along_axis(arrivals, first, axis=1)
    order = np.argsort(times, axis=1)
    logits = -np.log(np.maximum(np.take_along_axis(times, order, axis=1), np.finfo(np.float32).tiny))
    return np.take_along_axis(first, order, axis=1), logits
