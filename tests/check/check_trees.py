"""Copies of SGLang's releases with a config tree that a test fills, and rows to fill it with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune.check import Finding, Level, Report
from sm120tune.check.files import Context, check_files
from sm120tune.check.folders import sources_of
from sm120tune.check.resources import Resources
from sm120tune.check.rules import Rules, rules_of
from sm120tune.check.server import Server, check_server
from sm120tune.devices import find_device
from sm120tune.problem import MoEProblem
from sm120tune.upstream import SGLangTree, find_sglang

CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
CARD_FILE = CARD.replace(" ", "_")
TRITON = "3.8.0"
LADDER = (1, 4, 16, 64, 256, 1024, 4096, 16384)
"""No sparser than a ladder may be."""
DATA = Path(__file__).parent.parent / "data" / "sm120_configs"


def row(block_m: int = 16, **changes: Any) -> dict[str, Any]:
    """Return a row of a config file that every card can run."""
    base = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    return {**base, "num_warps": 4, "num_stages": 3, **changes}


def ladder(**changes: Any) -> dict[str, Any]:
    """Return a whole file of one row."""
    return {str(m): row(**changes) for m in LADDER}


def name(experts: int = 32, inter: int = 256, device: str = CARD_FILE, rest: str = "") -> str:
    """Return a file name; ``rest`` holds the selectors and ``_down``."""
    return f"E={experts},N={inter},device_name={device}{rest}.json"


def write(folder: Path, file: str, rows: Mapping[str, Any] | str) -> Path:
    """Write a config file: rows, or a text as it stands."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


def problem(**changes: Any) -> MoEProblem:
    """Return the layer that :func:`name` belongs to."""
    values = {"experts": 32, "intermediate": 256, "hidden": 512, "topk": 4, "router_experts": 32, **changes}
    return MoEProblem(**values)


@dataclass(frozen=True)
class Copy:
    """A release of SGLang without config files."""

    tree: SGLangTree

    def write(self, file: str, rows: Mapping[str, Any] | str, triton: str = TRITON) -> Path:
        """Write a config file into the folder of a Triton version."""
        return write(self.tree.configs_dir / f"triton_{triton.replace('.', '_')}", file, rows)

    def serve(self, layer: MoEProblem, *, resources: Resources | None = None, last: int = 16384) -> Report:
        """Check what a server of the layer would run; without ``resources`` by the formula alone."""
        server = Server(layer, find_device(CARD), self.tree, None, TRITON)
        return check_server(server, Context(None, last, rules_of(self.tree), resources or Resources(None, 1)))


def copy_of(release: Path, into: Path) -> Copy:
    """Copy a release without its config files."""
    shutil.copytree(release, into, ignore=shutil.ignore_patterns("configs"))
    tree = find_sglang(into)
    tree.configs_dir.mkdir()
    return Copy(tree)


def check(*paths: Path, rules: Rules | None = None, resources: Resources | None = None, last: int = 16384) -> Report:
    """Check files as they stand; without ``resources`` by the formula alone."""
    return check_files(sources_of(paths), Context(None, last, rules or Rules(), resources or Resources(None, 1)))


def codes(report: Report, *levels: Level) -> set[str]:
    """Return the codes of the findings, of some levels or all."""
    return {finding.code for finding in report.findings if not levels or finding.level in levels}


def errors(report: Report) -> set[str]:
    """Return the codes of the errors."""
    return codes(report, Level.ERROR)


def only(findings: Iterable[Finding], code: str) -> Finding:
    """Return the one finding of a code."""
    found = [finding for finding in findings if finding.code == code]
    assert len(found) == 1, found
    return found[0]
