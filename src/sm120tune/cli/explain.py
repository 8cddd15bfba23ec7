"""``explain``: what the cost model and the compiler say of a config file's row."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from sm120tune import provenance
from sm120tune._jsonfile import read_object
from sm120tune.binaries import Asked, Binaries
from sm120tune.calibrate.applied import calibrated
from sm120tune.check.names import ConfigName, parse_name
from sm120tune.check.resources import Resources
from sm120tune.cli.machine_code import code_lines
from sm120tune.cli.options import calibration_option, given_or, scale_shape, sglang_if_there
from sm120tune.convert.sources import record_of
from sm120tune.devices import find_device
from sm120tune.errors import UserError
from sm120tune.explain import Explained
from sm120tune.measure.cost_constants import version_for
from sm120tune.measure.routing import ROUTING_CHOICES, parse_routing
from sm120tune.problem import Gemm, MoEProblem, check_size
from sm120tune.quantization import DTYPES
from sm120tune.search.ladder import nearest
from sm120tune.tiles import Tile
from sm120tune.upstream import SGLangTree


@dataclass(frozen=True)
class _Options:
    config: Path
    m: int
    hidden: int | None
    topk: int | None
    group_size: int | None
    zero_points: bool
    device: str | None
    calibration: str | None
    routing: str
    sglang: Path | None
    no_compile: bool
    as_json: bool


@click.command("explain", context_settings={"show_default": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--batch-size", "m", type=int, required=True, help="M: tokens of one forward pass.")
@click.option("--hidden", type=int, help="Hidden size.  [default: the provenance's; no file name holds it]")
@click.option("--topk", type=int, help="Experts per token.  [default: the provenance's; no file name holds it]")
@click.option("--group-size", type=int, help="Group of int4 and grouped int8 weights, which no file name holds.")
@click.option("--zero-points", is_flag=True, help="The groups have zero points (AWQ, asymmetric GPTQ).")
@click.option("--device", help="Another card than the file's.  [default: the file's]")
@calibration_option
@click.option("--routing", default="uniform", help=f"{ROUTING_CHOICES}.")
@click.option(
    "--sglang",
    type=click.Path(path_type=Path),
    help="SGLang checkout or site-packages whose kernel is compiled.  [default: the importable one]",
)
@click.option("--no-compile", is_flag=True, help="Take recorded or guessed registers; say nothing of machine code.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def explain_command(**options: Any) -> int:
    """Say why the rows that SGLang would use at M take as long as the cost model expects; nothing is measured."""
    return _explain(_Options(**options))


def _explain(options: _Options) -> int:
    config, m = options.config, options.m
    name = parse_name(config.name)
    if name is None:
        raise UserError(f"{config} is no name of an SGLang config file")
    check_size("--batch-size", m)
    up_path = config.with_name(name.partner()) if name.down else config
    down_path = config if name.down else config.with_name(name.partner())
    problem = _problem(options, name, up_path)
    card = calibrated(find_device(options.device or name.device), options.calibration, _tell)
    how = parse_routing(options.routing)
    up = _row(up_path, m)
    down = (_row(down_path, m) if down_path.exists() else up).with_block_m(up.BLOCK_SIZE_M)
    tree = None if options.no_compile else _tree(options.sglang)
    # One tile's answer decides which is asked for next.
    resources = Resources(tree, workers=1)
    binaries = None if tree is None else Binaries(tree, resources, problem, m, card, down.USE_TMA)
    told: dict[str, None] = {}
    asked = Asked(problem, m, card, how, binaries, lambda line: told.setdefault(line))
    try:
        found = {gemm: asked.row_and_best(gemm, tile) for gemm, tile in ((Gemm.GATE_UP, up), (Gemm.DOWN, down))}
    finally:
        resources.stop()
    for line in told:
        _tell(line)
    if options.as_json:
        document = {gemm.value: {"row": row.to_json(), "best": best.to_json()} for gemm, (row, best) in found.items()}
        compiled = None if binaries is None else binaries.versions
        head = {
            "model": version_for(card),
            "card": card.name,
            "m": m,
            "problem": problem.to_json(),
            "compiled": compiled,
        }
        print(json.dumps({**head, **document}, indent=1))
        return 0
    print(f"{problem}, M={m}, routing {how}, {card.name}: ESTIMATES of model {version_for(card)}, nothing was measured")
    if binaries is not None:
        print("compiled with " + ", ".join(f"{name} {version}" for name, version in binaries.versions.items()))
    for gemm, (row, best) in found.items():
        print(f"{gemm}: {row.us / best.us:.2f} times the model's best with BLOCK_SIZE_M {row.tile.BLOCK_SIZE_M}")
        for line in (*_lines("row", row), *_lines("best", best)):
            print(f"  {line}")
    return 0


def _problem(options: _Options, name: ConfigName, up_path: Path) -> MoEProblem:
    """Return the layer of the provenance, else the one that the name and the options say."""
    shape = scale_shape(None, options.group_size)
    for option, value in (("--hidden", options.hidden), ("--topk", options.topk)):
        if value is not None:
            check_size(option, value)
    record = record_of(up_path)
    if record is not None:
        known = provenance.load(record).problem
        if shape is not None or options.zero_points:
            raise UserError(f"--group-size and --zero-points are in the provenance of {up_path.name}; leave them out")
        most = known.router_experts + known.shared_experts
        if options.topk is not None and not known.shared_experts < options.topk <= most:
            raise UserError(f"--topk {options.topk} cannot be of {known}, the layer of {up_path.name}; leave it out")
        return replace(known, hidden=given_or(options.hidden, known.hidden), topk=given_or(options.topk, known.topk))
    named = name.problem()
    if named is None or named.dtype not in DTYPES:
        raise UserError(f"{up_path.name}: explain knows {', '.join(DTYPES)} only")
    if options.hidden is None or options.topk is None:
        missing = "--hidden" if options.hidden is None else "--topk"
        raise UserError(f"missing {missing}: no file name says it, and there is no provenance for {up_path.name}")
    return MoEProblem.from_parallelism(
        experts=name.experts, tp=1, inter=named.intermediate, hidden=options.hidden, topk=options.topk,
        dtype=named.dtype, block_shape=shape or named.block_shape, per_channel_quant=named.per_channel_quant,
        zero_points=options.zero_points,
    )  # fmt: skip


def _tree(sglang: Path | None) -> SGLangTree | None:
    tree = sglang_if_there(sglang)
    if tree is None:
        _tell("note: SGLang not found, so nothing is compiled; --sglang PATH names one")
    return tree


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _row(path: Path, m: int) -> Tile:
    """Return the row of the nearest key, the lower of two."""
    try:
        rows = {int(key): row for key, row in read_object(path).items()}
        if not rows:
            raise ValueError("it has no row")
        tile = Tile.from_row(rows[nearest(sorted(rows), m)])
        odd = [name for name, value in tile.to_row().items() if name.startswith("BLOCK") and value & (value - 1)]
        if odd:
            raise ValueError(f"{odd[0]} {getattr(tile, odd[0])} is no power of two, which Triton refuses")
        return tile
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path.name} is no SGLang config file: {error}") from None


def _lines(what: str, one: Explained) -> list[str]:
    terms = ", ".join(f"{name} {us:.1f}" for name, us in sorted(one.terms_us.items(), key=lambda term: -term[1]))
    source = {"compiler": "", "record": " (recorded)", "guess": " (guessed)"}[one.facts_from]
    return [
        f"{what:4} {one.tile}: {one.us:.1f} us, bound by {one.bound}",
        f"     alone, us: {terms}",
        f"     {one.blocks:,} blocks, {one.blocks_per_sm} an SM (limit: {one.limited_by}), {one.waves:.2f} waves, "
        f"{one.padding:.0%} of the rows are padding, at least {one.memory_bytes / 1e6:,.1f} MB of memory traffic",
        f"     {one.registers} registers{source}, {one.spill_bytes} B of stack a thread, "
        f"{one.shared_bytes:,} B of shared memory",
        *(f"     {line}" for line in code_lines(one)),
    ]
