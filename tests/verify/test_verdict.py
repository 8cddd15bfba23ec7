"""What samples, errors and log lines come to."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from sm120tune.problem import MoEProblem
from sm120tune.reference import ErrorMeasure
from sm120tune.verify.messages import REPEATS, ROUNDS, Answer, Request, Side
from sm120tune.verify.verdict import TOLERANCE, Expected, Word, judge

RIGHT = ErrorMeasure(0.004, 0.005, 0)
ROWS = {1: {"BLOCK_SIZE_M": 16}}
UP, DOWN = Path("/d/configs/triton_3_8_0/E.json"), Path("/d/configs/triton_3_8_0/E_down.json")
EXPECTED = Expected("bf16", UP, DOWN, ROWS, ROWS)
SAID = tuple(f"Using MoE kernel config from {path}." for path in (UP, DOWN))
NOISE = (0.0, 0.002, -0.002, 0.001, -0.001)


def side(*levels: float, **changes: object) -> Side:
    """Return a side with the same level in all repeats, or one for each."""
    levels = levels * REPEATS if len(levels) == 1 else levels
    repeats = tuple(tuple(us * (1 + NOISE[i % 5]) for i in range(ROUNDS)) for us in levels)
    return replace(Side(repeats, RIGHT, SAID, ROWS, ROWS), **changes)  # type: ignore[arg-type]


def verdict(with_pair: Side, without: Side | None = None) -> Word:
    return judge(Answer(8, without or side(100.0), with_pair), EXPECTED).word


@pytest.mark.parametrize(
    ("levels", "word"),
    [
        ((90.0,), Word.FASTER),
        ((99.5,), Word.SAME),
        ((100.0,), Word.SAME),
        # Beyond noise, but within the whole call's tolerance.
        ((101.5,), Word.SAME),
        ((103.0,), Word.SLOWER),
        # Not in every repeat: one bad repeat is the machine's.
        ((99.0, 110.0, 110.0), Word.SAME),
        ((103.0, 110.0, 104.0), Word.SLOWER),
    ],
)
def test_slower_takes_three_repeats_and_more_than_the_tolerance(levels: tuple[float, ...], word: Word) -> None:
    assert pytest.approx(0.02) == TOLERANCE
    assert verdict(side(*levels)) is word


@pytest.mark.parametrize(
    "error", [ErrorMeasure(0.2, 0.3, 0), ErrorMeasure(0.004, 0.5, 0), ErrorMeasure(math.inf, math.inf, 3), None]
)
def test_a_wrong_result_is_never_fast(error: ErrorMeasure | None) -> None:
    assert verdict(side(50.0, error=error)) is Word.WRONG


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"said": SAID[:1]}, "log does not name"),
        ({"said": ("Using default MoE kernel config.",)}, "log does not name"),
        ({"down_rows": None}, "built-in default instead of E_down.json"),
        ({"up_rows": {1: {"BLOCK_SIZE_M": 32}}}, "other rows than those of E.json"),
    ],
)
def test_not_loaded(changes: dict[str, object], words: str) -> None:
    found = judge(Answer(8, side(100.0), side(50.0, **changes)), EXPECTED)
    assert (found.word, found.loaded, found.holds) == (Word.NOT_LOADED, False, False)
    assert words in found.note


def test_a_fallback_folder_is_loaded_too() -> None:
    """SGLang's line on a file of another Triton names it as well."""
    said = tuple(line.replace("Using", "Fallback to triton version 3.8.0 and use") + " Slow!" for line in SAID)
    found = judge(Answer(8, side(100.0), side(50.0, said=said)), EXPECTED)
    assert (found.word, found.loaded) == (Word.FASTER, True)
    assert "another Triton's folder" in found.note


def test_failures() -> None:
    failing = Side(said=SAID, failure="OutOfResources: shared memory")
    assert verdict(failing) is Word.FAILED
    found = judge(Answer(8, failing, side(100.0)), EXPECTED)
    assert (found.word, found.without_us, found.ratio) == (Word.FASTER, None, None)
    assert "OutOfResources" in found.note


def test_messages_survive_the_pipe() -> None:
    problem = MoEProblem(8, 64, 64, 2, 8)
    request = Request("/s", None, problem, "uniform", (1, 64), 3, 2, "/without", None)
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request
    answer = Answer(8, Side(failure="x"), side(100.0, error=ErrorMeasure(math.inf, math.inf, 1)))
    assert Answer.from_json(json.loads(json.dumps(answer.to_json()))) == answer
