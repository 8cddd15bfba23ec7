"""Pairs as a run leaves them, copies of SGLang's releases to install into, and a picture of a whole folder."""

from __future__ import annotations

import dataclasses
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from sm120tune.install import Consent, InstallOptions, Outcome, Place, find_pairs, find_place, install
from sm120tune.problem import MoEProblem
from sm120tune.provenance import FileProvenance, RowProvenance, RowStatus
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import find_sglang
from sm120tune.upstream.lookup import ConfigLookup, Target
from sm120tune.upstream.source import load_kernels
from sm120tune.writer import Ladder, WrittenPair, write_ladder

CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
PROBLEM = MoEProblem(experts=12, intermediate=96, hidden=256, topk=2, router_experts=12)
FORCE = Consent(force=True)


def copied(tree: Path, into: Path, *, without_configs: bool = False) -> Path:
    """Copy a release to where a test may write; return the folder that holds ``sglang/``."""
    site = into / "site-packages"
    shutil.copytree(tree, site, ignore=shutil.ignore_patterns("E=*.json") if without_configs else None)
    return site


def picture(*folders: Path) -> dict[str, tuple[int, bytes | None, str]]:
    """Return everything in some folders: permissions, content, and where a link leads."""
    found: dict[str, tuple[int, bytes | None, str]] = {}
    for folder in folders:
        for path in folder.rglob("*"):
            content = path.read_bytes() if path.is_file() else None
            link = str(path.readlink()) if path.is_symlink() else ""
            found[str(path)] = (stat.S_IMODE(path.lstat().st_mode), content, link)
    return found


def rows(*sizes: int, stages: int = 3, tma: str = "") -> dict[int, TilePair]:
    return {
        m: TilePair(
            Tile(16, 64, 64, 1, 4, stages, USE_TMA="up" in tma), Tile(16, 32, 32, 1, 4, 2, USE_TMA="down" in tma)
        )
        for m in sizes
    }


@dataclass(frozen=True)
class Maker:
    """Writes pairs for one tree of SGLang."""

    site: Path
    output: Path

    def write(self, pairs: dict[int, TilePair] | None = None, **changes: Any) -> WrittenPair:
        """Write a pair that fits the tree and this Triton, but for the changes."""
        tree = find_sglang(self.site)
        pairs = rows(1, 8, 64) if pairs is None else pairs
        problem = changes.get("problem", PROBLEM)
        items = tuple(
            RowProvenance(
                m=m, status=RowStatus.TUNED, today=None, chosen=pair, today_us=None, today_spread_us=None,
                chosen_us=100.0, chosen_spread_us=0.5, ratio=None, ratio_interval=None, roofline_share=None,
                bound="bandwidth", timer="cuda", measured=True, what="chain", repetitions=10, routing="uniform",
                error=None, date="2026-05-01T12:00:00+00:00",
            )
            for m, pair in pairs.items()
        )  # fmt: skip
        record = FileProvenance(
            tool_version="0.1.0", kind="measured", problem=PROBLEM, device={"name": CARD, "driver": "580.1"},
            versions={"torch": "2.11.0", "triton": triton.__version__, "sglang": tree.version},
            kernel_source_hash=load_kernels(tree).hash_for(problem.quantization), search={}, failures={}, rows=items,
        )  # fmt: skip
        record = dataclasses.replace(record, **changes)
        version = record.versions["triton"]
        lookup = ConfigLookup(tree, Target(str(record.device["name"]), 101_376, version))
        up, down = lookup.file_names(record.problem)
        return write_ladder(self.output, Ladder(up, down, version, pairs, record), replace=True)

    @property
    def place(self) -> Place:
        return find_place(self.site, None)

    def install(self, *sources: Path, consent: Consent | None = None, **options: Any) -> Outcome:
        """Install into the tree."""
        chosen = InstallOptions(Consent() if consent is None else consent, **options)
        return install(find_pairs(sources), self.place, chosen)
