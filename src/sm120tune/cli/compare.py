"""``sm120tune compare``: two pairs, or a pair and what SGLang has without one."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import click
from rich.table import Table

from sm120tune.calibrate.applied import calibrated
from sm120tune.cli.options import batch_sizes, calibration_option
from sm120tune.cli.report import ratio_cells, result_console
from sm120tune.compare import Compared, Mix, Serves, compare_ladders, parse_mix, uniform_mix
from sm120tune.convert import Layer, Source, from_sglang
from sm120tune.devices import busy_reason
from sm120tune.errors import UserError
from sm120tune.job import Job, Settings
from sm120tune.measure.cost_constants import CalibratedSpec, version_for
from sm120tune.measure.lane import TimerName
from sm120tune.measure.routing import ROUTING_CHOICES, parse_routing
from sm120tune.problem import check_batch_sizes
from sm120tune.quantization import DTYPES
from sm120tune.resolve import CardRequest, JobRequest, resolve_card, resolve_job
from sm120tune.search.ladder import nearest
from sm120tune.tune import open_lanes, open_pool

DEFAULT, TODAY = "default", "today"
EXIT_NOT_ALL = 1


@dataclass(frozen=True)
class _Options:
    a: str
    b: str
    hidden: int | None
    topk: int | None
    batch_sizes: tuple[int, ...]
    mix: str | None
    routing: str
    timer: str | None
    calibration: str | None
    gpus: str | None
    seed: int
    sglang: Path | None
    output: Path
    as_json: bool


@click.command("compare", context_settings={"show_default": True})
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", default=DEFAULT)
@click.option("--hidden", type=int, help="Hidden size of the layer, where no provenance says it.")
@click.option("--topk", type=int, help="Experts per token, where no provenance says it.")
@click.option(
    "--batch-sizes",
    callback=batch_sizes,
    show_default=False,
    help="Values of M.  [default: those of --mix, else every key of both]",
)
@click.option("--mix", help="How often each M is called, as M:SHARE,…  [default: every M alike]")
@click.option("--routing", default="uniform", help=f"{ROUTING_CHOICES}.")
@click.option("--timer", type=click.Choice(["cuda", "model"]), help="[default: cuda where the card is here]")
@calibration_option
@click.option("--gpus", help="Which local GPU to use, for example 1.  [default: the first]")
@click.option("--seed", type=int, default=200, help="Seed of data and routing.")
@click.option(
    "--sglang", type=click.Path(path_type=Path), help="SGLang checkout or site-packages.  [default: the importable one]"
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("generated_configs"),
    help="Where runs write: copies of those files are not what SGLang runs today.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def compare_command(**options: Any) -> int:
    """Compare the pairs A and B at each M and over a mix of M.

    Each is a file of a pair. B may also be `default`, SGLang's built-in default, or `today`, what SGLang runs without
    files of ours. On a GPU of the card both are timed interleaved, without one they are estimated.
    """
    return _compare(_Options(**options))


def _compare(options: _Options) -> int:
    if options.seed < 0:
        raise UserError(f"--seed must be 0 or more, not {options.seed}")
    mix = parse_mix(options.mix) if options.mix is not None else None
    a = from_sglang(Path(options.a), Layer(options.hidden, options.topk))
    b = None if options.b in {DEFAULT, TODAY} else _second(Path(options.b), a)
    if a.problem.dtype not in DTYPES:
        raise UserError(f"{a.path}: {a.problem.dtype} cannot be timed yet, only {', '.join(DTYPES)}")
    keys = {*a.rows, *(b.rows if b is not None else ())}
    sizes = check_batch_sizes(list({*options.batch_sizes, *(mix.shares if mix else ())} or keys))
    job = _job(options, a, sizes)
    for source in (a, b):
        if source is not None and source.triton_version not in {None, job.triton_version}:
            _tell(f"note: {source.path} was made with Triton {source.triton_version}, here is {job.triton_version}")
    rows = _run(job, a, b, options.b)
    mix = mix or uniform_mix(sizes)
    if options.as_json:
        print(json.dumps(_document(options, job, rows, mix), indent=4))
    else:
        _show(options, job, rows, mix)
    return 0 if all(row.ratio is not None for row in rows) else EXIT_NOT_ALL


def _second(path: Path, a: Source) -> Source:
    """Read B; raises UserError where it is not for A's layer and card."""
    b = from_sglang(path, Layer(a.problem.hidden, a.problem.topk), like=a.problem)
    problem = b.problem
    if a.plain or b.plain:
        problem = replace(problem, router_experts=a.problem.router_experts, shared_experts=a.problem.shared_experts)
    for entry in fields(problem):
        mine, other = getattr(a.problem, entry.name), getattr(problem, entry.name)
        if mine != other:
            raise UserError(f"{a.path} is for {entry.name} {mine}, {path} for {other}: nothing to compare")
    if a.device_name != b.device_name:
        raise UserError(f"{a.path} is for {a.device_name}, {path} for {b.device_name}: nothing to compare")
    return b


