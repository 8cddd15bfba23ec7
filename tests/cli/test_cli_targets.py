from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from sm120tune.cli.targets import LayerOptions, Target, read_jobs
from sm120tune.errors import UserError


def jobs(folder: Path, text: str) -> list[Target]:
    path = folder / "jobs.toml"
    path.write_text(text)
    return read_jobs(path)


def test_every_option_of_a_layer_can_stand_in_a_file(tmp_path: Path) -> None:
    text = """
    [[job]]
    experts = 64
    tp = [1, 2]
    ep = 1
    inter = 512
    hidden = 1024
    topk = 4
    dtype = "int4_w4a16"
    group-size = 64
    zero-points = true
    shared_experts = 1
    per-channel = false
    [[job]]
    model = "GLM-5"
    force = false
    tp = 8
    [[job]]
    experts = 8
    inter = 1024
    block-shape = "128,128"
    dtype = "fp8_w8a8"
    no-gate = true
    """
    targets = [target.problem for target in jobs(tmp_path, text)]
    assert [(one.experts, one.intermediate, one.topk, one.hidden) for one in targets] == [
        (65, 512, 5, 1024), (65, 256, 5, 1024), (257, 256, 9, 6144), (8, 1024, 8, 6144),
    ]  # fmt: skip
    assert [one.block_shape for one in targets] == [(0, 64), (0, 64), None, (128, 128)]
    assert [one.zero_points for one in targets] == [True, True, False, False]
    assert [one.gated for one in targets] == [True, True, True, False]
    keys = {line.split("=")[0].strip().replace("-", "_") for line in text.splitlines() if "=" in line}
    assert keys == {entry.name for entry in fields(LayerOptions)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs one"),
        ("[job]\nexperts = 8", "needs one"),
        ("extra = 1\n[[job]]\nexperts = 8", "needs one"),
        ("[[job]\n", "is no TOML"),
        ("[[job]]\nexpert = 8", "job 1: unknown key 'expert'"),
        ("[[job]]\nexperts = 8\ninter = 64\n[[job]]\nexperts = '8'", "job 2: experts must be an integer, not '8'"),
        ("[[job]]\nexperts = true", "experts must be an integer, not True"),
        ("[[job]]\ntp = []", "tp must be an integer or a list"),
        ("[[job]]\ntp = [1, '2']", "tp must be an integer or a list"),
        ("[[job]]\nper_channel = 1", "per_channel must be true or false, not 1"),
        ("[[job]]\nmodel = 'GLM-5'\nhidden = 5", "model brings its own hidden"),
    ],
)
def test_a_mistake_names_the_job_and_the_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match="--jobs ") as caught:
        jobs(tmp_path, text)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_jobs(tmp_path / "none.toml")
