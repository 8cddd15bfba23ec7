"""Which installed pair a layer's numbers mean."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sm120tune.check.names import parse_name
from sm120tune.errors import UserError
from sm120tune.install import Place
from sm120tune.install.manifest import load_manifest
from sm120tune.install.pair import ConfigPair, read_pair


@dataclass(frozen=True)
class Wanted:
    """A layer as a server asks for it, and what a person said of it beyond the file's name."""

    experts: int
    intermediate: int
    hidden: int | None
    topk: int | None
    """The router's own choices."""
    dtype: str | None


def installed_pair(place: Place, wanted: Wanted, cards: Collection[str]) -> ConfigPair:
    """Return the installed pair, one for a card of ``cards`` and the server's Triton before others.

    ``cards`` are names as files have them. Raises UserError for none, and for one that was tuned for another layer of
    the same name.
    """
    own = f"triton_{(place.triton_version or '').replace('.', '_')}"
    sizes = (wanted.experts, wanted.intermediate)
    found = []
    for entry in load_manifest(place.base).pairs:
        name = parse_name(entry.up_name)
        # A name with a dtype is a quantized layer's, which is no other layer's to verify.
        if name is not None and (name.experts, name.intermediate, name.dtype) == (*sizes, None):
            found.append((name.device not in cards, entry.triton_folder != own, entry))
    if not found:
        raise UserError(
            f"no pair for E={wanted.experts}, N={wanted.intermediate} is installed in {place.configs} "
            "(`sm120tune list` shows what is); give the pair's file to verify it without an install"
        )
    _, _, entry = min(found, key=lambda item: item[:2])
    pair = read_pair(place.configs / entry.triton_folder / entry.up_name)
    there = pair.record.problem
    for option, value, has in (
        ("--hidden", wanted.hidden, there.hidden),
        ("--topk", wanted.topk, there.routed_topk),
        ("--dtype", wanted.dtype, there.dtype),
    ):
        if value is not None and value != has:
            raise UserError(f"{pair.up_path} was tuned for {option} {has}, not {value}; tune for this layer")
    return pair
