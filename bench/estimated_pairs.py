"""What the estimated pairs that ship are expected to gain. Prints the table of generated_configs/README.md.

    python bench/estimated_pairs.py generated_configs/estimated --update generated_configs/README.md

Read from the provenance: each pair's card and layer, the rows that differ from what SGLang runs there today, the M of
the first of them, the least and the largest expected ratio, and the error that the model allows itself at those M.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from documents import show_table

from sm120tune.provenance import FileProvenance, RowStatus, load

_SCRIPT = "bench/estimated_pairs.py"
_HEAD = ("card", "layer", "rows changed", "from M", "expected time over today's", "error of the model")


def records(folder: Path) -> Iterator[FileProvenance]:
    """Yield the provenance of every pair below a folder, once for its two files; raises UserError for a damaged one."""
    for path in sorted(folder.glob("provenance/*/*.json")):
        if not path.stem.endswith("_down"):
            yield load(path)


def rows(found: Iterable[FileProvenance]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each pair, ordered by card."""
    for record in sorted(found, key=lambda record: (record.device["name"], str(record.problem))):
        changed = [row for row in record.rows if row.status is RowStatus.TUNED]
        ratios = [row.ratio for row in changed if row.ratio is not None]
        errors = [row.ratio_interval[1] / row.ratio - 1 for row in changed if row.ratio and row.ratio_interval]
        yield (
            record.device["name"].removeprefix("NVIDIA "),
            str(record.problem),
            f"{len(changed)} of {len(record.rows)}",
            str(changed[0].m) if changed else "",
            f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "",
            f"{100 * min(errors):.1f} to {100 * max(errors):.1f} %" if errors else "",
        )


def main() -> int:
    """Print the table, and write it where it belongs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an output folder's estimated/")
    parser.add_argument("--update", type=Path, help="document to put the table into")
    args = parser.parse_args()
    show_table(_SCRIPT, _HEAD, rows(records(args.folder)), args.update)
    return 0


if __name__ == "__main__":
    sys.exit(main())
