"""What ``calibrate`` leaves: the file, a copy where it is applied, and the summary."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sm120tune._atomic import FilesError, replace_files
from sm120tune.calibrate.applied import applied_path
from sm120tune.calibrate.file import Calibration, CalibrationFile, read_file
from sm120tune.calibrate.run import Result
from sm120tune.cli import report
from sm120tune.cli.calibrated import result_json, show_result
from sm120tune.cli.options import check_folder
from sm120tune.devices import DeviceSpec
from sm120tune.errors import UserError
from sm120tune.measure.cost_constants import CardClass

EXIT_FELL_SHORT = 1


@dataclass(frozen=True)
class Wanted:
    """Where the result goes."""

    output: Path | None
    apply: bool
    as_json: bool
    began: float
    """``time.monotonic()`` when the command began."""

    def file(self, card: DeviceSpec) -> Path:
        """Return the file that was named, else one in this folder that is named after the card."""
        return self.output or Path(f"calibration-{card.file_name}.json")


def check_output(path: Path) -> CalibrationFile | None:
    """Return the calibration that would be replaced; raises UserError where the file could not be written in the end.

    A folder that is not there is one of these cases: who names one file and mistypes its folder wants to know it.
    Of a symbolic link the file that it points to is meant.
    """
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file")
    folder = _target(path).parent
    check_folder("--output", folder, writes=True)
    if not folder.exists():
        raise UserError(f"--output {path}: there is no folder {folder}; make it first, or name another file")
    if not path.exists():
        return None
    try:
        return read_file(path, f"--output {path}")
    except UserError as error:
        raise UserError(f"{error}; it is left as it is, choose another --output") from None


def finish(result: Result, start: CardClass, wanted: Wanted) -> int:
    """Write the files and show what came of it; returns the exit code."""
    fell_short = _fell_short(result)
    if wanted.apply and fell_short:
        print("warning: not applied: a calibration that fell short would make estimates worse", file=sys.stderr)
    card = result.calibration.origin.device
    applied = [applied_path(card.name)] if wanted.apply and not fell_short else []
    written = _write(result.calibration, [wanted.file(card), *applied])
    seconds = time.monotonic() - wanted.began
    if wanted.as_json:
        document = result_json(result)
        document |= {"files": [str(path) for path in written], "seconds": round(seconds, 1)}
        print(json.dumps(document, indent=4))
    else:
        show_result(report.result_console(), result, start, written, seconds)
    return EXIT_FELL_SHORT if fell_short else 0


def _target(path: Path) -> Path:
    """Return the file that is written: where a symbolic link points to, there or not yet, so that the link stays."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _write(found: Calibration, paths: list[Path]) -> list[Path]:
    content = found.dumps().encode()
    try:
        replace_files(dict.fromkeys(map(_target, paths), content))
    except FilesError as error:
        raise UserError(f"{error}; what was measured is kept, the same command writes it") from None
    return paths


def _fell_short(result: Result) -> bool:
    """Whether a layer came out wrong, or nothing could be fitted."""
    wrong = any(one.wrong for one in result.found.timed)
    return wrong or result.assessment.overall is None
