"""From what a person asked for to a job: the card, the timer, SGLang's tree, and everything checked beforehand."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm120tune.devices import (
    DEFAULT_DEVICE_NAME,
    DeviceSpec,
    LocalGPU,
    find_device,
    load_device_spec,
    local_gpus,
    same_card,
)
from sm120tune.errors import UserError
from sm120tune.install.originals import originals
from sm120tune.job import Job, Settings
from sm120tune.measure.lane import TimerName
from sm120tune.measure.memory import USABLE_SHARE, activation_bytes, needed_bytes, weight_bytes
from sm120tune.measure.replay import table_values
from sm120tune.measure.routing import Routing, check_fits
from sm120tune.measure.table import Table
from sm120tune.problem import MoEProblem
from sm120tune.provenance import load
from sm120tune.search_space import VALUES
from sm120tune.tiles import Tile
from sm120tune.upstream import SGLangTree, find_sglang
from sm120tune.upstream.arguments import launch_flags
from sm120tune.upstream.lookup import ConfigLookup, Target
from sm120tune.upstream.source import load_kernels


@dataclass(frozen=True)
class CardRequest:
    """What a person said about the card and the timer."""

    device: str | None
    device_spec: Path | None
    gpus: str | None
    timer: TimerName | None


@dataclass(frozen=True)
class Card:
    """The card that is tuned for, and the local GPUs that time it (none for a model)."""

    spec: DeviceSpec
    gpus: tuple[LocalGPU, ...]
    timer: TimerName


def resolve_card(request: CardRequest) -> Card:
    """Decide for which card and how to time.

    A card that is not in this machine means the model. Raises UserError for an unknown card, a GPU that is not
    there, GPUs of different cards, or ``--timer cuda`` without a GPU.
    """
    if request.device_spec is not None:
        if request.device is not None:
            raise UserError(f"--device {request.device} and --device-spec name two cards; leave one out")
        if request.timer == "cuda":
            raise UserError("--device-spec describes a card that is not here; --timer cuda cannot time it")
        return Card(load_device_spec(request.device_spec), (), "model")
    if request.timer == "model" and request.device is not None:
        return Card(find_device(request.device), (), "model")
    local = _chosen(local_gpus(), request.gpus)
    if request.device is not None:
        local = tuple(gpu for gpu in local if same_card(gpu.spec.name, request.device))
    if not local:
        if request.timer == "cuda":
            wanted = f"no {request.device}" if request.device else "no GPU that torch can use"
            raise UserError(f"--timer cuda: there is {wanted} here; use --timer model for an estimate")
        return Card(find_device(DEFAULT_DEVICE_NAME if request.device is None else request.device), (), "model")
    first = local[0].spec
    other = next((gpu for gpu in local if gpu.spec.name != first.name), None)
    if other is not None:
        raise UserError(
            f"GPU {local[0].index} is a {first.name}, GPU {other.index} a {other.spec.name}; "
            "choose GPUs of one card with --gpus or --device"
        )
    if request.timer == "model":
        return Card(first, (), "model")
    return Card(first, local, "cuda")


def _chosen(gpus: tuple[LocalGPU, ...], text: str | None) -> tuple[LocalGPU, ...]:
    if text is None or text == "all":
        return gpus
    by_index = {gpu.index: gpu for gpu in gpus}
    chosen: dict[int, LocalGPU] = {}
    for part in text.split(","):
        try:
            index = int(part)
        except ValueError:
            index = -1
        if index not in by_index:
            there = ", ".join(map(str, by_index)) or "none"
            raise UserError(f"--gpus {text}: there is no GPU {part.strip()!r} here (there are: {there})")
        chosen[index] = by_index[index]
    return tuple(chosen.values())


@dataclass(frozen=True)
class JobRequest:
    """A checked problem and how to tune it."""

    problem: MoEProblem
    batch_sizes: tuple[int, ...]
    routing: Routing
    settings: Settings
    sglang: Path | None
    output: Path
    table: Table | None = None


def resolve_job(request: JobRequest, card: Card) -> Job:
    """Load SGLang's source for the card and check that the problem fits; raises UserError."""
    import triton

    tree = find_sglang(request.sglang)
    kernels, stored = load_kernels(tree), request.problem.quantization
    triton_version = triton.__version__ if request.table is None else str(request.table.meta["triton"])
    target = Target(card.spec.name, card.spec.shared_memory_per_block, triton_version)
    config_dir = os.environ.get("SGLANG_MOE_CONFIG_DIR")
    folder = Path(config_dir) if config_dir else None
    names = ConfigLookup(tree, target, config_dir=folder).file_names(request.problem)
    lookup = ConfigLookup(tree, target, config_dir=folder, stand_ins=_own_files(tree, folder, request.output, names))
    check_fits(request.problem, request.routing)
    check_memory(request.problem, max(request.batch_sizes), card.gpus, all_experts=False)
    job = Job(
        problem=request.problem,
        device=card.spec,
        gpus=card.gpus,
        tree=tree,
        lookup=lookup,
        source_hash=kernels.hash_for(stored) if request.table is None else request.table.meta["kernel_source_hash"],
        pdl=launch_flags(kernels.gemm_kernel(stored), card.spec.arch).pdl,
        triton_version=triton_version,
        batch_sizes=request.batch_sizes,
        routing=request.routing,
        timer=card.timer,
        settings=request.settings,
        values=VALUES if request.table is None else table_values(request.table),
        table=request.table,
    )
    fits = all(
        needed_bytes(job.problem, gpu.spec.l2_bytes, job.seam_m) <= USABLE_SHARE * gpu.free_bytes for gpu in card.gpus
    )
    return replace(job, reach=job.seam_m if fits else None)


