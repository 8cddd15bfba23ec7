"""With all of SGLang importable: what ``scripts/whole-sglang`` makes. Elsewhere these tests are skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_pairs import CARD, Maker
from test_interpreted_call import LAYERS, TILES, M

from sm120tune.accuracy import is_correct
from sm120tune.install import Consent, InstallOptions, find_pairs, find_place, install
from sm120tune.upstream import find_sglang
from sm120tune.verify.messages import Answer, Request

PROGRAM = Path(__file__).with_name("whole_call.py")
ONES = ("fp16", "int8 weights", "int8 groups", "int8 groups, zero points", "int4 groups", "int4 groups, zero points")
"""What needs no quantizer: SGLang's own are for a GPU, or are more than the interpreter can do."""

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not all(map(importlib.util.find_spec, ("sglang", "transformers", "tvm_ffi"))),
    reason="scripts/whole-sglang runs these",
)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(find_sglang().package.parent, tmp_path)


def test_sglang_itself_finds_what_is_installed(maker: Maker, tmp_path: Path) -> None:
    """Into a folder of its own: SGLang's tree stays as it is."""
    pair = maker.write()
    (tmp_path / "served").mkdir()
    place = find_place(None, tmp_path / "served")
    (item,) = install(find_pairs([pair.up_path]), place, InstallOptions(Consent())).pairs
    assert item.pickup is not None
    assert item.pickup.imported == "the same"


def test_sglang_itself_runs_what_it_can_here(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "none" / "configs").mkdir(parents=True)
    cases = []
    for name in ONES:
        maker.write({M: TILES}, problem=LAYERS[name])
        request = Request(
            package=str(maker.site), preload=None, problem=LAYERS[name], routing="uniform", batch_sizes=(M,), seed=5,
            copies=1, without=str(tmp_path / "none"), with_pair=str(tmp_path / "measured"), rounds=1,
        )  # fmt: skip
        cases.append({"request": request.to_json(), "wrong": ""})
    done = subprocess.run(
        [sys.executable, str(PROGRAM), CARD],
        input=json.dumps(cases),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (data,) in zip(ONES, found, strict=True):
        answer = Answer.from_json(data)
        for side in (answer.without, answer.with_pair):
            assert side.failure == ""
            assert side.error is not None
            assert is_correct(side.error, LAYERS[name].dtype)
            assert side.error.relative < 0.002
