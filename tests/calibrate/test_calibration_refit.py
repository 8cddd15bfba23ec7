"""Times of a file that another formula was fitted to: they are fitted again, and give what was measured now gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_cards import CLASS, TRUTH, calibration_of, make_calibration_job, with_constants

from sm120tune.calibrate.applied import calibrated
from sm120tune.calibrate.assess import assess, usable_launches
from sm120tune.calibrate.choice import choose_tiles
from sm120tune.calibrate.file import Calibration, CalibrationFile, read_file
from sm120tune.calibrate.launches import Layer
from sm120tune.calibrate.refit import fit_again, made, start_of, usable_calibration
from sm120tune.calibrate.timed import Checked, GemmResult, TimedTile
from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.errors import UserError
from sm120tune.measure.cost_constants import (
    CalibratedSpec,
    fitted_class,
    formula_version,
    model_version,
    named_class,
    version_for,
)
from sm120tune.measure.model import estimate_gemm, facts_without_compiling
from sm120tune.measure.occupancy import StoredFacts
from sm120tune.measure.results import Measured, What
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile

CARD = find_device(DEFAULT_DEVICE_NAME)
ON_A_GPU = Path(__file__).parents[1] / "data" / "calibration_h200_cost_1.json"
SIZES = (1, 64, 4096)


@pytest.fixture(scope="module")
def fresh(sglang_0_5_23: Path) -> Calibration:
    """What ``calibrate`` makes of 30 tiles of the made-up card."""
    job = make_calibration_job(sglang_0_5_23, sizes=SIZES)
    card, rng = with_constants(job.device, TRUTH), np.random.default_rng(0)
    origin = replace(calibration_of(CARD).origin, problem=job.problem)

    def result(tile: Tile, m: int, gemm: Gemm) -> GemmResult:
        stored = facts_without_compiling(tile, job.problem, CARD)
        facts = StoredFacts(stored.shared_bytes, stored.registers, stored.spill_bytes)
        us = estimate_gemm(job.problem, gemm, tile, m, card, facts, UNIFORM).us * float(np.exp(rng.normal(0, 0.03)))
        return GemmResult(facts, Measured(float(f"{us:.6g}"), 0.1, 9, What(gemm.value)))

    times = tuple(
        TimedTile(one.tile, m, {gemm: result(one.tile, m, gemm) for gemm in Gemm}, Checked(True, 0.004))
        for one in choose_tiles(job, CLASS)
        for m in SIZES
    )
    layer = Layer(job.problem, job.device, job.routing)
    return made(origin, times, assess(times, layer, CLASS), CLASS)


def older(found: Calibration, change: Callable[[dict[str, Any]], Any] = lambda _data: None) -> dict[str, Any]:
    """Return the file as an earlier formula left it: other constants, other margins, the same times."""
    data: dict[str, Any] = json.loads(found.dumps())
    constants = data["model"]["constants"]
    data["model"] |= {"formula": "cost-0", "start_version": "cost-0.12345678", "margins": [[1, 0.5]], "quality": None}
    data["model"]["constants"] = {"launch_us": constants["launch_us"] * 3, "of_another_formula": 1.0}
    change(data)
    return data


def as_file(data: dict[str, Any], named: str = "it") -> CalibrationFile:
    return CalibrationFile.from_json(data, named)


def test_an_older_file_gives_what_its_times_give_now(fresh: Calibration) -> None:
    lines: list[str] = []
    found = usable_calibration(as_file(older(fresh)), lines.append)
    assert found == fresh
    assert found.digest == fresh.digest
    assert found.model.refitted
    assert (found.model.formula, found.model.start_version) == (formula_version(), model_version())
    assert found.origin == fresh.origin
    assert lines == [
        "it was made by formula cost-0: its 180 times were fitted again by this release's "
        f"{formula_version()}; calibrate --from-times writes that"
    ]


def test_a_file_of_this_formula_is_taken_as_it_is(fresh: Calibration) -> None:
    data = json.loads(fresh.dumps())
    data["model"]["constants"]["load_us"] *= 1.5
    lines: list[str] = []
    found = usable_calibration(as_file(data), lines.append)
    assert found.model.constants.load_us == pytest.approx(1.5 * fresh.model.constants.load_us)
    assert not lines


def test_other_times_are_another_model(fresh: Calibration) -> None:
    def slower(data: dict[str, Any]) -> None:
        for one in data["times"][:30]:
            one["down"]["us"] *= 1.2

    found = usable_calibration(as_file(older(fresh, slower)), str)
    assert found.digest != fresh.digest
    assert found.model.constants != fresh.model.constants


def test_a_card_is_estimated_with_it(fresh: Calibration, tmp_path: Path) -> None:
    lines: list[str] = []
    for name, data in (("old.json", older(fresh)), ("new.json", json.loads(fresh.dumps()))):
        (tmp_path / name).write_text(json.dumps(data))
    old, new = (calibrated(CARD, str(tmp_path / name), lines.append) for name in ("old.json", "new.json"))
    assert isinstance(old, CalibratedSpec)
    assert version_for(old) == version_for(new) == f"{model_version()}+calibrated.{fresh.digest}"
    assert fitted_class(old) == fitted_class(new)
    assert len(lines) == 1
    assert lines[0].startswith(f"--calibration {tmp_path / 'old.json'} was made by formula cost-0")


def test_a_foreign_card_is_refused_before_anything_is_fitted(fresh: Calibration, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps(older(fresh)))
    lines: list[str] = []
    with pytest.raises(UserError, match="not of NVIDIA GeForce RTX 5090"):
        calibrated(find_device("NVIDIA GeForce RTX 5090"), str(tmp_path / "old.json"), lines.append)
    assert not lines


def test_what_was_measured_on_a_gpu_with_an_earlier_formula() -> None:
    """A file of formula cost-1 as one NVIDIA H200 left it: this release's constants of it fit its times."""
    lines: list[str] = []
    card = calibrated(find_device("NVIDIA H200"), str(ON_A_GPU), lines.append)
    assert len(lines) == 1
    assert "was made by formula cost-1: its 240 times were fitted again" in lines[0]
    file = read_file(ON_A_GPU, "it")
    launches, us = usable_launches(file.times, Layer(file.origin.problem, card, UNIFORM))
    start, mine = named_class("sm120"), fitted_class(card)
    before, after = (
        np.abs(launches.us(one.constants, one.correction) / us - 1) for one in (start_of(file), fitted_class(card))
    )
    assert start_of(file) == start
    assert np.median(before) > 0.15
    assert np.median(after) < 0.1
    assert np.mean(after <= mine.margin(64, "bf16")) > 0.9
    with pytest.raises(UserError, match="calibrate --from-times fits its times again"):
        file.calibration()


