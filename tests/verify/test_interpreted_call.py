"""Every quantization through SGLang's real fused_moe of three releases, in Triton's interpreter.

Its files are looked up, its asserts on shapes and scales hold, and its result is that of the reference.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import triton
from made_pairs import CARD, Maker
from wheels import Trees

from sm120tune.accuracy import is_correct
from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.verify.messages import Answer, Request

PROGRAM = Path(__file__).with_name("interpreted_call.py")
RELEASES = ("0.5.8.post1", "0.5.10", "0.5.12", "0.5.15", "0.5.18", "0.5.23")
M = 5


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


pytestmark = pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 4),
    reason="this Triton's interpreter does not work with NumPy 2.4 or newer",
)


def layer(dtype: str, **how: Any) -> MoEProblem:
    return MoEProblem(3, 64, 128, 2, router_experts=3, dtype=dtype, **how)


LAYERS = {
    "fp16": layer("fp16"),
    "fp16, no gate": layer("fp16", gated=False),
    "fp8, one scale": layer("fp8_w8a8"),
    "fp8 channels": layer("fp8_w8a8", per_channel_quant=True),
    "fp8 blocks": layer("fp8_w8a8", block_shape=(32, 32)),
    "int8 channels": layer("int8_w8a8", per_channel_quant=True),
    "int8 blocks": layer("int8_w8a8", block_shape=(64, 32)),
    "int8 weights": layer("int8_w8a16"),
    "int8 groups": layer("int8_w8a16", block_shape=(0, 32)),
    "int8 groups, zero points": layer("int8_w8a16", block_shape=(0, 32), zero_points=True),
    "int4 groups": layer("int4_w4a16", block_shape=(0, 32)),
    "int4 groups, zero points": layer("int4_w4a16", block_shape=(0, 32), zero_points=True),
}
WRONG = {
    "scales of the next expert": LAYERS["fp8, one scale"],
    "zero points off by one": LAYERS["int4 groups, zero points"],
    "scales of two dimensions": LAYERS["int8 groups"],
    "codes that are cut off": LAYERS["int8 channels"],
}
TILES = TilePair(Tile(16, 32, 32, 1), Tile(16, 64, 32, 3))


@pytest.fixture(scope="module")
def answers(sglang_trees: Trees, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers by case of one release, all of them from one process."""

    @functools.cache
    def of(release: str) -> dict[str, Answer]:
        site = sglang_trees[release]
        cases: dict[str, tuple[MoEProblem, str]] = {name: (problem, "") for name, problem in LAYERS.items()}
        if release == RELEASES[-1]:
            cases |= {what: (problem, what) for what, problem in WRONG.items()}
        written = []
        for name, (problem, wrong) in cases.items():
            folder = tmp_path_factory.mktemp("folder")
            Maker(site, folder).write({M: TILES}, problem=problem)
            (folder / "measured" / "none" / "configs").mkdir(parents=True)
            request = Request(
                package=str(site), preload=None, problem=problem, routing="uniform", batch_sizes=(M,), seed=5,
                copies=1, without=str(folder / "measured" / "none"), with_pair=str(folder / "measured"), rounds=1,
            )  # fmt: skip
            written.append({"request": request.to_json(), "wrong": wrong, "name": name})
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(site), CARD],
            input=json.dumps(written),
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout)
        return {name: Answer.from_json(answer) for name, (answer,) in zip(cases, found, strict=True)}

    return of


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("release", RELEASES)
def test_sglangs_call_gives_what_the_reference_gives(answers: Any, release: str, name: str) -> None:
    answer: Answer = answers(release)[name]
    for side in (answer.without, answer.with_pair):
        assert side.failure == ""
        assert side.error is not None
        assert is_correct(side.error, LAYERS[name].dtype)
        # Where no code can round the other way, fp16's own rounding is all there is.
        if not LAYERS[name].dtype.endswith("w8a8"):
            assert side.error.relative < 0.002
    assert answer.without.up_rows is None
    # The very file names that SGLang asks for are those that the pair is written under.
    assert answer.with_pair.up_rows == {M: TILES.gate_up.to_row()}
    assert answer.with_pair.down_rows == {M: TILES.down.to_row()}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_passed_wrongly_is_seen(answers: Any, what: str) -> None:
    side = answers(RELEASES[-1])[what].with_pair
    if what == "scales of two dimensions":
        assert "AssertionError" in side.failure
    else:
        assert math.isfinite(side.error.relative)
        assert not is_correct(side.error, WRONG[what].dtype)
