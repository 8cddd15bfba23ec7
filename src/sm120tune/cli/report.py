"""What the tune command shows before and after the work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table

from sm120tune.job import Job
from sm120tune.measure.cost_constants import CalibratedSpec, version_for
from sm120tune.provenance import RowProvenance, RowStatus
from sm120tune.search.race import Ratio
from sm120tune.search_space import count_tiles
from sm120tune.tune import Outcome

_PIPED_WIDTH = 240
"""Columns where there is no terminal to ask: no table is squeezed."""

_COMPILE_S = 0.6
"""Seconds of one core for one variant, process start included; a rough figure for the time estimate."""
_VARIANTS_PER_TRIAL = 0.8
"""New variants per trial: neighbouring M share most of theirs."""
_TIMED_US_PER_TRIAL = 45_000.0
"""GPU time of one trial's two GEMMs at small M, warm-up and graph capture included."""


def tell(line: str) -> None:
    """Print a line on stderr, whatever ``--quiet`` says."""
    print(line, file=sys.stderr, flush=True)


def console(*, quiet: bool) -> Console:
    """Return the console on stderr; stdout is for ``--json`` alone."""
    width = None if sys.stderr.isatty() else _PIPED_WIDTH
    return Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True, width=width)


def result_console() -> Console:
    """Return a console on stdout, for a table that is the command's result."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPED_WIDTH)


def show_lines(out: Console, lines: Iterable[str]) -> None:
    """Print lines as they are: a block shape in brackets is no markup."""
    for line in lines:
        out.print(line, markup=False)


def show_job(out: Console, job: Job, output: Path) -> None:
    """Name the target files before any work."""
    up, down = job.lookup.file_names(job.problem)
    version = job.triton_version.replace(".", "_")
    out.print(f"problem: {job.problem}, routing {job.routing}")
    how = {
        "model": "estimated, not measured: no such card is used",
        "replay": "replayed from a recorded table",
        "cuda": f"{len(job.gpus)} GPU(s)",
    }[job.timer]
    out.print(f"card: {job.device.name} (SM{job.device.arch}), {how}")
    if isinstance(job.device, CalibratedSpec):
        out.print(f"model: {version_for(job.device)}, calibrated on this card")
    out.print(f"SGLang {job.tree.version} at {job.tree.package}, Triton {job.triton_version}")
    out.print(f"target: {output / job.kind / 'configs' / f'triton_{version}'}/")
    out.print(f"  {up}\n  {down}")


@dataclass(frozen=True)
class Plan:
    """What a run would do."""

    job: Job
    candidates_before: int
    candidates_after: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the plan for ``--json``."""
        up, down = self.job.lookup.file_names(self.job.problem)
        today = {m: self.job.today(m) for m in self.job.batch_sizes}
        return {
            "files": [up, down],
            "problem": self.job.problem.to_json(),
            "device": self.job.device.name,
            "kind": self.job.kind,
            "candidates": {"before_cuts": self.candidates_before, "after_cuts": self.candidates_after},
            "estimated_seconds": round(self.seconds),
            "today": {
                str(m): {
                    "gate_up": state.pair.gate_up.to_row() if state.pair else None,
                    "down": state.pair.down.to_row() if state.pair else None,
                    "problem": state.problem,
                    "up_source": state.up_source,
                    "down_source": state.down_source,
                }
                for m, state in today.items()
            },
        }


def plan(job: Job, workers: int | None) -> Plan:
    """Work out what a run would do, without compiling or timing."""
    import os

    before, after = count_tiles(job.space(m) for m in job.batch_sizes)
    per_m = after / len(job.batch_sizes) if job.settings.exhaustive else job.settings.trials
    processes = workers or max(1, (os.cpu_count() or 1) - len(job.gpus))
    compile_s = len(job.batch_sizes) * per_m * _VARIANTS_PER_TRIAL * _COMPILE_S / processes
    timed_s = sum(per_m * (_TIMED_US_PER_TRIAL + 30 * job.floor(m)[0]) for m in job.batch_sizes) / 1e6
    seconds = max(compile_s, timed_s / len(job.gpus)) if job.gpus else compile_s
    if job.settings.budget_s is not None:
        seconds = min(seconds, job.settings.budget_s)
    return Plan(job, before, after, seconds + 20)


