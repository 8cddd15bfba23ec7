"""What one SGLang release does with rows that others refuse, asked of its own lookup."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sm120tune._jsonfile import dump_object
from sm120tune.errors import UserError
from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile
from sm120tune.upstream import SGLangTree
from sm120tune.upstream.lookup import ConfigLookup, Target

_PROBE = MoEProblem(experts=8, intermediate=64, hidden=64, topk=2, router_experts=8)
_TARGET = Target("probe", 101376, "3.0.0")


@dataclass(frozen=True)
class Rules:
    """The answers; None where no SGLang is known, so that the strictest release counts."""

    version: str | None = None
    up_tma: bool | None = None
    """Whether USE_TMA in an up file is understood; otherwise it raises KeyError at launch."""
    overrides_block_m: bool | None = None
    """Whether a down row's other BLOCK_SIZE_M is overridden; otherwise an assert ends the server."""


@functools.cache
def rules_of(tree: SGLangTree | None) -> Rules:
    """Return the rules of a tree, found by running its lookup over two files; raises UpstreamError."""
    if tree is None:
        return Rules()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            lookup = ConfigLookup(tree, _TARGET, config_dir=Path(name))
            folder = Path(name) / "configs" / "triton_3_0_0"
            folder.mkdir(parents=True)
            for file, block_m in zip(lookup.file_names(_PROBE), (16, 32), strict=True):
                (folder / file).write_text(dump_object({"1": Tile(block_m, 32, 64, 1).to_row()}))
            pair = lookup.todays_pair(_PROBE, 1).pair
    except OSError as error:
        raise UserError(f"no temporary folder can be written: {error.strerror or error}; set TMPDIR to one") from None
    return Rules(tree.version, lookup.up_tma_supported, pair is not None)
