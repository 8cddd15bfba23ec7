"""Which installed pair a layer's numbers mean."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from sm120tune.check.names import ConfigName, parse_name
from sm120tune.errors import UserError
from sm120tune.install import Place
from sm120tune.install.manifest import load_manifest
from sm120tune.install.pair import ConfigPair, read_pair
from sm120tune.problem import MoEProblem
from sm120tune.upstream.lookup import config_dtype


@dataclass(frozen=True)
class Wanted:
    """A layer as a server asks for it."""

    problem: MoEProblem
    unsaid: frozenset[str] = frozenset()
    """Fields that nobody gave: the installed pair's own count."""


def installed_pair(place: Place, wanted: Wanted, cards: Collection[str]) -> tuple[ConfigPair, MoEProblem]:
    """Return the installed pair, one for a card of ``cards`` and the server's Triton before others, and its layer.

    ``cards`` are names as files have them. Raises UserError for none, and for one that was tuned for other layers of
    the same name.
    """
    own = f"triton_{(place.triton_version or '').replace('.', '_')}"
    found = []
    for entry in load_manifest(place.base).pairs:
        name = parse_name(entry.up_name)
        if name is not None and _asks_for(wanted.problem, name):
            found.append((name.device not in cards, entry.triton_folder != own, entry))
    if not found:
        raise UserError(
            f"no pair for {_key(wanted.problem)} is installed in {place.configs} "
            "(`sm120tune list` shows what is); give the pair's file to verify it without an install"
        )
    _, _, entry = min(found, key=lambda item: item[:2])
    pair = read_pair(place.configs / entry.triton_folder / entry.up_name)
    for there in pair.record.problems:
        if _asked(wanted, there) == there:
            return pair, there
    there = pair.record.problem
    asked = _asked(wanted, there)
    for option, value, has in (
        ("--hidden", asked.hidden, there.hidden),
        ("--topk", asked.routed_topk, there.routed_topk),
        ("--dtype", asked.dtype, there.dtype),
    ):
        if value != has and not pair.record.shared_with:
            raise UserError(f"{pair.up_path} was tuned for {option} {has}, not {value}; tune for this layer")
    tuned_for = " and ".join(map(str, pair.record.problems))
    raise UserError(f"{pair.up_path} was tuned for {tuned_for}, not for {asked}; tune for this layer")


def _asked(wanted: Wanted, there: MoEProblem) -> MoEProblem:
    """Return the wanted layer, with a tuned one's values for what nobody gave."""
    asked = replace(wanted.problem, **{name: getattr(there, name) for name in wanted.unsaid})
    if "topk" not in wanted.unsaid:
        asked = replace(asked, topk=wanted.problem.routed_topk + asked.shared_experts)
    return asked


def _selectors(problem: MoEProblem) -> tuple[str | None, str | None, bool]:
    """Return what follows the card in the name of the layer's file; groups are not in it."""
    shape = problem.block_shape
    return (config_dtype(problem), str(list(shape)) if shape and all(shape) else None, problem.per_channel_quant)


def _asks_for(problem: MoEProblem, name: ConfigName) -> bool:
    sizes = (name.experts, name.intermediate) == (problem.experts, problem.key_n)
    return sizes and name.selectors == _selectors(problem)


def _key(problem: MoEProblem) -> str:
    dtype, shape, per_channel = _selectors(problem)
    parts = [f"E={problem.experts}", f"N={problem.key_n}"]
    parts += [f"dtype={dtype}"] if dtype else []
    parts += [f"block_shape={shape}"] if shape else []
    parts += ["per_channel_quant=True"] if per_channel else []
    return ", ".join(parts)
