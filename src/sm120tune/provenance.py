"""Where each row of a written ladder came from, and when two ladders may be merged.

A file's key (its name and its Triton folder) says less than the problem it was tuned for: hidden, topk, bf16 or fp16,
the kernel source and the routing are not in it. This is the record that does say it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm120tune._jsonfile import Fields, dump_object, parse_object
from sm120tune._row_provenance import BOUNDS, TIMERS, RowProvenance, RowStatus, check_word
from sm120tune.errors import UserError
from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile

__all__ = [
    "BOUNDS",
    "KINDS",
    "SCHEMA_VERSION",
    "TIMERS",
    "UNKNOWN_ROUTING",
    "UNKNOWN_SOURCE",
    "FileProvenance",
    "RowProvenance",
    "RowStatus",
    "load",
    "loads",
    "merge",
    "merge_conflict",
]

SCHEMA_VERSION = 1

KINDS = ("measured", "estimated", "replayed", "converted")
"""What a whole file is made of: a GPU's times, a model's, a recorded table's, or rows of another file, untimed."""

UNKNOWN_SOURCE = "unknown"
"""``kernel_source_hash`` of a pair that came from a file which does not tell."""

UNKNOWN_ROUTING = "unknown"
"""``routing`` of a converted row."""


@dataclass(frozen=True)
class FileProvenance:
    """A whole ladder; raises ValueError for an unknown kind or schema, or an M given twice."""

    tool_version: str
    kind: str
    """One of KINDS; also the folder the ladder is written to."""
    problem: MoEProblem
    device: Mapping[str, Any]
    """``name``, ``capability`` and ``driver``."""
    versions: Mapping[str, str]
    """``torch``, ``triton`` and ``sglang``."""
    kernel_source_hash: str
    search: Mapping[str, Any]
    failures: Mapping[str, int]
    """Candidates lost, by the value of their FailureKind."""
    rows: tuple[RowProvenance, ...] = ()
    shared_with: tuple[MoEProblem, ...] = ()
    """Further layers that ask for this file, and for which its rows were chosen too."""
    schema_version: int = SCHEMA_VERSION

    @property
    def problems(self) -> tuple[MoEProblem, ...]:
        """Every layer that the rows were chosen for."""
        return (self.problem, *self.shared_with)

    def __post_init__(self) -> None:
        check_word("kind", self.kind, KINDS)
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {self.schema_version}; this release reads {SCHEMA_VERSION}")
        twice = [m for m, count in Counter(row.m for row in self.rows).items() if count > 1]
        if twice:
            raise ValueError(f"rows has M={twice[0]} twice")
        for index, other in enumerate(self.shared_with):
            for field in ("experts", "intermediate", "dtype"):
                mine, theirs = getattr(self.problem, field), getattr(other, field)
                if mine != theirs:
                    raise ValueError(
                        f"shared_with[{index}].{field} is {theirs}, problem.{field} is {mine}: they ask for other files"
                    )

    def tiles(self, *, down: bool) -> dict[int, Tile]:
        """Return the rows that the up or the down file of this ladder has."""
        return {row.m: row.chosen.down if down else row.chosen.gate_up for row in self.rows}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :meth:`from_json` reads back; rows in ascending order of M."""
        return {
            "schema_version": self.schema_version,
            "tool_version": self.tool_version,
            "kind": self.kind,
            "problem": self.problem.to_json(),
            **({"shared_with": [other.to_json() for other in self.shared_with]} if self.shared_with else {}),
            "device": dict(self.device),
            "versions": dict(self.versions),
            "kernel_source_hash": self.kernel_source_hash,
            "search": dict(self.search),
            "failures": dict(self.failures),
            "rows": [row.to_json() for row in sorted(self.rows, key=lambda row: row.m)],
        }

    @classmethod
    def from_json(cls, data: object) -> FileProvenance:
        """Rebuild a file's provenance; raises ValueError naming the field."""
        file = Fields(data)
        # First, so that a newer file is told as such and not as an unknown field.
        schema_version = file.integer("schema_version", least=1)
        if schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {schema_version}; this release reads {SCHEMA_VERSION}")
        device = file.mapping("device")
        Fields(device, "device.").text("name")
        versions = file.mapping("versions")
        for key in versions:
            Fields(versions, "versions.").text(key)
        Fields(versions, "versions.").text("triton")
        failures = file.mapping("failures")
        result = cls(
            schema_version=schema_version,
            tool_version=file.text("tool_version"),
            kind=file.text("kind"),
            problem=MoEProblem.from_json(file.take("problem")),
            shared_with=_shared_from_json(file),
            device=device,
            versions=versions,
            kernel_source_hash=file.text("kernel_source_hash"),
            search=file.mapping("search"),
            failures={key: Fields(failures, "failures.").integer(key) for key in failures},
            rows=tuple(RowProvenance.from_json(row, f"rows[{index}].") for index, row in enumerate(file.items("rows"))),
        )
        file.finish()
        return result

    def dumps(self) -> str:
        """Render as the text of a provenance file; raises ValueError for NaN or infinity."""
        return dump_object(self.to_json())


