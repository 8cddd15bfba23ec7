from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sm120tune import provenance as prov
from sm120tune.errors import UserError
from sm120tune.failures import FailureKind
from sm120tune.problem import MoEProblem
from sm120tune.provenance import FileProvenance, RowProvenance, RowStatus, merge, merge_conflict
from sm120tune.tiles import Tile, TilePair

UP = Tile(16, 64, 128, 1, 4, 4)
DOWN = Tile(16, 128, 64, 8, 8, 3, USE_TMA=True)
PROBLEM = MoEProblem(experts=256, intermediate=256, hidden=6144, topk=8, router_experts=256)


def row(m: int = 64, **changes: Any) -> RowProvenance:
    values = RowProvenance(
        m=m, status=RowStatus.TUNED, today=TilePair.same(UP), chosen=TilePair(UP, DOWN), today_us=120.5,
        today_spread_us=0.7, chosen_us=100.25, chosen_spread_us=0.5, ratio=0.832, ratio_interval=(0.82, 0.84),
        roofline_share=0.61, bound="bandwidth", timer="cuda", measured=True, what="chain", repetitions=200,
        routing="uniform", error=0.0031, date="2026-05-01T12:00:00+00:00", note="",
    )  # fmt: skip
    return dataclasses.replace(values, **changes)


def file(**changes: Any) -> FileProvenance:
    values = FileProvenance(
        tool_version="0.1.0", kind="measured", problem=PROBLEM,
        device={"name": "NVIDIA GB10", "capability": [12, 1], "driver": "580.1"},
        versions={"torch": "2.11.0", "triton": "3.6.0", "sglang": "0.5.15"}, kernel_source_hash="abc",
        search={"budget": 40, "seed": 0}, failures={FailureKind.SHARED_MEMORY.value: 3}, rows=(row(1), row(64)),
    )  # fmt: skip
    return dataclasses.replace(values, **changes)


def test_layers_of_one_file_have_one_name() -> None:
    hidden = dataclasses.replace(PROBLEM, hidden=4096)
    shared = file(shared_with=(hidden,))
    assert FileProvenance.from_json(json.loads(json.dumps(shared.to_json()))) == shared
    with pytest.raises(ValueError, match=r"shared_with\[1\].intermediate is 512, problem.intermediate is 256"):
        file(shared_with=(hidden, dataclasses.replace(PROBLEM, intermediate=512)))


EMPTY_ROW = row(
    8, status=RowStatus.KEPT, today=None, today_us=None, today_spread_us=None, chosen_us=None, chosen_spread_us=None,
    ratio=None, ratio_interval=None, roofline_share=None, bound="compute", timer="model", measured=False, error=None,
    note="nothing beat it",
)  # fmt: skip


@pytest.mark.parametrize("value", [row(), EMPTY_ROW], ids=["full", "empty"])
def test_a_row_survives_json(value: Any) -> None:
    data = json.loads(json.dumps(value.to_json()))
    assert RowProvenance.from_json(data) == value


def test_pairs_are_rows_as_sglang_has_them() -> None:
    data = row().to_json()
    assert data["chosen"] == {"gate_up": UP.to_row(), "down": DOWN.to_row()}
    assert data["status"] == "tuned"
    assert EMPTY_ROW.to_json()["today"] is None


def test_a_file_survives_json_with_rows_in_order() -> None:
    groups = dataclasses.replace(PROBLEM, dtype="int4_w4a16", block_shape=(0, 128), zero_points=True)
    problem = dataclasses.replace(groups, shared_experts=1)
    value = file(problem=problem, rows=(row(64), EMPTY_ROW, row(1)))
    again = prov.loads(value.dumps())
    assert [item.m for item in again.rows] == [1, 8, 64]
    assert again == dataclasses.replace(value, rows=(row(1), EMPTY_ROW, row(64)))


def test_weights_that_no_kernel_runs_are_damage_not_an_argument() -> None:
    text = file(problem=dataclasses.replace(PROBLEM, dtype="int4_w4a16")).dumps()
    with pytest.raises(ValueError, match="problem is none that could be tuned"):
        prov.loads(text)