def _job(options: _Options, a: Source, sizes: tuple[int, ...]) -> Job:
    card = resolve_card(CardRequest(a.device_name, None, options.gpus, cast("TimerName | None", options.timer)))
    # Both sides take turns on one GPU.
    card = replace(card, gpus=card.gpus[:1], spec=calibrated(card.spec, options.calibration, _tell))
    for gpu in card.gpus:
        busy = busy_reason(gpu)
        if busy is not None:
            _tell(f"warning: {busy}")
    settings = Settings(trials=1, exhaustive=False, budget_s=None, seed=options.seed)
    routing = parse_routing(options.routing)
    return resolve_job(JobRequest(a.problem, sizes, routing, settings, options.sglang, options.output), card)


def _run(job: Job, a: Source, b: Source | None, word: str) -> list[Compared]:
    second = _ladder(b) if b is not None else _builtin(job) if word == DEFAULT else _todays(job)
    with open_pool(job, None) as pool, open_lanes(job, _tell) as lanes:
        return asyncio.run(compare_ladders(job, pool, lanes[0], _ladder(a), second, _progress))


def _ladder(source: Source) -> Serves:
    return lambda m: (source.rows[nearest(list(source.rows), m)], "")


def _builtin(job: Job) -> Serves:
    return lambda m: (job.lookup.builtin_pair(job.problem, m), "")


def _todays(job: Job) -> Serves:
    return lambda m: (job.today(m).pair, job.today(m).problem)


def _progress(row: Compared) -> None:
    _tell(f"M={row.m}: {row.word}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _mixed(rows: list[Compared], mix: Mix) -> tuple[float | None, float | None]:
    return (
        mix.expected_us({row.m: row.a_us for row in rows}),
        mix.expected_us({row.m: row.b_us for row in rows}),
    )


def _show(options: _Options, job: Job, rows: list[Compared], mix: Mix) -> None:
    console = result_console()
    by = f" (model {version_for(job.device)})" if isinstance(job.device, CalibratedSpec) else ""
    how = "measured" if job.timer == "cuda" else f"ESTIMATED, not measured{by}"
    table = Table(title=f"{job.problem} on {job.device.name}, {how}", title_justify="left", box=None, pad_edge=False)
    for column in ("M", "A", "B", "ratio", "interval", "A is", "A's rows", "B's rows"):
        table.add_column(
            column, justify="left" if column in {"A is", "A's rows", "B's rows"} else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*_cells(row))
    console.print(f"A: {options.a}\nB: {options.b}")
    console.print(table)
    a_us, b_us = _mixed(rows, mix)
    shares = ", ".join(f"{m}:{share:.2g}" for m, share in mix.shares.items()) if options.mix else "every M alike"
    if a_us is None or b_us is None:
        console.print(f"mix ({shares}): not compared, since an M of it could not be")
    else:
        console.print(f"mix ({shares}): A {a_us:.1f} us, B {b_us:.1f} us a call, ratio {a_us / b_us:.3f}")


def _cells(row: Compared) -> tuple[str, ...]:
    return (
        str(row.m),
        "" if row.a_us is None else f"{row.a_us:.1f} us",
        "" if row.b_us is None else f"{row.b_us:.1f} us",
        *ratio_cells(row.ratio),
        row.word + (f" ({row.problem})" if row.problem else ""),
        "" if row.a is None else str(row.a),
        "" if row.b is None else str(row.b),
    )


def _document(options: _Options, job: Job, rows: list[Compared], mix: Mix) -> dict[str, Any]:
    a_us, b_us = _mixed(rows, mix)
    return {
        "a": options.a,
        "b": options.b,
        "problem": job.problem.to_json(),
        "device": job.device.name,
        "timer": job.timer,
        **({"model": version_for(job.device)} if job.timer == "model" else {}),
        "rows": [row.to_json() for row in rows],
        "mix": {
            "shares": {str(m): share for m, share in mix.shares.items()},
            "a_us": a_us,
            "b_us": b_us,
            "ratio": a_us / b_us if a_us is not None and b_us else None,
        },
    }
