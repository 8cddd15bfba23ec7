from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from sm120tune.cli import progress
from sm120tune.cli.progress import LiveObserver, PlainObserver, make_observer, standing_text
from sm120tune.cli.report import row_line
from sm120tune.observer import Observer, Silent, Standing
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.tiles import Tile, TilePair

TODAY = TilePair.same(Tile(16, 32, 64, 1))
ROW = RowProvenance(
    m=512, status=RowStatus.TUNED, today=TODAY, chosen=TilePair(Tile(32, 64, 64, 1), Tile(32, 128, 64, 1)),
    today_us=200.0, today_spread_us=1.0, chosen_us=150.0, chosen_spread_us=1.0, ratio=0.75, ratio_interval=(0.74, 0.76),
    roofline_share=0.5, bound="bandwidth", timer="cuda", measured=True, what="chain", repetitions=31, routing="uniform",
    error=0.004, date="2026-05-01T12:00:00+00:00",
)  # fmt: skip
STANDING = Standing("GPU 0", 512, 12, 64, best_us=150.0, today_us=200.0)


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=200, highlight=False), text


def drive(observer: Observer) -> None:
    """Tell an observer everything that there is to tell."""
    observer.phase("search", 64)
    observer.standing(STANDING)
    observer.compiling(5)
    observer.failures(Counter({"shared_memory": 3, "timeout": 1}))
    observer.advance()
    observer.advance(2)
    observer.advance(-1)
    observer.standing(replace(STANDING, m=64, best_us=None, today_us=None))
    observer.event("GPU 0: worker died")
    observer.row(ROW)
    observer.phase("settle", 0)
    observer.advance(0)


@pytest.mark.parametrize(
    ("terminal", "quiet", "kind"),
    [(True, False, LiveObserver), (False, False, PlainObserver), (True, True, Silent), (False, True, Silent)],
)
def test_the_display_suits_where_it_goes(terminal: bool, quiet: bool, kind: type) -> None:
    out, text = console(terminal)
    with make_observer(out, quiet=quiet) as observer:
        assert isinstance(observer, kind)
        drive(observer)
    said = text.getvalue()
    assert (said == "") == quiet
    if not quiet:
        assert "GPU 0: worker died" in said
        assert "M=512" in said


def test_lines_for_a_file_hold_no_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.0)
    out, text = console(False)
    drive(PlainObserver(out))
    said = text.getvalue()
    assert "\x1b" not in said
    lines = said.splitlines()
    assert lines[0] == "search ..."
    assert lines[-1] == "settle ..."
    standing = next(line for line in lines if "M=64" in line)
    assert "2/64" in standing
    assert "compiling 5" in standing
    assert "shared_memory 3" in standing
    assert "timeout 1" in standing


def test_standings_do_not_flood_a_file() -> None:
    out, text = console(False)
    observer = PlainObserver(out)
    observer.phase("search", 64)
    for _ in range(1000):
        observer.standing(STANDING)
    assert len(text.getvalue().splitlines()) < 5


def test_a_terminal_is_left_clean_and_the_rows_stay() -> None:
    out, text = console(True)
    with LiveObserver(out) as observer:
        drive(observer)
    # The cursor, hidden while the display moves, is back.
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") > 0
    assert re.search(r"ratio 0\.750", text.getvalue())


def test_a_standing_in_words() -> None:
    assert standing_text(STANDING) == "GPU 0 M=512: 12/64, best 150.0 us, today 200.0 us"
    assert standing_text(replace(STANDING, best_us=None, today_us=None)).endswith("best - us, today - us")


@pytest.mark.parametrize(
    ("changes", "said", "not_said"),
    [
        ({}, ["today     200.0 us", "tuned     150.0 us", "ratio 0.750", "50% of bandwidth", "32x64x64", "x128x"], []),
        ({"status": RowStatus.KEPT, "ratio": 1.0}, ["kept", "ratio 1.000"], ["tuned"]),
        ({"today_us": None, "ratio": None, "note": "today's pair cannot run"}, ["cannot run"], ["ratio", "200.0"]),
        ({"roofline_share": None}, ["ratio 0.750"], ["bandwidth"]),
        ({"note": "key added"}, ["(key added)"], []),
    ],
)  # fmt: skip
def test_a_row_in_one_line(changes: dict[str, Any], said: list[str], not_said: list[str]) -> None:
    line = row_line(replace(ROW, **changes))
    assert "\n" not in line
    for text in said:
        assert text in line
    for text in not_said:
        assert text not in line