def test_the_text_is_plain_json_without_nan() -> None:
    assert file().dumps().endswith("}\n")
    with pytest.raises(ValueError, match="not JSON compliant"):
        file(rows=(row(1, chosen_us=float("nan")),)).dumps()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: row(bound="memory"), "bound"),
        (lambda: row(timer="gpu"), "timer"),
        (lambda: file(kind="guessed"), "kind"),
        (lambda: file(rows=(row(1), row(1))), "M=1 twice"),
        (lambda: file(schema_version=2), "schema_version"),
    ],
)
def test_a_word_outside_its_set_is_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


DELETE = object()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("schema_version",), 2, "schema_version is 2; this release reads 1"),
        (("schema_version",), DELETE, "schema_version is missing"),
        (("kind",), "guessed", "kind must be one of measured"),
        (("surprise",), 1, "surprise is not a known field"),
        (("problem",), [], "problem must be a JSON object"),
        (("problem", "hidden"), DELETE, "problem.hidden is missing"),
        (("problem", "hidden"), "6144", "problem.hidden must be an integer"),
        (("problem", "hidden"), 0, "problem.hidden must be an integer from 1 to 1,048,576, not 0"),
        (("problem", "experts"), 0, "problem.experts must be an integer from 1"),
        (("problem", "intermediate"), 10**30, "problem.intermediate must be an integer from 1"),
        (("problem", "topk"), 257, "problem.topk 257 less 0 shared_experts must be at least 1 and at most"),
        (("problem", "shared_experts"), 8, "problem.topk 8 less 8 shared_experts must be at least 1"),
        (("problem", "experts"), 300, "problem.experts 300 less 0 shared_experts must be at least 1 and at most"),
        (("problem", "block_shape"), [10**30, 128], "problem.block_shape must be two integers up to"),
        (("rows", 0, "chosen_us"), 10**400, "rows[0].chosen_us must be a finite number"),
        (("rows", 0, "ratio_interval"), [0.9, 10**400], "rows[0].ratio_interval.1 must be a finite number"),
        (("rows", 0, "repetitions"), 10**30, "rows[0].repetitions must be an integer of at least 0 and below 2**63"),
        (("rows", 0, "chosen", "down", "num_stages"), 10**30, "num_stages must be a positive integer below 2**31"),
        (("problem", "colour"), 1, "problem.colour"),
        (("problem", "block_shape"), [128], "problem.block_shape"),
        (("problem", "zero_points"), 1, "problem.zero_points must be true or false"),
        (("device", "name"), None, "device.name"),
        (("versions", "triton"), DELETE, "versions.triton is missing"),
        (("versions", "torch"), 2, "versions.torch must be a text"),
        (("failures", "shared_memory"), -1, "failures.shared_memory"),
        (("rows",), {}, "rows must be a list"),
        (("rows", 1), "x", "rows[1] must be a JSON object"),
        (("rows", 1, "m"), 0, "rows[1].m must be an integer of at least 1"),
        (("rows", 1, "m"), 1, "M=1 twice"),
        (("rows", 0, "status"), "better", "rows[0].status must be one of tuned, kept"),
        (("rows", 0, "measured"), 1, "rows[0].measured must be true or false"),
        (("rows", 0, "ratio"), "0.9", "rows[0].ratio must be a finite number"),
        (("rows", 0, "ratio_interval"), [0.9], "rows[0].ratio_interval must be two numbers"),
        (("rows", 0, "ratio_interval"), [0.9, None], "rows[0].ratio_interval"),
        (("rows", 0, "chosen"), None, "rows[0].chosen must be a JSON object"),
        (("rows", 0, "chosen", "down"), DELETE, "rows[0].chosen.down is missing"),
        (("rows", 0, "chosen", "down", "BLOCK_SIZE_M"), 32, "rows[0].chosen: a pair shares BLOCK_SIZE_M"),
        (("rows", 0, "chosen", "down", "num_warps"), "4", "rows[0].chosen: num_warps"),
        (("rows", 0, "today", "side"), {}, "rows[0].today.side is not a known field"),
        (("rows", 0, "error"), DELETE, "rows[0].error is missing"),
        (("rows", 0, "extra"), 1, "rows[0].extra is not a known field"),
    ],
)  # fmt: skip
def test_damage_names_the_file_and_the_field(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, named: str
) -> None:
    data = copy.deepcopy(file().to_json())
    target: Any = data
    for step in path[:-1]:
        target = target[step]
    if value is DELETE:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    where = tmp_path / "x.json"
    where.write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        prov.load(where)
    assert named in str(caught.value)
    assert str(where) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load(tmp_path: Path) -> None:
    where = tmp_path / "x.json"
    where.write_text(file().dumps())
    assert prov.load(where) == file()
    for text in (file().dumps()[:-30], "", "[1]", '{"rows": NaN}'):
        where.write_text(text)
        with pytest.raises(UserError, match=str(where)):
            prov.load(where)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=str(missing)):
            prov.load(missing)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"problem": dataclasses.replace(PROBLEM, hidden=2048)}, "problem.hidden is 6144 there and 2048 here"),
        ({"problem": dataclasses.replace(PROBLEM, topk=9)}, "problem.topk is 8 there and 9 here"),
        ({"problem": dataclasses.replace(PROBLEM, router_experts=512)}, "problem.router_experts is 256 there"),
        ({"problem": dataclasses.replace(PROBLEM, dtype="fp16")}, "problem.dtype is bf16 there and fp16 here"),
        ({"problem": dataclasses.replace(PROBLEM, shared_experts=1)}, "problem.shared_experts"),
        (
            {"problem": dataclasses.replace(PROBLEM, zero_points=True)},
            "problem.zero_points is False there and True here",
        ),
        ({"device": {**file().device, "name": "NVIDIA H200"}}, "device is NVIDIA GB10 there and NVIDIA H200 here"),
        ({"versions": {**file().versions, "triton": "3.8.0"}}, "Triton version is 3.6.0 there and 3.8.0 here"),
        ({"kernel_source_hash": "def"}, "kernel_source_hash is abc there and def here"),
        ({"rows": (row(2, routing="skewed"),)}, "routing is uniform there and skewed here"),
        ({"kind": "replayed"}, "kind is measured there and replayed here"),
        (
            {"kind": "estimated", "problem": dataclasses.replace(PROBLEM, hidden=2048)},
            "problem.hidden is 6144 there and 2048 here",
        ),
        ({"device": {**file().device, "driver": "590.2"}}, None),
        ({"versions": {**file().versions, "torch": "2.12", "sglang": "0.5.16"}}, None),
        ({"search": {"budget": 80}, "rows": (row(2), row(4))}, None),
        ({"rows": ()}, None),
    ],
)
def test_merge_conflict_names_the_first_difference(changes: dict[str, Any], line: str | None) -> None:
    conflict = merge_conflict(file(), file(**changes))
    if line is None:
        assert conflict is None
    else:
        assert conflict is not None
        assert conflict.startswith(line)


