"""The calibration file: read back as it was written, refused where it is damaged or of another card."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_cards import CLASS, TRUTH, calibration_of, make_calibration_job
from synthetic import SMALL

from sm120tune.calibrate.applied import applied_path, calibrated, with_calibration
from sm120tune.calibrate.file import Calibration, CalibrationFile, read_file
from sm120tune.devices import DEFAULT_DEVICE_NAME, DeviceSpec, find_device
from sm120tune.errors import UserError
from sm120tune.measure.cost_constants import (
    CalibratedSpec,
    MeasuredMargins,
    card_class,
    fitted_class,
    model_version,
    version_for,
)
from sm120tune.measure.model import estimate_gemm
from sm120tune.measure.model_lane import ModelLane
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile

CARD = find_device(DEFAULT_DEVICE_NAME)
OTHER = find_device("NVIDIA GeForce RTX 5090")
FOUND = calibration_of(CARD)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    path.write_text(FOUND.dumps())
    return path


def read(path: Path) -> Calibration:
    return read_file(path, "it").calibration()


def told(line: str) -> None:
    raise AssertionError(line)


def correction(**changed: float) -> dict[str, list[float]]:
    """Return a class's correction with one number changed."""
    of_class = card_class(90).correction
    assert of_class is not None
    data = of_class.to_json()
    for name, value in changed.items():
        data[name][0] = value
    return data


