"""``calibrate --from-times``: the times of a file, fitted by this release's formula; needs no GPU."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console

from sm120tune.calibrate.file import read_file
from sm120tune.calibrate.measure import Found
from sm120tune.calibrate.refit import fit_again, start_of
from sm120tune.calibrate.run import Result
from sm120tune.cli.calibrate_output import Wanted, check_output, finish
from sm120tune.errors import UserError
from sm120tune.measure.cost_constants import formula_version, named_class

_TAKEN = ("from_times", "from_class", "output", "apply", "quiet", "as_json")


def fit_from_times(path: Path, from_class: str | None, console: Console, wanted: Wanted) -> int:
    """Fit a file's times again and write them with what came of it; returns the exit code.

    Raises UserError for a file that cannot be read or has too few times, and where other times would be lost.
    """
    file = read_file(path, f"--from-times {path}")
    start = start_of(file) if from_class is None else named_class(from_class)
    if wanted.apply and file.origin.timer != "cuda":
        raise UserError("--apply with times of a replay: they were not measured; give the file with --calibration")
    output = wanted.file(file.origin.device)
    replaced = check_output(output)
    if replaced is not None and replaced.times != file.times:
        raise UserError(f"--output {output} holds other times than {path}; choose another --output")
    calibration, assessment = fit_again(file, start)
    origin = file.origin
    console.print(f"times of {path}: {origin.problem}, routing {origin.routing}, {origin.date}", markup=False)
    console.print(
        f"card: {origin.device.name} (SM{origin.device.arch}); made by formula {file.formula} from {file.start}, "
        f"fitted again by {formula_version()} from {start.name}",
        markup=False,
    )
    found = Found(file.times, 0, origin.clocks)
    return finish(Result(calibration, assessment, found), start, wanted)


def check_options(context: click.Context) -> None:
    """Raise UserError for an option that has nothing to do with times that are there."""
    for name in context.params:
        if name not in _TAKEN and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = name.replace("_", "-")
            raise UserError(f"--from-times measures nothing, its layer and card are the file's; drop --{option}")
