"""What the tests of SGLang's lookup share: one layer, one card, an editable copy of a release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_copies import (
    FOLDERS,
    config_path,
    row,
    slim_copy,
    write_rows,
)

from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import find_sglang
from sm120tune.upstream.lookup import ConfigLookup, Target

CARD = Target("NVIDIA RTX PRO 6000 Blackwell Server Edition", 101376, "3.8.0")
PROBLEM = MoEProblem(experts=32, intermediate=256, hidden=512, topk=4, router_experts=32)
UP = "E=32,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"
DOWN = "E=32,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition_down.json"
FP8 = MoEProblem(experts=32, intermediate=256, hidden=512, topk=4, router_experts=32, dtype="fp8_w8a8")
FP8_BLOCK = MoEProblem(
    experts=32, intermediate=256, hidden=512, topk=4, router_experts=32, dtype="fp8_w8a8", block_shape=(64, 128)
)

SMALL_DEFAULT = TilePair.same(Tile(16, 32, 64, 1, num_warps=4, num_stages=3))
LARGE_DEFAULT = TilePair.same(Tile(64, 64, 32, 8, num_warps=4, num_stages=3))


class Release:
    """An editable copy of one release: its config folder and lookups over it."""

    def __init__(self, tree: Path, release: str, folder: Path) -> None:
        self.package = slim_copy(tree, release, folder)
        self.configs = self.package / FOLDERS[release][1] / "configs"
        self.config_file = self.package / config_path(release)

    def write(self, triton: str, rows: dict[Any, Any], name: str = UP) -> Path:
        return write_rows(self.configs, triton, name, rows)

    def lookup(self, target: Target = CARD, **kwargs: Any) -> ConfigLookup:
        return ConfigLookup(find_sglang(self.package), target, **kwargs)


Make = Callable[[str], Release]


def tile(block_m: int, **changes: Any) -> Tile:
    return Tile(**row(block_m, **changes))
