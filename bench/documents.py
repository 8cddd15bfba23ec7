"""Tables that scripts write into documents, between two comments that name the script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def put_table(path: Path, script: str, lines: Sequence[str]) -> None:
    """Replace what stands between the script's comments; raises SystemExit where the document has no such place."""
    text = path.read_text(encoding="utf-8")
    mark = f"<!-- {script}: {{}} -->"
    begin, end = (re.escape(mark.format(word)) for word in ("begin", "end"))
    middle = "\n".join(lines)
    new, count = re.subn(f"(?s)({begin}\n).*?({end})", lambda found: f"{found[1]}\n{middle}\n\n{found[2]}", text)
    if count != 1:
        raise SystemExit(f"{path} must have {mark.format('begin')} and {mark.format('end')} once")
    path.write_text(new, encoding="utf-8")