def loads(text: str) -> FileProvenance:
    """Parse the text of a provenance file; raises ValueError saying what is damaged."""
    return FileProvenance.from_json(parse_object(text))


def load(path: Path) -> FileProvenance:
    """Read a provenance file; raises UserError naming the file and what is damaged."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; restore it, or write the ladder again with --replace") from None


def merge_conflict(old: FileProvenance, new: FileProvenance, routing: str | None = None) -> str | None:
    """Name in one line the first thing in which two ladders differ so that their rows must not mix, or None.

    ``routing`` stands for that of rows which ``new`` does not have yet.
    """
    before, after = old.problem.to_json(), new.problem.to_json()
    # What only some layers have is written for those alone.
    usual = {"gated": True}
    pairs = [
        (f"problem.{key}", before.get(key, usual.get(key, False)), after.get(key, usual.get(key, False)))
        for key in {**before, **after}
    ]
    pairs.append(("the list of layers that share it", _layers(old), _layers(new)))
    pairs.append(("device", old.device.get("name"), new.device.get("name")))
    pairs.append(("Triton version", old.versions.get("triton"), new.versions.get("triton")))
    pairs.append(("kernel_source_hash", old.kernel_source_hash, new.kernel_source_hash))
    if old.rows and (new.rows or routing):
        pairs.append(("routing", _routings(old), routing or _routings(new)))
    pairs.append(("kind", old.kind, new.kind))
    for name, there, here in pairs:
        if there != here:
            return f"{name} is {there} there and {here} here"
    return None


def merge(old: FileProvenance, new: FileProvenance, superseded: frozenset[int] = frozenset()) -> FileProvenance:
    """Return ``new`` with those rows of ``old`` that it does not have.

    A new row that was only filled in (never timed) gives way to an old one. Nothing is lost: a surviving row notes
    the driver and versions of its own run where they differ from the new run's, and failures add up unless ``new``
    replaces every old row. ``superseded`` are the M whose old rows go even where ``new`` has none: it was found that
    they need no key. Call :func:`merge_conflict` first.
    """
    there = {row.m for row in old.rows}
    fresh = [row for row in new.rows if row.repetitions or row.m not in there]
    replaced = {row.m for row in fresh} | superseded
    kept = [row for row in old.rows if row.m not in replaced]
    if not kept:
        return new
    own = _run(old)
    if own != _run(new):
        kept = [row if "earlier run" in row.note else replace(row, note=_add_note(row.note, own)) for row in kept]
    rows = sorted([*kept, *fresh], key=lambda row: row.m)
    return replace(new, rows=tuple(rows), failures=dict(Counter(old.failures) + Counter(new.failures)))


def _run(file: FileProvenance) -> str:
    versions = ", ".join(f"{name} {file.versions[name]}" for name in sorted(file.versions))
    model = f", model {file.search['model']}" if "model" in file.search else ""
    return f"earlier run: driver {file.device.get('driver')}, {versions}, sm120tune {file.tool_version}{model}"


def _add_note(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more


def _layers(file: FileProvenance) -> str:
    return "; ".join(map(str, file.problems))


def _routings(file: FileProvenance) -> str:
    return ", ".join(sorted({row.routing for row in file.rows}))


def _shared_from_json(file: Fields) -> tuple[MoEProblem, ...]:
    others = file.items("shared_with") if file.has("shared_with") else []
    return tuple(MoEProblem.from_json(other, f"shared_with[{index}].") for index, other in enumerate(others))
