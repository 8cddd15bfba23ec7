"""``explain``: what the cost model says of a config file's row."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sm120tune._jsonfile import read_object
from sm120tune.calibrate.applied import calibrated
from sm120tune.check.names import parse_name
from sm120tune.cli.options import calibration_option
from sm120tune.devices import find_device
from sm120tune.errors import UserError
from sm120tune.explain import Explained, best_tile, explain
from sm120tune.measure.cost_constants import version_for
from sm120tune.measure.routing import ROUTING_CHOICES, parse_routing
from sm120tune.problem import Gemm, MoEProblem, check_batch_sizes
from sm120tune.quantization import UNQUANTIZED
from sm120tune.search.ladder import nearest
from sm120tune.tiles import Tile


@click.command("explain", context_settings={"show_default": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--batch-size", "m", type=int, required=True, help="M: tokens of one forward pass.")
@click.option("--hidden", type=int, required=True, help="Hidden size; the file does not hold it.")
@click.option("--topk", type=int, required=True, help="Experts per token; the file does not hold it.")
@click.option("--device", help="Another card than the file's.  [default: the file's]")
@calibration_option
@click.option("--routing", default="uniform", help=f"{ROUTING_CHOICES}.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def explain_command(
    config: Path,
    m: int,
    hidden: int,
    topk: int,
    device: str | None,
    calibration: str | None,
    routing: str,
    as_json: bool,
) -> int:
    """Say why the rows that SGLang would use at M take as long as the cost model expects; nothing is measured."""
    name = parse_name(config.name)
    if name is None:
        raise UserError(f"{config} is no name of an SGLang config file")
    problem = name.problem()
    if name.dtype is not None or problem is None or problem.dtype not in UNQUANTIZED:
        raise UserError(f"{config.name}: explain knows {' and '.join(UNQUANTIZED)} only")
    check_batch_sizes([m])
    problem = MoEProblem.from_parallelism(
        experts=name.experts, tp=1, inter=name.intermediate, hidden=hidden, topk=topk, dtype=problem.dtype
    )
    card, how = calibrated(find_device(device or name.device), calibration), parse_routing(routing)
    up_path = config.with_name(name.partner()) if name.down else config
    down_path = config if name.down else config.with_name(name.partner())
    up = _row(up_path, m)
    down = (_row(down_path, m) if down_path.exists() else up).with_block_m(up.BLOCK_SIZE_M)
    found: dict[Gemm, tuple[Explained, Explained]] = {}
    for gemm, tile in ((Gemm.GATE_UP, up), (Gemm.DOWN, down)):
        fastest = best_tile(problem, gemm, m, card, how, tile.BLOCK_SIZE_M)
        found[gemm] = (explain(problem, gemm, tile, m, card, how), explain(problem, gemm, fastest, m, card, how))
    if as_json:
        document = {gemm.value: {"row": row.to_json(), "best": best.to_json()} for gemm, (row, best) in found.items()}
        print(json.dumps({"model": version_for(card), "card": card.name, "m": m, **document}, indent=1))
        return 0
    print(f"{problem}, M={m}, routing {how}, {card.name}: ESTIMATES of model {version_for(card)}, nothing was measured")
    for gemm, (row, best) in found.items():
        print(f"{gemm}: {row.us / best.us:.2f} times the model's best with BLOCK_SIZE_M {row.tile.BLOCK_SIZE_M}")
        for line in (*_lines("row", row), *_lines("best", best)):
            print(f"  {line}")
    return 0


def _row(path: Path, m: int) -> Tile:
    """Return the row of the nearest key, the lower of two."""
    try:
        rows = {int(key): row for key, row in read_object(path).items()}
        if not rows:
            raise ValueError("it has no row")
        return Tile.from_row(rows[nearest(sorted(rows), m)])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path.name} is no SGLang config file: {error}") from None


def _lines(what: str, one: Explained) -> list[str]:
    terms = ", ".join(f"{name} {us:.1f}" for name, us in sorted(one.terms_us.items(), key=lambda term: -term[1]))
    guessed = " (guessed)" if one.facts_guessed else ""
    return [
        f"{what:4} {one.tile}: {one.us:.1f} us, bound by {one.bound}",
        f"     alone, us: {terms}",
        f"     {one.blocks:,} blocks, {one.blocks_per_sm} an SM (limit: {one.limited_by}), {one.waves:.2f} waves, "
        f"{one.padding:.0%} of the rows are padding, at least {one.memory_bytes / 1e6:,.1f} MB of memory traffic",
        f"     {one.registers} registers{guessed}, {one.spill_bytes} B of stack a thread, "
        f"{one.shared_bytes:,} B of shared memory",
    ]