def _own_files(
    tree: SGLangTree, config_dir: Path | None, output: Path, names: Sequence[str]
) -> dict[Path, Path | None]:
    """Return the config files that this tool made, each with what it replaced: they are not what SGLang runs today.

    A file is ours when an install put it there, when provenance with the same rows lies beside its tree, or when it
    is a copy of one in the output folder; only of an installed one it is known what was there before.
    """
    base = config_dir if config_dir is not None else tree.configs_dir.parent
    ours = originals(base)
    for name in names:
        written = [path.read_bytes() for path in output.glob(f"*/configs/triton_*/{_literal(name)}")]
        for path in (base / "configs").glob(f"triton_*/{_literal(name)}"):
            record = base / "provenance" / path.parent.name / name
            if path.read_bytes() in written or (record.is_file() and _recorded(record, path)):
                ours.setdefault(path, None)
    return ours


def _recorded(record: Path, config: Path) -> bool:
    """Whether a provenance file has the rows of a config file: a stranger's file may lie beside an old one of ours."""
    try:
        rows = {int(m): Tile.from_row(row) for m, row in json.loads(config.read_bytes()).items()}
        return rows == load(record).tiles(down=config.stem.endswith("_down"))
    except (UserError, ValueError, TypeError, AttributeError):
        return False


def _literal(name: str) -> str:
    """Escape a file name for glob: block shapes have brackets."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def check_memory(problem: MoEProblem, max_m: int, gpus: Sequence[LocalGPU], *, all_experts: bool = True) -> None:
    """Raise UserError where a GPU has not enough free memory for one call with ``max_m`` tokens.

    Without ``all_experts`` some experts may read the weights of others, as :func:`resident_experts` says.
    """
    for gpu in gpus:
        needed = weight_bytes(problem) + activation_bytes(problem, max_m)
        if not all_experts:
            needed = needed_bytes(problem, gpu.spec.l2_bytes, max_m)
        if needed > USABLE_SHARE * gpu.free_bytes:
            raise UserError(
                f"GPU {gpu.index}: {problem} with M={max_m} needs {needed / 2**30:.1f} GiB, "
                f"{gpu.free_bytes / 2**30:.1f} GiB are free; end other jobs, use a larger --tp or smaller --batch-sizes"
            )