def changed(file: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    return file


def test_it_comes_back_as_it_was_written(file: Path) -> None:
    assert read(file) == FOUND
    assert read(file).dumps() == FOUND.dumps()
    lines = file.read_text().splitlines()
    assert sum(line.lstrip().startswith('{"tile"') for line in lines) == len(FOUND.times)


def test_a_correction_is_kept(tmp_path: Path) -> None:
    of_class = card_class(90)
    assert of_class.correction is not None
    model = replace(FOUND.model, start="sm90", constants=of_class.constants, correction=of_class.correction)
    found = replace(FOUND, model=model)
    path = tmp_path / "c.json"
    path.write_text(found.dumps())
    again = read(path).model.correction
    assert again is not None
    assert again.to_json() == of_class.correction.to_json()


def test_a_card_with_it_is_estimated_with_its_constants(file: Path) -> None:
    card = calibrated(CARD, str(file), told)
    assert isinstance(card, CalibratedSpec)
    assert fitted_class(card).constants == TRUTH
    assert fitted_class(CARD) == CLASS
    assert (card.name, card.sm_count, card.arch) == (CARD.name, CARD.sm_count, CARD.arch)
    tile = Tile(64, 64, 64, 1)
    mine, of_class = (estimate_gemm(SMALL, Gemm.DOWN, tile, 64, one, None, UNIFORM).us for one in (card, CARD))
    assert mine != pytest.approx(of_class, rel=0.05)


def test_the_version_says_so(file: Path) -> None:
    card = calibrated(CARD, str(file), told)
    assert version_for(CARD) == model_version()
    assert version_for(card) == f"{model_version()}+calibrated.{FOUND.digest}"
    # It changes with what was fitted, and with the times that it was fitted to.
    fitted = replace(FOUND, model=replace(FOUND.model, constants=replace(TRUTH, load_us=0.51)))
    others = replace(FOUND, times=FOUND.times[:1])
    assert len({FOUND.digest, fitted.digest, others.digest}) == 3


def test_estimates_of_another_model_are_another_run(file: Path, sglang_0_5_23: Path) -> None:
    job = replace(make_calibration_job(sglang_0_5_23), timer="model")
    other = replace(job, device=calibrated(CARD, str(file), told))
    assert job.identity()["answers"] == version_for(CARD)
    assert other.identity()["answers"] == version_for(other.device) != version_for(CARD)
    assert FOUND.digest in ModelLane(job.problem, other.device, UNIFORM).name


def test_measured_margins_hold_for_the_dtype_and_the_range_that_were_measured(file: Path) -> None:
    assert FOUND.model.margins == ((1, 0.2), (64, 0.05), (4096, 0.12))
    mine = fitted_class(calibrated(CARD, str(file), told))
    assert [mine.margin(m, "bf16") for m in (1, 8, 64, 512, 4096)] == [0.2, 0.2, 0.05, 0.12, 0.12]
    # Beyond, and for another dtype, it may only widen the class's.
    assert mine.margin(16384, "bf16") == max(0.12, CLASS.margin(16384))
    for m in (8, 64, 4096):
        assert mine.margin(m, "fp8_w8a8") == max(mine.margin(m, "bf16"), CLASS.margin(m))
    assert MeasuredMargins("bf16", ((8, 0.1),)).at(1) == MeasuredMargins("bf16", ((8, 0.1),)).at(99) == 0.1


def test_shares_of_other_specified_rates_are_carried_over(file: Path) -> None:
    faster = replace(CARD, bandwidth=CARD.bandwidth * 2, bf16_flops=CARD.bf16_flops / 2)
    for gemm in Gemm:
        mine, same = (
            estimate_gemm(SMALL, gemm, Tile(64, 64, 64, 1), 4096, calibrated(one, str(file), told), None, UNIFORM).us
            for one in (faster, CARD)
        )
        assert mine == pytest.approx(same)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("kind"), 'it has no "kind"'),
        (lambda data: data.update(schema_version=2), "schema_version is 2; this release reads 1"),
        (lambda data: data["model"].update(start="sm70"), "model.start must be one of sm90, sm120"),
        (lambda data: data["model"]["constants"].pop("load_us"), "model.constants.load_us is missing"),
        (lambda data: data["model"]["constants"].update(load_us=-1), "model.constants.load_us must be from 0.00"),
        (lambda data: data["model"]["constants"].update(l2_gb_s=1e30), "model.constants.l2_gb_s must be from 0."),
        (lambda data: data["model"]["constants"].update(tensor_share=1.31), "from 0.2 to 1.3, not 1.31"),
        (lambda data: data["model"]["constants"].update(call_us=1e30), "model.constants.call_us must be from 0."),
        (lambda data: data["model"]["constants"].update(load_us="x"), "model.constants.load_us must be a finite"),
        (lambda data: data["model"]["constants"].update(odd=1), "model.constants.odd is not a known field"),
        (lambda data: data["model"].update(margins=[]), "model.margins is empty"),
        (lambda data: data["model"].update(margins=[[8, 0.1], [1, 0.1]]), "model.margins must have ascending M"),
        (lambda data: data["model"].update(margins=[[8, -0.1]]), "model.margins must be pairs"),
        (lambda data: data["model"].update(margins=[[8, 1e30]]), "model.margins must be pairs"),
        (lambda data: data["model"].update(margins=[["8", 0.1]]), "model.margins must be pairs"),
        (lambda data: data["model"].update(margins=[[8, True]]), "model.margins must be pairs"),
        (lambda data: data["model"].update(margins=[[10**30, 0.1]]), "model.margins must be pairs"),
        (lambda data: data["model"].update(refitted=["odd"]), "model.refitted has 'odd'"),
        (lambda data: data["model"].update(refitted=[[]]), "model.refitted has [], which is no constant"),
        (lambda data: data["model"].update(refitted=[{"a": 1}]), "model.refitted has {'a': 1}"),
        (lambda data: data["model"]["constants"].update(load_us=10**400), "model.constants.load_us must be a finite"),
        (lambda data: data["model"].update(correction={"mean": [1], "scale": [1], "weights": [1]}), "wrong sizes"),
        (lambda data: data["model"].update(correction=correction(scale=0.0)), "scale must be above 0"),
        (lambda data: data["model"].update(correction=correction(weights=1e300)), "weights must lie within 1e+06"),
        (lambda data: data["model"].update(correction=correction(mean=10**400)), "correction.mean must be numbers"),
        (lambda data: data["origin"]["device"].update(sm_count=0), "sm_count must be an integer from 1 to 1,024"),
        (lambda data: data["origin"]["device"].update(bandwidth=1792), "bandwidth must be from 1e+10 to 1e+14"),
        (lambda data: data["origin"]["device"].update(bf16_flops=10**400), "bf16_flops must be a finite number"),
        (lambda data: data["origin"]["clocks"].update(sm_mhz=10**400), "origin.clocks.sm_mhz must be a finite number"),
        (
            lambda data: data["origin"].update(seed=2**63),
            "origin.seed must be an integer of at least 0 and below 2**63",
        ),
        (lambda data: data["origin"]["problem"].update(experts=0), "origin.problem.experts must be an integer from 1"),
        (lambda data: data["origin"]["problem"].update(hidden=0), "origin.problem.hidden must be an integer from 1"),
        (lambda data: data["origin"]["problem"].update(intermediate=10**30), "problem.intermediate must be an integer"),
        (lambda data: data["origin"]["problem"].update(topk=129), "origin.problem.topk 129 less 0 shared_experts"),
        (lambda data: data["origin"]["problem"].pop("hidden"), "problem.hidden is missing"),
        (lambda data: data["times"][0].pop("down"), "times[0].down is missing"),
        (lambda data: data["times"][1]["tile"].pop("BLOCK_SIZE_M"), "row has no BLOCK_SIZE_M"),
        (lambda data: data["times"][0]["down"].update(us=0), "times[0].down.us must be above 0"),
        (lambda data: data["times"][0]["down"].update(us=10**400), "times[0].down.us must be a finite number"),
        (lambda data: data["times"][0]["down"].update(spread_us=10**400), "times[0].down.spread_us must be a finite"),
        (lambda data: data["times"][0]["down"].update(spread_us=-1), "times[0].down.spread_us must be 0 or more"),
        (lambda data: data["times"][0]["down"].update(repetitions=10**30), "times[0].down.repetitions must be an"),
        (
            lambda data: data["times"][0]["down"].update(facts=[10**30, 64, 0]),
            "times[0].down.facts must be shared bytes",
        ),
        (lambda data: data["times"][0].update(m=2**20 + 1), "times[0].m must be an integer from 1 to 1,048,576"),
        (lambda data: data["times"][0]["tile"].update(num_warps=2**31), "num_warps must be a positive integer below"),
        (lambda data: data["times"][0]["check"].update(error=10**400), "times[0].check.error must be a finite number"),
        (
            lambda data: data["times"].append(data["times"][0]),
            "times[2] is of tile 16x64x64 g1 w4 s3 at M=64, as times[0] is; drop one of them",
        ),
        (lambda data: data.update(odd=1), "odd is not a known field"),
    ],
)
def test_damage_is_one_line_that_names_it(file: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    changed(file, change)
    with pytest.raises(UserError, match=r"--calibration .* is no calibration that can be used: ") as caught:
        calibrated(CARD, str(file), told)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", '{"kind": NaN}', "{" * 100_000, '{"a": 1, "a": 2}'])
def test_what_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match="is no calibration that can be used"):
        calibrated(CARD, str(tmp_path / "x.json"), told)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--calibration .*x\.json cannot be read: No such file"):
        calibrated(CARD, str(tmp_path / "x.json"), told)


def make_odd(path: Path, kind: str) -> str:
    """Put there what is no file; returns how it is called."""
    match kind:
        case "folder":
            path.mkdir(parents=True)
            return "is a folder"
        case "pipe":
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(path)
            return "is no regular file"
        case _:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to("nowhere")
            return "is a symbolic link to nowhere (nowhere)"


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    said = make_odd(tmp_path / "x.json", kind)
    with pytest.raises(UserError) as caught:
        calibrated(CARD, str(tmp_path / "x.json"), told)
    assert str(caught.value).startswith(f"--calibration {tmp_path / 'x.json'} {said}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_odd(applied_path(CARD.name), kind)
    with pytest.raises(UserError, match="; remove it, or calibrate again with --apply") as caught:
        calibrated(CARD, None, told)
    assert str(caught.value).startswith(f"{applied_path(CARD.name)} {said}")
    assert calibrated(CARD, "none", told) is CARD
    assert calibrated(OTHER, None, told) is OTHER


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (OTHER, f"is of {CARD.name}, not of {OTHER.name}; --calibration none"),
        (replace(CARD, capability=(12, 1)), r"with capability 12\.0, this one has 12\.1"),
        (replace(CARD, bandwidth=CARD.bandwidth / 4), "has a bandwidth of 1.*, known is 4"),
    ],
)
def test_another_card_s_is_refused(file: Path, card: DeviceSpec, words: str) -> None:
    with pytest.raises(UserError, match=words):
        calibrated(card, str(file), told)


def test_one_without_times_is_refused() -> None:
    nothing = replace(FOUND, model=replace(FOUND.model, refitted=(), margins=()), quality=None)
    with pytest.raises(UserError, match="too few times"):
        with_calibration(CARD, CalibrationFile.from_json(json.loads(nothing.dumps()), "x").calibration(), "x")


def test_an_applied_one_is_used_for_its_card_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibrated(CARD, None, told) is CARD
    assert not list(tmp_path.iterdir())
    path = applied_path(CARD.name)
    path.parent.mkdir(parents=True)
    path.write_text(FOUND.dumps())
    assert isinstance(calibrated(CARD, None, told), CalibratedSpec)
    assert isinstance(calibrated(replace(CARD, name=CARD.name.replace(" ", "_")), None, told), CalibratedSpec)
    assert calibrated(OTHER, None, told) is OTHER
    assert calibrated(CARD, "none", told) is CARD
    assert calibrated(CARD, None, told, applied=False) is CARD
    path.write_text(FOUND.dumps()[:-100])
    with pytest.raises(UserError, match="remove it, or calibrate again with --apply"):
        calibrated(CARD, None, told)
    assert calibrated(CARD, "none", told) is CARD
