"""Where one row of a written ladder came from."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any

from sm120tune._jsonfile import Fields
from sm120tune.tiles import Tile, TilePair

BOUNDS = ("bandwidth", "compute", "unknown")
TIMERS = ("cuda", "model", "replay", "none")


class RowStatus(enum.StrEnum):
    """Whether a row replaced today's pair, carries it, or came from elsewhere without any comparison."""

    TUNED = "tuned"
    KEPT = "kept"
    CONVERTED = "converted"


@dataclass(frozen=True)
class RowProvenance:
    """One M of the ladder. Times are medians in microseconds; raises ValueError for a word outside its set."""

    m: int
    status: RowStatus
    today: TilePair | None
    """What SGLang would run without this file; None where that cannot run on the card."""
    chosen: TilePair
    today_us: float | None
    today_spread_us: float | None
    chosen_us: float | None
    chosen_spread_us: float | None
    ratio: float | None
    """``chosen / today``: below 1 is faster."""
    ratio_interval: tuple[float, float] | None
    roofline_share: float | None
    """The roofline's time over the chosen pair's: 1 is the card's peak."""
    bound: str
    """The roof that binds: one of BOUNDS; unknown where nothing was timed."""
    timer: str
    """One of TIMERS; none for a converted row."""
    measured: bool
    what: str
    """What was timed: "chain", "whole_call", ..."""
    repetitions: int
    routing: str
    error: float | None
    """Error of the chosen pair against the reference."""
    date: str
    """ISO 8601."""
    note: str = ""

    def __post_init__(self) -> None:
        check_word("bound", self.bound, BOUNDS)
        check_word("timer", self.timer, TIMERS)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        data: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        data["status"] = self.status.value
        data["today"] = None if self.today is None else _pair_to_json(self.today)
        data["chosen"] = _pair_to_json(self.chosen)
        data["ratio_interval"] = None if self.ratio_interval is None else list(self.ratio_interval)
        return data

    @classmethod
    def from_json(cls, data: object, where: str = "") -> RowProvenance:
        """Rebuild a row; raises ValueError naming the field, after ``where``."""
        row = Fields(data, where)
        try:
            status = RowStatus(row.text("status"))
        except ValueError:
            raise ValueError(f"{where}status must be one of {', '.join(RowStatus)}") from None
        result = cls(
            m=row.integer("m", least=1),
            status=status,
            today=None if row.take("today") is None else _pair_from_json(row, "today"),
            chosen=_pair_from_json(row, "chosen"),
            today_us=row.optional_number("today_us"),
            today_spread_us=row.optional_number("today_spread_us"),
            chosen_us=row.optional_number("chosen_us"),
            chosen_spread_us=row.optional_number("chosen_spread_us"),
            ratio=row.optional_number("ratio"),
            ratio_interval=_interval(row, "ratio_interval"),
            roofline_share=row.optional_number("roofline_share"),
            bound=row.text("bound"),
            timer=row.text("timer"),
            measured=row.flag("measured"),
            what=row.text("what"),
            repetitions=row.integer("repetitions"),
            routing=row.text("routing"),
            error=row.optional_number("error"),
            date=row.text("date"),
            note=row.text("note"),
        )
        row.finish()
        return result


def check_word(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError for a word outside its set."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _pair_to_json(pair: TilePair) -> dict[str, Any]:
    return {"gate_up": pair.gate_up.to_row(), "down": pair.down.to_row()}


def _pair_from_json(row: Fields, key: str) -> TilePair:
    pair = Fields(row.mapping(key), f"{row.name(key)}.")
    try:
        result = TilePair(Tile.from_row(pair.mapping("gate_up")), Tile.from_row(pair.mapping("down")))
    except ValueError as error:
        raise ValueError(f"{row.name(key)}: {error}") from None
    pair.finish()
    return result


def _interval(row: Fields, key: str) -> tuple[float, float] | None:
    if row.take(key) is None:
        return None
    values = row.items(key)
    ends = Fields(dict(zip("01", values, strict=False)), f"{row.name(key)}.")
    if len(values) != 2:
        raise ValueError(f"{row.name(key)} must be two numbers, not {values!r:.60}")
    return ends.number("0"), ends.number("1")
