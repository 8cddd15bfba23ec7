"""SGLang's real kernels on quantized operands, in Triton's interpreter, against the reference of the same storage.

What they compute in fp16 here is bf16 on a GPU; the codes, scales and zero points are the same.
"""

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

from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile

PROGRAM = Path(__file__).with_name("interpreted_quantized.py")
RELEASES = ("0.5.8.post1", "0.5.15", "0.5.23")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


pytestmark = pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 4),
    reason="this Triton's interpreter does not work with NumPy 2.4 or newer",
)


def problem(dtype: str, inter: int = 64, hidden: int = 128, **how: Any) -> MoEProblem:
    return MoEProblem(3, inter, hidden, 2, router_experts=3, dtype=dtype, **how)


# Two groups or blocks and more along both K, and for blocks along both N.
UP, DOWN = Tile(16, 32, 32, 1), Tile(16, 64, 16, 3)
TENSOR = problem("fp8_w8a8")
CHANNEL = problem("fp8_w8a8", per_channel_quant=True)
BLOCK = problem("fp8_w8a8", block_shape=(32, 32))
INT8 = problem("int8_w8a8", per_channel_quant=True)
INT8_BLOCK = problem("int8_w8a8", block_shape=(64, 32))
PLAIN_INT8 = problem("int8_w8a16")
ZEROS8 = problem("int8_w8a16", block_shape=(0, 32), zero_points=True)
INT4 = problem("int4_w4a16", block_shape=(0, 32))
ZEROS4 = problem("int4_w4a16", block_shape=(0, 32), zero_points=True)

Case = tuple[MoEProblem, Tile, Tile]
CASES: dict[str, Case] = {
    "fp8, one scale": (TENSOR, UP, DOWN),
    "fp8, one scale, odd sizes": (problem("fp8_w8a8", 24, 40), UP, DOWN),
    "fp8 channels": (CHANNEL, UP, DOWN),
    "fp8 channels, odd sizes": (problem("fp8_w8a8", 24, 40, per_channel_quant=True), UP, DOWN),
    "fp8 blocks, tiles as wide": (BLOCK, Tile(16, 32, 32, 1), Tile(16, 32, 32, 1)),
    "fp8 blocks, wider tiles": (BLOCK, Tile(16, 64, 32, 1), Tile(16, 128, 16, 1)),
    "fp8 blocks, narrower tiles": (BLOCK, Tile(16, 16, 16, 1), Tile(32, 16, 32, 2).with_block_m(16)),
    "int8 channels": (INT8, UP, DOWN),
    "int8 blocks": (INT8_BLOCK, UP, DOWN),
    "int8 weights": (PLAIN_INT8, UP, DOWN),
    "int8 weights, odd sizes": (problem("int8_w8a16", 24, 40), UP, DOWN),
    "int8 groups": (problem("int8_w8a16", block_shape=(0, 32)), UP, DOWN),
    "int8 groups, zero points": (ZEROS8, UP, DOWN),
    "int4 groups": (INT4, UP, DOWN),
    "int4 groups, tiles over two groups": (INT4, Tile(16, 32, 64, 1), Tile(16, 32, 64, 1)),
    "int4 groups, zero points": (ZEROS4, UP, DOWN),
    "int4 groups, zero points, tiles over two groups": (ZEROS4, Tile(16, 16, 128, 1), Tile(16, 32, 64, 1)),
}

WRONG: dict[str, tuple[MoEProblem, str]] = {
    "fp8, one scale, of another expert": (TENSOR, "scales of the next expert"),
    "fp8 channels, of a neighbour": (CHANNEL, "scales of the neighbour along N"),
    "fp8 channels, of another token": (CHANNEL, "scales of the next token"),
    "fp8 blocks, of a neighbour along K": (BLOCK, "scales of the neighbour along K"),
    "fp8 blocks, of a neighbour along N": (BLOCK, "scales of the neighbour along N"),
    "int8 channels, of a neighbour": (INT8, "scales of the neighbour along N"),
    "int8 blocks, of another token": (INT8_BLOCK, "scales of the next token"),
    "int8 weights, of a neighbour": (PLAIN_INT8, "scales of the neighbour along N"),
    "int8 groups, of a neighbour": (ZEROS8, "scales of the neighbour along K"),
    "int8 groups, another zero": (ZEROS8, "zero points off by one"),
    "int4 groups, of a neighbour": (INT4, "scales of the neighbour along K"),
    "int4 groups, order in a byte": (INT4, "halves of a byte swapped"),
    "int4 groups, another zero": (ZEROS4, "zero points off by one"),
    "int4 groups, zero of a neighbour": (ZEROS4, "zero points of the neighbour along N"),
}
"""What no launcher should do, each on the gate and up weights alone."""

TOO_WIDE = (BLOCK, Tile(16, 32, 64, 1), DOWN)
"""A step over two blocks of K, for which SGLang's kernel loads one scale."""


def as_json(case: Case, **more: Any) -> dict[str, Any]:
    layer, up, down = case
    return {"problem": layer.to_json(), "m": 5, "tiles": [up.to_row(), down.to_row()], **more}


@pytest.fixture(scope="module")
def results(sglang_trees: Trees) -> Any:
    """Results by case of one release, all of them from one process."""

    @functools.cache
    def of(release: str) -> dict[str, dict[str, Any]]:
        cases = {name: as_json(case) for name, case in CASES.items()}
        if release == RELEASES[-1]:
            cases |= {name: as_json((layer, UP, DOWN), wrong=what) for name, (layer, what) in WRONG.items()}
            cases["too wide"] = as_json(TOO_WIDE)
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(sglang_trees[release])],
            input=json.dumps(list(cases.values())),
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
def test_a_quantized_layer_is_right(results: Any, release: str, case: str) -> None:
    result = results(release)[case]
    assert result["nan_rows"] == 0
    assert result["norm"] > 1
    assert result["correct"], result
    # Where no code can round the other way, fp16's own rounding is all there is.
    if "a16" in CASES[case][0].dtype:
        assert result["relative"] < 0.002
    # But for a tie that falls the other way.
    assert result["same_codes"] > 0.99


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_seen(results: Any, wrong: str) -> None:
    result = results(RELEASES[-1])[wrong]
    assert result["nan_rows"] == 0
    assert not result["correct"]


def test_a_step_over_two_blocks_is_wrong(results: Any) -> None:
    assert not results(RELEASES[-1])["too wide"]["correct"]
