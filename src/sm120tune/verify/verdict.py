"""From both sides' samples to a word."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune.accuracy import ErrorMeasure, is_correct
from sm120tune.search.race import Ratio, compare
from sm120tune.verify.messages import Answer, Side

TOLERANCE = 0.02
"""Of the whole call: sorting and summing are in it, which no config changes."""


class Word(enum.StrEnum):
    """What became of one M."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    WRONG = "wrong"
    NOT_LOADED = "not loaded"
    FAILED = "failed"


@dataclass(frozen=True)
class Expected:
    """What SGLang must load."""

    dtype: str
    up_path: Path
    down_path: Path
    up_rows: Mapping[int, Mapping[str, Any]]
    down_rows: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """What SGLang's own call says of a pair at one M."""

    m: int
    word: Word
    loaded: bool
    without_us: float | None
    with_us: float | None
    ratio: Ratio | None
    """With the pair over without it, all repeats together."""
    error: ErrorMeasure | None
    """With the pair, against the reference."""
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether the pair may serve this M."""
        return self.word in {Word.FASTER, Word.SAME}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "m": self.m,
            "verdict": self.word.value,
            "holds": self.holds,
            "loaded": self.loaded,
            "without_us": self.without_us,
            "with_us": self.with_us,
            "ratio": self.ratio.middle if self.ratio else None,
            "ratio_interval": [self.ratio.low, self.ratio.high] if self.ratio else None,
            "error": _finite(self.error.relative if self.error else None),
            "error_worst_row": _finite(self.error.worst_row if self.error else None),
            "note": self.note,
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def judge(answer: Answer, expected: Expected) -> Verdict:
    """Say whether the pair was loaded, is right and is no slower."""
    without, with_pair = answer.without, answer.with_pair
    fault = _not_loaded(with_pair, expected)
    ratio = compare(with_pair.samples, without.samples) if with_pair.repeats and without.repeats else None
    word, note = _word(answer, ratio, expected.dtype)
    if fault and not with_pair.failure:
        word, note = Word.NOT_LOADED, fault
    elif not note and any("Fallback" in line and str(expected.up_path) in line for line in with_pair.said):
        note = "read as a fallback: the pair lies in another Triton's folder"
    return Verdict(
        m=answer.m,
        word=word,
        loaded=not fault,
        without_us=statistics.median(without.samples) if without.repeats else None,
        with_us=statistics.median(with_pair.samples) if with_pair.repeats else None,
        ratio=ratio,
        error=with_pair.error,
        note=note,
    )


def _not_loaded(side: Side, expected: Expected) -> str:
    """Return why SGLang did not load the pair's two files, by its own log and its own lookup; empty where it did."""
    files = (
        (expected.up_path, expected.up_rows, side.up_rows),
        (expected.down_path, expected.down_rows, side.down_rows),
    )
    for path, wanted, rows in files:
        if rows is None:
            return f"SGLang runs its built-in default instead of {path.name}"
        if rows != wanted:
            return f"SGLang has other rows than those of {path.name}"
        if not any(f"MoE kernel config from {path}." in line for line in side.said):
            return f"SGLang's log does not name {path}"
    return ""


def _word(answer: Answer, ratio: Ratio | None, dtype: str) -> tuple[Word, str]:
    without, with_pair = answer.without, answer.with_pair
    if with_pair.failure:
        return Word.FAILED, with_pair.failure
    if with_pair.error is None or not is_correct(with_pair.error, dtype):
        return Word.WRONG, _error_note(with_pair.error)
    if ratio is None:
        return Word.FASTER, f"without the pair the call fails: {without.failure}"
    if is_slower(answer, ratio):
        return Word.SLOWER, ""
    return (Word.FASTER if ratio.faster else Word.SAME), ""


def is_slower(answer: Answer, ratio: Ratio) -> bool:
    """Whether the pair is slower in every repeat by the race's definition, and over all by more than the tolerance."""
    repeats = zip(answer.with_pair.repeats, answer.without.repeats, strict=True)
    return ratio.middle > 1 + TOLERANCE and all(compare(ours, theirs).slower for ours, theirs in repeats)


def _error_note(error: ErrorMeasure | None) -> str:
    if error is None:
        return ""
    if error.nan_rows:
        return f"{error.nan_rows} rows are not finite"
    return f"relative error {error.relative:.4f}, worst row {error.worst_row:.4f}"