def show_plan(out: Console, plan: Plan) -> None:
    """Show today's pair for each M, the number of candidates, and a rough time."""
    table = Table(title="what SGLang runs today", title_justify="left", box=None, pad_edge=False)
    for column in ("M", "gate_up", "down", "from"):
        table.add_column(column, justify="right" if column == "M" else "left", no_wrap=True)
    for m in plan.job.batch_sizes:
        today = plan.job.today(m)
        source = today.up_source if today.up_source == today.down_source else f"{today.up_source}; {today.down_source}"
        source = "; ".join(_short(part) for part in source.split("; "))
        if today.pair is None:
            table.add_row(str(m), "cannot run", today.problem, source)
        else:
            table.add_row(str(m), str(today.pair.gate_up), str(today.pair.down), source)
    out.print(table)
    out.print(
        f"candidates: {plan.candidates_before:,} tiles over {len(plan.job.batch_sizes)} M, "
        f"{plan.candidates_after:,} after the cuts and heuristics"
    )
    out.print(f"time: about {plan.seconds:.0f} s (a rough estimate)")


def _short(source: str) -> str:
    path = Path(source)
    return f"{path.parent.name}/{path.name}" if path.suffix == ".json" else source


def row_line(row: RowProvenance) -> str:
    """Return one M in one line: today, tuned, ratio, share of the roofline."""
    parts = [f"M={row.m:<6}"]
    untimed = "today  not timed" if row.today is not None else "today  cannot run"
    parts.append(f"today {row.today_us:9.1f} us" if row.today_us is not None else untimed)
    if row.chosen_us is not None:
        parts.append(f"{row.status.value:>5} {row.chosen_us:9.1f} us")
    if row.ratio is not None:
        parts.append(f"ratio {row.ratio:.3f}")
    if row.roofline_share is not None:
        parts.append(f"{row.roofline_share:4.0%} of {row.bound}")
    parts.append(str(row.chosen))
    return "  ".join(parts) + (f"  ({row.note})" if row.note else "")


def show_outcome(out: Console, job: Job, outcome: Outcome) -> None:
    """Show what was written and how the time was spent."""
    result = outcome.result
    timed = [row for row in result.rows if row.ratio is not None]
    tuned = [row for row in timed if row.status is RowStatus.TUNED]
    verb = "estimated to gain" if job.timer == "model" else "tuned"
    out.print(f"{len(tuned)} of {len(job.batch_sizes)} M {verb}, the others keep today's pair")
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in result.seconds.items())
    out.print(f"seconds: {seconds}; whole run {outcome.seconds:.1f}")
    out.print(
        f"variants compiled {result.compiled}, timed {result.timed}, pairs resumed {result.resumed}; failures: "
        + (", ".join(f"{kind} {count}" for kind, count in sorted(result.failures.items())) or "none")
    )
    for path in (outcome.written.up_path, outcome.written.down_path, outcome.written.provenance_paths[0]):
        out.print(f"wrote {path}")
    if job.timer == "model":
        out.print(
            "These rows are ESTIMATES of a simple model, never run on the card; measure on the card before you "
            "serve with them."
        )
    if outcome.result.missing:
        out.print(f"no pair runs at M={', '.join(map(str, outcome.result.missing))}")


def ratio_cells(ratio: Ratio | None) -> tuple[str, str]:
    """Return a ratio and its interval as cells of a table, empty where there is none."""
    return ("", "") if ratio is None else (f"{ratio.middle:.3f}", f"{ratio.low:.3f}-{ratio.high:.3f}")


def show_summary(out: Console, outcomes: Iterable[tuple[Job, Outcome]]) -> None:
    """Show one line for each layer of a run over several."""
    table = Table(title="summary", title_justify="left", box=None, pad_edge=False)
    for column in ("layer", "rows tuned", "their time over today's", "seconds", "file"):
        table.add_column(column, no_wrap=True)
    for job, outcome in outcomes:
        ratios = [row.ratio for row in outcome.result.rows if row.status is RowStatus.TUNED and row.ratio is not None]
        table.add_row(
            "\n".join(map(str, outcome.problems)),
            f"{len(ratios)} of {len(job.batch_sizes)}",
            f"{geometric_mean(ratios):.3f}" if ratios else "",
            f"{outcome.seconds:.0f}",
            outcome.written.up_path.name,
        )
    out.print(table)


def outcome_json(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Return the outcome for ``--json``."""
    return {
        "files": [str(outcome.written.up_path), str(outcome.written.down_path)],
        "provenance": [str(path) for path in outcome.written.provenance_paths],
        "kind": job.kind,
        "problem": job.problem.to_json(),
        **({"shared_with": [other.to_json() for other in outcome.problems[1:]]} if outcome.problems[1:] else {}),
        "device": job.device.name,
        "rows": [row.to_json() for row in outcome.result.rows],
        "failures": dict(outcome.result.failures),
        "missing": list(outcome.result.missing),
        "seconds": {**outcome.result.seconds, "total": outcome.seconds},
        "compiled": outcome.result.compiled,
        "timed": outcome.result.timed,
        "resumed": outcome.result.resumed,
    }
