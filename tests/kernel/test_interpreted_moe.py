"""SGLang's real kernels, in Triton's interpreter, over our own alignment and bindings, against the torch reference."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import triton
from wheels import Trees

from sm120tune.accuracy import error_bound
from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile

PROGRAM = Path(__file__).with_name("interpreted_moe.py")
RELEASES = ("0.5.8.post1", "0.5.15", "0.5.23")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


pytestmark = pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 4),
    reason="this Triton's interpreter does not work with NumPy 2.4 or newer",
)


def problem(experts: int, inter: int, hidden: int, topk: int, **more: Any) -> MoEProblem:
    routed = experts - more.get("shared_experts", 0)
    return MoEProblem(experts, inter, hidden, topk, **{"router_experts": routed, "dtype": "fp16", **more})


ODD = problem(5, 24, 40, 2)
EVEN = problem(5, 32, 64, 2)
SHARED = problem(6, 24, 40, 3, shared_experts=1)
GATELESS = problem(5, 24, 40, 2, gated=False)
PARALLEL = problem(4, 24, 40, 3, router_experts=12)

# K is 40 and 24, N is 48 and 40: no block of these divides any of them.
UP, DOWN = Tile(16, 32, 32, 1), Tile(16, 64, 16, 3)

Case = tuple[MoEProblem, int, Tile, Tile, dict[str, Any]]
CASES: dict[str, Case] = {
    "odd sizes": (ODD, 7, UP, DOWN, {}),
    "even sizes": (EVEN, 7, Tile(16, 32, 32, 1), Tile(16, 16, 16, 3), {}),
    "no gate": (GATELESS, 7, UP, DOWN, {}),
    "no gate, sorted intermediate": (GATELESS, 7, UP, DOWN, {"sorted": True}),
    "one block is all": (ODD, 7, Tile(16, 64, 64, 1), Tile(16, 64, 32, 1), {}),
    "one token": (problem(9, 24, 40, 3), 1, UP, DOWN, {}),
    "one token, one expert": (problem(1, 24, 40, 1), 1, UP, DOWN, {}),
    "one choice": (problem(5, 24, 40, 1), 9, UP, DOWN, {}),
    "experts without tokens": (problem(6, 24, 40, 2), 4, UP, DOWN, {"ids": [[4, 1], [1, 4], [4, 1], [1, 4]]}),
    "one expert takes all": (problem(3, 24, 40, 1), 37, UP, DOWN, {"ids": [[1]] * 37}),
    "a shared expert in every list": (SHARED, 11, UP, DOWN, {}),
    "groups of two blocks": (problem(3, 24, 40, 2), 30, Tile(16, 16, 32, 2), Tile(16, 16, 16, 2), {}),
    "groups of more than all blocks": (ODD, 7, Tile(16, 16, 32, 64), Tile(16, 16, 16, 64), {}),
    "blocks of 32": (ODD, 20, Tile(32, 16, 64, 4), Tile(32, 32, 16, 1), {}),
    "blocks of 64": (ODD, 20, Tile(64, 32, 16, 1), Tile(64, 16, 32, 8), {}),
    "expert parallel": (PARALLEL, 8, UP, DOWN, {}),
    "expert parallel, a token without local experts": (
        PARALLEL,
        3,
        UP,
        DOWN,
        {"ids": [[-1, 2, 0], [-1, -1, -1], [1, -1, 2]]},
    ),
    "expert parallel, nothing for this rank": (PARALLEL, 2, UP, DOWN, {"ids": [[-1, -1, -1]] * 2}),
    "nonsense past the rows in use": (ODD, 7, UP, DOWN, {"garbage": True}),
    "nonsense past the rows in use, expert parallel": (PARALLEL, 8, UP, DOWN, {"garbage": True}),
    "sorted intermediate": (ODD, 7, UP, DOWN, {"sorted": True}),
    "sorted intermediate, one token": (problem(9, 24, 40, 3), 1, UP, DOWN, {"sorted": True}),
    "more columns than the activation's block": (problem(2, 520, 32, 1), 3, Tile(16, 256, 32, 1), DOWN, {}),
}

WRONG = (
    "experts shifted",
    "aligned for larger blocks",
    "gate and up swapped",
    "down weights of the next expert",
    "router weights reversed",
    "one row lost",
    "one row of a wrong expert",
)
"""What no launcher should do, each with the odd sizes."""


def as_json(case: Case) -> dict[str, Any]:
    layer, m, up, down, more = case
    return {"problem": layer.to_json(), "m": m, "tiles": [up.to_row(), down.to_row()], **more}


@pytest.fixture(scope="module")
def results(sglang_trees: Trees) -> Any:
    """Results by case of one release, all of them from one process."""

    @functools.cache
    def of(release: str) -> dict[str, dict[str, Any]]:
        layer, m, up, down, _ = CASES["odd sizes"]
        cases = {**CASES, **{wrong: (layer, m, up, down, {"wrong": wrong}) for wrong in WRONG}}
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(sglang_trees[release])],
            input=json.dumps([as_json(case) for case in cases.values()]),
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(zip(cases, json.loads(done.stdout), strict=True))

    return of


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("release", RELEASES)
def test_the_chain_is_right(results: Any, release: str, case: str) -> None:
    result = results(release)[case]
    assert result["nan_rows"] == 0
    relative, worst_row = error_bound("fp16")
    assert result["relative"] < relative
    assert result["worst_row"] < worst_row
    assert result["correct"]
    if "nothing for this rank" in case:
        # All of it is zeros that the kernel wrote.
        assert (result["norm"], result["relative"]) == (0, 0)
    else:
        assert result["norm"] > 1
    # The buffer is always for the worst case, the blocks past the rows in use return at once.
    assert 0 < result["used_blocks"] <= result["blocks"]


@pytest.mark.parametrize("case", ["odd sizes", "experts without tokens", "one expert takes all"])
def test_cases_have_unused_blocks(results: Any, case: str) -> None:
    result = results("0.5.23")[case]
    assert result["used_blocks"] < result["blocks"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("release", RELEASES)
def test_what_is_wrong_is_seen(results: Any, release: str, wrong: str) -> None:
    result = results(release)[wrong]
    assert not result["correct"]
    if wrong == "one row lost":
        assert result["nan_rows"] == 1
    else:
        assert result["relative"] > 20 * error_bound("fp16")[0]
