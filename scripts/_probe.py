"""Answer the questions that scripts/_env.sh has for a Python (3.11 or newer).

    _probe.py fits ROOT [dev] [no-sglang]   can this Python run sm120tune as it is?
    _probe.py needs ROOT [dev]              the requirements to install, one a line
    _probe.py sites                         this Python's package folders, one a line
    _probe.py overlay VENV                  let VENV see this Python's packages, behind its own

``fits`` prints ``complete`` (every import works), ``parent`` (torch, Triton and SGLang are here, small
packages are missing or old) or ``bare``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

HEAVY = ("torch", "triton")


def requirements(root: str, dev: bool) -> dict[str, str]:
    """Map each package to its requirement line in pyproject.toml."""
    project = tomllib.loads(Path(root, "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + (project["optional-dependencies"]["dev"] if dev else [])
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower(): line for line in lines}


def numbers(version: str) -> list[int]:
    """Turn ``2.14.1+cu130`` into [2, 14, 1]."""
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]


def present(name: str, line: str) -> bool:
    """Tell whether a package is found and not older than its requirement's lower bound."""
    if importlib.util.find_spec(name) is None:
        return False
    bound = re.search(r">=\s*([\d.]+)", line)
    try:
        return bound is None or numbers(importlib.metadata.version(name)) >= numbers(bound[1])
    except importlib.metadata.PackageNotFoundError:  # a source build; its import decides
        return True


def fits(root: str, dev: bool, sglang: bool) -> str:
    """Classify this Python."""
    needed = requirements(root, dev)
    found = {name for name, line in needed.items() if present(name, line)}
    if not found.issuperset(HEAVY) or (sglang and importlib.util.find_spec("sglang") is None):
        return "bare"
    if found != set(needed):
        return "parent"
    try:
        for name in needed:
            importlib.import_module(name)
    except Exception as error:
        print(f"{sys.executable}: {type(error).__name__}: {error}", file=sys.stderr)
        return "bare"
    return "complete"


def sites() -> list[str]:
    """List this Python's package folders in their order."""
    return [path for path in sys.path if Path(path).name.endswith("-packages")]


def overlay(venv: str) -> None:
    """Append this Python's package folders, and what their .pth files add, to a venv's search path."""
    (site,) = Path(venv).glob("lib/python*/site-packages")
    code = f"import site; list(map(site.addsitedir, {sites()}))\n"
    (site / "parent.pth").write_text(code, encoding="utf-8")


def main(what: str, root: str = "", *flags: str) -> None:
    """Print the answer."""
    if what == "sites":
        print(*sites(), sep="\n")
    elif what == "overlay":
        overlay(root)
    elif what == "needs":
        needed = requirements(root, "dev" in flags)
        print(*(line for name, line in needed.items() if name not in HEAVY), sep="\n")
    else:
        print(fits(root, "dev" in flags, "no-sglang" not in flags))


if __name__ == "__main__":
    main(*sys.argv[1:])
