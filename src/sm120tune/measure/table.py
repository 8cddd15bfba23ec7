"""Recorded tables: every tile's time on a real card, in one Parquet file that travels with its circumstances.

Columns, one row per (gemm, tile, M):

``gemm``: gate_up or down; ``m``: tokens; ``BLOCK_SIZE_M`` … ``num_stages``: the tile; ``us``: median microseconds of
one launch, cold L2 (null when it failed); ``spread_us``: half the interquartile range of the repeats;
``repetitions``: repeats behind the median; ``at_least``: timed once and far too slow, ``us`` is a lower bound;
``repeat_us``: a second, independent median (null where there is none); ``failure``, ``message``: why it failed;
``shared_bytes``, ``registers``, ``spill_bytes``: of the binary.

The file's metadata has one key, ``sm120tune``: a JSON object with the problem, device, versions, kernel source hash,
routing, seed and date. Needs pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm120tune import __version__
from sm120tune._jsonfile import Fields, parse_object
from sm120tune.compiler import TileFacts
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.results import Measured
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import TILE_FIELDS, Tile

_META = b"sm120tune"
TABLE_SCHEMA = 1


@dataclass(frozen=True)
class TableRow:
    """One tile of one GEMM at one M."""

    gemm: Gemm
    tile: Tile
    m: int
    us: float | None = None
    spread_us: float | None = None
    repetitions: int = 0
    at_least: bool = False
    repeat_us: float | None = None
    failure: str | None = None
    message: str = ""
    shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None

    @property
    def key(self) -> tuple[Gemm, Tile, int]:
        """What makes the row unique."""
        return self.gemm, self.tile, self.m

    @classmethod
    def timed(cls, gemm: Gemm, tile: Tile, m: int, time: Measured, facts: TileFacts) -> TableRow:
        """Return the row of a measurement."""
        return cls(
            gemm, tile, m, time.us, time.spread_us, time.repetitions, time.stopped_early,
            shared_bytes=facts.shared_bytes, registers=facts.registers, spill_bytes=facts.spill_bytes,
        )  # fmt: skip

    @classmethod
    def failed(cls, gemm: Gemm, tile: Tile, m: int, failure: Failure, facts: TileFacts | None) -> TableRow:
        """Return the row of a candidate that could not be timed."""
        row = cls(gemm, tile, m, failure=failure.kind.value, message=failure.message)
        if facts is None:
            return row
        return replace(row, shared_bytes=facts.shared_bytes, registers=facts.registers, spill_bytes=facts.spill_bytes)

    def repeated(self, us: float) -> TableRow:
        """Return the row with its second measurement."""
        return replace(self, repeat_us=us)

    def to_json(self) -> dict[str, Any]:
        """Return the row with one entry per column."""
        data: dict[str, Any] = {"gemm": self.gemm.value, "m": self.m}
        data |= {name: getattr(self.tile, name) for name in TILE_FIELDS}
        data |= {name: getattr(self, name) for name in _VALUES}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TableRow:
        """Rebuild a row from its columns."""
        tile = Tile.from_row({name: data[name] for name in TILE_FIELDS})
        return cls(Gemm(data["gemm"]), tile, data["m"], **{name: data[name] for name in _VALUES})

    def outcome(self) -> TileFacts | Failure:
        """Return what compiling the tile gave."""
        if self.failure is not None:
            return Failure(FailureKind(self.failure), self.message)
        assert self.shared_bytes is not None
        assert self.registers is not None
        assert self.spill_bytes is not None
        return TileFacts(self.shared_bytes, self.registers, self.spill_bytes, self.tile.num_warps)


_VALUES = (
    "us", "spread_us", "repetitions", "at_least", "repeat_us", "failure", "message", "shared_bytes", "registers",
    "spill_bytes",
)  # fmt: skip


_COLUMNS = ("gemm", "m", *TILE_FIELDS, *_VALUES)


@dataclass(frozen=True)
class Table:
    """A whole recorded table."""

    problem: MoEProblem
    device_name: str
    routing: str
    meta: dict[str, Any]
    rows: tuple[TableRow, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every M of the table, ascending."""
        return tuple(sorted({row.m for row in self.rows}))


def write_table(path: Path, meta: Mapping[str, Any], rows: Iterable[TableRow]) -> None:
    """Write a table with its circumstances: ``problem``, ``device`` and ``routing`` at least.

    Raises UserError without pyarrow, OSError when the file cannot be written.
    """
    arrow, parquet = _pyarrow()
    schema = arrow.schema(
        [
            ("gemm", arrow.dictionary(arrow.int8(), arrow.string())),
            ("m", arrow.int32()),
            *[(name, arrow.int16()) for name in TILE_FIELDS],
            ("us", arrow.float32()),
            ("spread_us", arrow.float32()),
            ("repetitions", arrow.int16()),
            ("at_least", arrow.bool_()),
            ("repeat_us", arrow.float32()),
            ("failure", arrow.dictionary(arrow.int8(), arrow.string())),
            ("message", arrow.string()),
            ("shared_bytes", arrow.int32()),
            ("registers", arrow.int16()),
            ("spill_bytes", arrow.int32()),
        ]
    )
    ordered = sorted(rows, key=lambda row: (row.gemm, row.m, row.tile))
    meta = {"schema": TABLE_SCHEMA, "tool_version": __version__, **meta}
    table = arrow.Table.from_pylist([row.to_json() for row in ordered], schema=schema)
    parquet.write_table(table.replace_schema_metadata({_META: json.dumps(meta)}), path, compression="zstd")


def read_table(path: Path) -> Table:
    """Read a table; raises UserError without pyarrow or for a file that is none."""
    arrow, parquet = _pyarrow()
    # A pipe would be waited for.
    if path.exists() and not path.is_file():
        raise UserError(f"--timer replay:{path} is no file; give a recorded table")
    try:
        content = parquet.read_table(path)
        known = (content.schema.metadata or {}).get(_META)
        if known is None:
            raise ValueError("it does not say of which layer and card it is, as those of bench/record_table.py do")
        meta = parse_object(known.decode())
        fields = Fields(meta)
        problem = MoEProblem.from_json(fields.take("problem"))
        device, routing = fields.text("device"), fields.text("routing")
        for name in ("triton", "kernel_source_hash"):
            fields.text(name)
        missing = [name for name in _COLUMNS if name not in content.column_names]
        if missing:
            raise ValueError(f"it has no column {missing[0]}")
        rows = tuple(TableRow.from_json(row) for row in content.to_pylist())
    except FileNotFoundError:
        raise UserError(f"--timer replay:{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, arrow.ArrowException) as error:
        raise UserError(f"--timer replay:{path} is no recorded table: {error}") from error
    return Table(problem, device, routing, meta, rows)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("recorded tables need pyarrow; get it with: pip install pyarrow") from None
    return pyarrow, pyarrow.parquet
