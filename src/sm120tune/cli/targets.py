"""What one run tunes: the layers that the options or a job file name."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from sm120tune.cli.layer import experts_and_inter
from sm120tune.cli.model import check_force, check_no_numbers, check_served_here, model_lines, require_tunable
from sm120tune.cli.options import integers, scale_shape
from sm120tune.errors import UserError
from sm120tune.measure.table import Table, read_table
from sm120tune.models import load_model
from sm120tune.problem import MoEProblem

DEFAULT_HIDDEN = 6144
DEFAULT_TOPK = 8


@dataclass(frozen=True)
class Target:
    """One layer to tune, and what a person should know about how it was derived."""

    problem: MoEProblem
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerOptions:
    """Where layers come from: the options of the command line, or one ``[[job]]`` of a file."""

    model: str | None = None
    force: bool = False
    experts: int | None = None
    tp: tuple[int, ...] = (1,)
    ep: int = 1
    inter: int | None = None
    hidden: int | None = None
    topk: int | None = None
    dtype: str = "bf16"
    block_shape: str | None = None
    per_channel: bool = False
    group_size: int | None = None
    zero_points: bool = False
    no_gate: bool = False
    shared_experts: int = 0

    def targets(self) -> list[Target]:
        """Return one layer for each tp; raises UserError for what no server could run."""
        check_force(self.model, force=self.force)
        if self.model is not None:
            model = load_model(self.model)
            check_served_here(model, force=self.force)
            require_tunable(model)
            return [Target(model.problem(tp=tp, ep=self.ep), tuple(model_lines(model))) for tp in self.tp]
        experts, inter = experts_and_inter(self.experts, self.inter)
        problems = [
            MoEProblem.from_parallelism(
                experts=experts,
                tp=tp,
                ep=self.ep,
                inter=inter,
                hidden=self.hidden if self.hidden is not None else DEFAULT_HIDDEN,
                topk=self.topk if self.topk is not None else DEFAULT_TOPK,
                dtype=self.dtype,
                shared_experts=self.shared_experts,
                block_shape=scale_shape(self.block_shape, self.group_size),
                per_channel_quant=self.per_channel,
                zero_points=self.zero_points,
                gated=not self.no_gate,
            )
            for tp in self.tp
        ]
        return [Target(problem, tuple(self._assumptions(problem))) for problem in problems]

    def _assumptions(self, problem: MoEProblem) -> list[str]:
        """Return which defaults stand for figures that were not given."""
        lines = []
        if self.hidden is None:
            lines.append(f"assumed: --hidden {DEFAULT_HIDDEN} (GLM-5's); give your model's hidden_size if it differs")
        if self.topk is None:
            lines.append(
                f"assumed: --topk {DEFAULT_TOPK} (GLM-5's); give your model's num_experts_per_tok if it differs"
            )
        if self.ep == 1 and not problem.shared_experts:
            lines.append(
                "hint: models whose shared expert SGLang fuses under plain TP (GLM-5, DeepSeek-V3) ask for "
                f"E={problem.experts + 1}; --shared-experts 1 makes that file"
            )
        return lines


def replay_table(timer: str | None, *brought: str) -> Table | None:
    """Return the recorded table that ``--timer replay:FILE`` names, None for another timer.

    ``brought`` are options that it brings beside the numbers of the layer. Raises UserError for one of them, and for a
    file that is no table.
    """
    kind, _, file = (timer or "").partition(":")
    if kind != "replay":
        return None
    if not file:
        raise UserError("--timer replay needs a file: --timer replay:bench/tables/….parquet")
    check_no_numbers("--timer replay:FILE", *brought)
    return read_table(Path(file))


def parse_tp(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Read ``8`` or ``1,2,4,8``; raises UserError for anything else."""
    sizes = integers("--tp", value, "8 or 1,2,4,8")
    if len(set(sizes)) != len(sizes):
        raise UserError(f"--tp {value} has a size twice")
    return sizes


_KINDS: tuple[tuple[type, str, frozenset[str]], ...] = (
    (str, "a string", frozenset({"model", "dtype", "block_shape"})),
    (bool, "true or false", frozenset({"force", "per_channel", "zero_points", "no_gate"})),
    (int, "an integer", frozenset({"experts", "ep", "inter", "hidden", "topk", "group_size", "shared_experts"})),
)
"""What a key of a job file may hold; ``tp`` is an integer or a list of them."""


def read_jobs(path: Path) -> list[Target]:
    """Read a TOML file with one ``[[job]]`` table for each layer, its keys the options of the command line.

    ``tp`` may be a list. Raises UserError that names the table and the key or the value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--jobs {path} cannot be read: {error}") from None
    # TOMLDecodeError, and what an integer of thousands of digits or brackets without end raise.
    except (ValueError, RecursionError) as error:
        raise UserError(f"--jobs {path} is no TOML that can be read: {error}") from None
    tables = content.get("job")
    whole = set(content) == {"job"} and isinstance(tables, list) and tables
    if not whole or not all(isinstance(table, dict) for table in tables or ()):
        raise UserError(f"--jobs {path} needs one [[job]] table for each layer, and nothing beside them")
    targets: list[Target] = []
    for number, table in enumerate(tables or (), 1):
        where = f"--jobs {path}, job {number}"
        layer = _layer(table, where)
        try:
            targets += layer.targets()
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return targets


def _layer(table: dict[str, Any], where: str) -> LayerOptions:
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        kind = next(((type_, words) for type_, words, names in _KINDS if name in names), None)
        if name in values:
            raise UserError(f"{where}: {key!r} is given twice, with dashes and with underscores; drop one of the two")
        if name == "tp":
            values[name] = _sizes(value, f"{where}: {key}")
        elif kind is None:
            known = ", ".join(entry.name for entry in fields(LayerOptions))
            raise UserError(f"{where}: unknown key {key!r}; known: {known}")
        elif type(value) is not kind[0]:
            raise UserError(f"{where}: {key} must be {kind[1]}, not {value!r}")
        else:
            values[name] = value
    brought = sorted(set(values) - {"model", "force", "tp", "ep"})
    if "model" in values and brought:
        raise UserError(f"{where}: model brings its own {brought[0]}; drop one of the two")
    return LayerOptions(**values)


def _sizes(value: object, what: str) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [value]
    if not sizes or any(type(size) is not int for size in sizes):
        raise UserError(f"{what} must be an integer or a list of integers, not {value!r}")
    if len(set(sizes)) != len(sizes):
        raise UserError(f"{what} has a size twice: {value}")
    return tuple(sizes)