def test_zero_points_there_and_none_here_are_a_conflict_too() -> None:
    """Layers with and without zero points share a file name and run different binaries."""
    groups = dataclasses.replace(PROBLEM, dtype="int4_w4a16", block_shape=(0, 128))
    zeros = dataclasses.replace(groups, zero_points=True)
    assert merge_conflict(file(problem=zeros), file(problem=zeros)) is None
    assert (
        merge_conflict(file(problem=zeros), file(problem=groups)) == "problem.zero_points is True there and False here"
    )
    shorter = dataclasses.replace(groups, block_shape=(0, 64))
    assert merge_conflict(file(problem=groups), file(problem=shorter)) == (
        "problem.block_shape is [0, 128] there and [0, 64] here"
    )


def test_merging_keeps_old_rows_and_lets_new_ones_win() -> None:
    newer = row(64, chosen_us=90.0)
    merged = merge(file(), file(rows=(row(128), newer), failures={"timeout": 1, "shared_memory": 2}))
    assert merged.rows == (row(1), newer, row(128))
    assert merged.failures == {"shared_memory": 5, "timeout": 1}


def test_replacing_every_row_leaves_nothing_of_the_old_run() -> None:
    new = file(failures={"timeout": 1}, rows=(row(1), row(64), row(128)))
    assert merge(file(), new) == new


def test_a_surviving_row_says_what_it_ran_on() -> None:
    new = file(rows=(row(2),), device={**file().device, "driver": "590.2"})
    merged = merge(file(rows=(row(1, note="odd"),)), new)
    assert [item.m for item in merged.rows] == [1, 2]
    note = merged.rows[0].note
    assert note.startswith("odd; earlier run: driver 580.1, ")
    assert "torch 2.11.0" in note
    assert merged.rows[1].note == ""
    assert merged.device["driver"] == "590.2"
    # A second merge must not put a wrong driver on the same row.
    again = merge(merged, file(rows=(row(4),), device={**file().device, "driver": "600.3"}))
    assert again.rows[0].note == note
    assert "driver 590.2" in again.rows[1].note
