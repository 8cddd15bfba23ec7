"""Tables that scripts print, and write into documents between two comments that name the script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def show_table(script: str, head: Sequence[str], rows: Iterable[Sequence[str]], document: Path | None) -> None:
    """Print a table whose first two columns are text, after putting it into the document, if one is given."""
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    if document is not None:
        _put(document, script, lines)
    print("\n".join(lines))


def _put(path: Path, script: str, lines: Sequence[str]) -> None:
    """Replace what stands between the script's comments; raises SystemExit where the document has no such place."""
    text = path.read_text(encoding="utf-8")
    mark = f"<!-- {script}: {{}} -->"
    begin, end = (re.escape(mark.format(word)) for word in ("begin", "end"))
    middle = "\n".join(lines)
    new, count = re.subn(f"(?s)({begin}\n).*?({end})", lambda found: f"{found[1]}\n{middle}\n\n{found[2]}", text)
    if count != 1:
        raise SystemExit(f"{path} must have {mark.format('begin')} and {mark.format('end')} once")
    path.write_text(new, encoding="utf-8")
