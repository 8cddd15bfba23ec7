"""The calibration file: one JSON object with everything that was measured and the constants that came of it.

docs/calibrate.md lists the fields. Nothing in it names a machine or a person.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sm120tune._jsonfile import Fields, read_object
from sm120tune.calibrate.fitted import Model
from sm120tune.calibrate.timed import TimedTile
from sm120tune.devices import DeviceSpec
from sm120tune.errors import UserError
from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile

SCHEMA_VERSION = 1
_KIND = "sm120tune calibration"
_DIGEST = 8


@dataclass(frozen=True)
class Origin:
    """Where the times come from."""

    tool_version: str
    date: str
    timer: str
    """``cuda``, or ``replay`` for a rehearsal on a recorded table."""
    device: DeviceSpec
    driver: str
    clocks: Mapping[str, float] | None
    """What nvidia-smi said in the midst of the work; None where it did not."""
    versions: Mapping[str, str]
    kernel_source_hash: str
    problem: MoEProblem
    routing: str
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back."""
        device = asdict(self.device)
        return {
            **{entry.name: getattr(self, entry.name) for entry in fields(self)},
            "device": {**device, "capability": list(self.device.capability)},
            "clocks": None if self.clocks is None else dict(self.clocks),
            "versions": dict(self.versions),
            "problem": self.problem.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> Origin:
        """Rebuild it; raises ValueError naming the field."""
        file = Fields(data, "origin.")
        clocks = None
        if file.take("clocks") is not None:
            given = file.mapping("clocks")
            clocks = {key: Fields(given, "origin.clocks.").number(key) for key in given}
        versions = file.mapping("versions")
        result = cls(
            tool_version=file.text("tool_version"),
            date=file.text("date"),
            timer=file.text("timer"),
            device=DeviceSpec.from_json(file.mapping("device")),
            driver=file.text("driver"),
            clocks=clocks,
            versions={key: Fields(versions, "origin.versions.").text(key) for key in versions},
            kernel_source_hash=file.text("kernel_source_hash"),
            problem=MoEProblem.from_json(file.take("problem"), "origin.problem."),
            routing=file.text("routing"),
            seed=file.integer("seed"),
        )
        file.finish()
        return result


@dataclass(frozen=True)
class Calibration:
    """A whole file."""

    origin: Origin
    model: Model
    quality: Mapping[str, Any] | None
    """Before and after, over all M and for each; None where too few tiles could be timed to fit anything."""
    times: tuple[TimedTile, ...]

    @property
    def digest(self) -> str:
        """What tells these estimates from others: it changes with the times and with what was fitted to them."""
        model = {key: value for key, value in self.model.to_json().items() if key not in {"left", "refitted"}}
        content = {"model": model, "times": [one.to_json() for one in self.times]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGEST]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :func:`read_file` reads back."""
        return {
            "kind": _KIND,
            "schema_version": SCHEMA_VERSION,
            "origin": self.origin.to_json(),
            "model": self.model.to_json(),
            "quality": None if self.quality is None else dict(self.quality),
            "times": [one.to_json() for one in self.times],
        }

    def dumps(self) -> str:
        """Render with one line for each tile and M, so that the file stays short and two can be compared."""
        document = self.to_json()
        times = ",\n".join(f"  {json.dumps(one, allow_nan=False)}" for one in document.pop("times"))
        head = json.dumps(document, indent=1, allow_nan=False)
        return f'{head[:-2]},\n "times": [\n{times}\n ]\n}}\n'


@dataclass(frozen=True)
class CalibrationFile:
    """A file whose times were read; its model may be of another formula, or damaged."""

    named: str
    """As messages call it."""
    origin: Origin
    times: tuple[TimedTile, ...]
    formula: str
    start: str
    """The class that its fit began with; it need not be one of this release's."""
    quality: Mapping[str, Any] | None
    model: object
    """As it stands in the file."""

    def calibration(self) -> Calibration:
        """Return it with the model of the file; raises UserError for one of another formula and a damaged one."""
        try:
            return Calibration(self.origin, Model.from_json(self.model), self.quality, self.times)
        except ValueError as error:
            raise unusable(self.named, f"{error}; calibrate --from-times fits its times again") from None

    @classmethod
    def from_json(cls, data: object, named: str) -> CalibrationFile:
        """Read everything but the model; raises ValueError naming the field."""
        file = Fields(data)
        if not file.has("kind") or file.take("kind") != _KIND:
            raise ValueError(f'it has no "kind": "{_KIND}"')
        if (schema := file.integer("schema_version")) != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {schema}; this release reads {SCHEMA_VERSION}")
        model = Fields(file.take("model"), "model.")
        result = cls(
            named=named,
            origin=Origin.from_json(file.take("origin")),
            times=tuple(TimedTile.from_json(one, f"times[{index}].") for index, one in enumerate(file.items("times"))),
            formula=model.text("formula"),
            start=model.text("start"),
            quality=None if file.take("quality") is None else file.mapping("quality"),
            model=file.take("model"),
        )
        file.finish()
        _check_no_repeats(result.times)
        return result


def _check_no_repeats(times: Sequence[TimedTile]) -> None:
    """Raise ValueError for two entries of one tile and M: which of them holds cannot be told."""
    seen: dict[tuple[Tile, int], int] = {}
    for index, one in enumerate(times):
        first = seen.setdefault((one.tile, one.m), index)
        if first != index:
            raise ValueError(
                f"times[{index}] is of tile {one.tile} at M={one.m}, as times[{first}] is; drop one of them"
            )


def read_file(path: Path, named: str) -> CalibrationFile:
    """Read a file; raises UserError that calls it ``named``, says what is wrong with it and what to do."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{named} is a symbolic link to nowhere ({path.readlink()})")
    # A pipe would be waited for, a device read without end.
    if path.exists() and not path.is_file():
        raise UserError(f"{named} is {'a folder' if path.is_dir() else 'no regular file'}; give a calibration's file")
    try:
        return CalibrationFile.from_json(read_object(path), named)
    except OSError as error:
        raise UserError(f"{named} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError) as error:
        raise unusable(named, error) from None


def unusable(named: str, why: object) -> UserError:
    """Return the error of a file that cannot be used."""
    return UserError(f"{named} is no calibration that can be used: {why}")
