"""What the calibrate command shows: the tiles beforehand, and one screen at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sm120tune.calibrate.assess import Compared
from sm120tune.calibrate.choice import Chosen
from sm120tune.calibrate.fit import limits
from sm120tune.calibrate.run import Result
from sm120tune.measure.cost_constants import CardClass
from sm120tune.measure.results import Measured

_COLUMNS = ("M", "times", "error before", "after, unseen tiles", "after, unseen M", "order", "first", "best of 5")


def show_tiles(out: Console, chosen: Sequence[Chosen]) -> None:
    """Show which tiles would be timed."""
    table = Table(box=None, pad_edge=False)
    for column in ("tile", "chosen as"):
        table.add_column(column, no_wrap=True)
    for one in chosen:
        table.add_row(str(one.tile), one.why)
    out.print(table)


def show_result(out: Console, result: Result, start: CardClass, written: Sequence[Path], seconds: float) -> None:
    """Show what was found, how wrong the estimates are now, and which constants changed."""
    origin = result.calibration.origin
    how = "measured" if origin.timer == "cuda" else "replayed from a recorded table"
    out.print(f"{origin.problem} on {origin.device.name}, {how}: {_counts(result)}", markup=False)
    assessment = result.assessment
    if assessment.overall is not None:
        table = Table(box=None, pad_edge=False)
        for column in _COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for m, one in assessment.by_m.items():
            table.add_row(*_cells(str(m), one))
        table.add_row(*_cells("all", assessment.overall))
        out.print(table)
        out.print(
            "errors: median / 90th percentile. order: rank correlation. first, best of 5: time of the model's first"
        )
        out.print(
            "tile, or the best of its first 5, over the best of all that were timed. before > after, unseen tiles"
        )
    changed = [
        _change(name, getattr(start.constants, name), getattr(assessment.fitted.constants, name))
        for name in assessment.fitted.refitted
    ]
    out.print(f"refitted ({len(changed)}): {', '.join(changed) or 'none'}")
    reasons: dict[str, list[str]] = {}
    for name, why in assessment.reasons.items():
        reasons.setdefault(why, []).append(name)
    left = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
    out.print(f"left as in {start.name}: {left or 'none'}")
    for path in written:
        out.print(f"wrote {path}")
    out.print(f"{seconds:.0f} s; use it with --calibration {written[0]}")


def result_json(result: Result) -> dict[str, Any]:
    """Return the result for ``--json``: the file's content without the times of every tile."""
    document = result.calibration.to_json()
    del document["times"]
    timed = result.found.timed
    return {
        **document,
        "tiles": len({one.tile for one in timed}),
        "resumed": result.found.resumed,
        "failures": dict(_failures(result)),
        "told": {name: round(share, 3) for name, share in result.assessment.fitted.told.items()},
    }


def _change(name: str, before: float, after: float) -> str:
    # At its limit a constant says that the card's specification, or the formula, is not what this card is.
    at_limit = any(math.isclose(after, limit, rel_tol=1e-3) for limit in limits(name, before))
    return f"{name} {before:.4g} > {after:.4g}{' (its limit)' if at_limit else ''}"


def _failures(result: Result) -> Counter[str]:
    return Counter(failure.kind.value for one in result.found.timed for failure in one.failures)


def _counts(result: Result) -> str:
    timed = result.found.timed
    usable = sum(len(one.usable()) for one in timed)
    checked = [one for one in timed if one.check is not None]
    wrong = sum(one.wrong for one in timed)
    right = "results not checked" if not checked else f"{len(checked) - wrong} of {len(checked)} results right"
    failed = ", ".join(f"{kind} {count}" for kind, count in sorted(_failures(result).items()))
    rough = sum(
        isinstance(each.time, Measured) and each.time.stopped_early for one in timed for each in one.gemms.values()
    )
    slow = f", {rough} more only known as lower bounds" if rough else ""
    earlier = f" ({result.found.resumed} of {len(timed)} measured by an earlier run)" if result.found.resumed else ""
    tiles = len({one.tile for one in timed})
    return f"{tiles} tiles, {usable} times{slow}{earlier}, {right}; failures: {failed or 'none'}"


def _cells(name: str, one: Compared) -> tuple[str, ...]:
    before, tiles, m = one.before, one.unseen_tiles, one.unseen_m
    return (
        name,
        str(before.launches),
        *(f"{each.median:.1%} / {each.p90:.1%}" for each in (before, tiles, m)),
        f"{before.rank_correlation:.3f} > {tiles.rank_correlation:.3f}",
        f"{before.first:.3f} > {tiles.first:.3f}",
        f"{before.best_of_5:.3f} > {tiles.best_of_5:.3f}",
    )