def test_times_of_a_file_with_a_damaged_model_are_good(fresh: Calibration) -> None:
    def damage(data: dict[str, Any]) -> None:
        data["model"] |= {"formula": formula_version(), "constants": {"load_us": 1e30}}

    file = as_file(older(fresh, damage))
    with pytest.raises(UserError, match="calibrate --from-times fits its times again"):
        usable_calibration(file, str)
    found, assessment = fit_again(file, start_of(file))
    assert found == fresh
    assert assessment.overall is not None


def many_tokens_and_experts(data: dict[str, Any]) -> None:
    """Make the most of both that a file may hold, which is more than can be drawn."""
    data["origin"]["problem"].update(router_experts=2**11)
    data["times"][4].update(m=2**20)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(times=data["times"][:27]), "times of fewer than 10 tiles, too few to fit"),
        (lambda data: data.update(times=[]), "times of fewer than 10 tiles, too few to fit"),
        (lambda data: data["origin"].update(routing="odd"), "'odd' is unknown"),
        (lambda data: data["times"][3]["down"].update(facts=[10**7, 64, 0]), "times[3].down.facts do not fit"),
        (lambda data: data["times"][3]["down"].update(facts=[64, 10**6, 0]), "(registers)"),
        (lambda data: data["times"][4]["gate_up"].update(us=1e300), "times[4].gate_up.us is 1e+300, which no launch"),
        (many_tokens_and_experts, "M=1048576 tokens"),
        (lambda data: data["model"].update(start="sm70"), "with --from-class sm90 or sm120"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(
    fresh: Calibration, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        usable_calibration(as_file(older(fresh, change), "mine.json"), str)
    assert str(caught.value).startswith("mine.json ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
