"""Check config files by themselves: their names, rows and partners, and whether the card can run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120tune.check.content import ConfigFile, ladder_findings, read_config
from sm120tune.check.findings import Finding, Level, Report, merged
from sm120tune.check.folders import Source, configs_root, folder_findings
from sm120tune.check.names import ASSUMED_HIDDEN, ASSUMED_TOPK, name_findings
from sm120tune.check.pairs import Partner, find_partner, pair_findings
from sm120tune.check.reach import reachable
from sm120tune.check.resources import Launch, Pending, Resources, Use
from sm120tune.check.rules import Rules
from sm120tune.devices import DeviceSpec, known_device
from sm120tune.failures import FailureKind
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile


@dataclass(frozen=True)
class Context:
    """What all checks of one command share."""

    device: DeviceSpec | None
    """The card that a person named; without one each file's own counts."""
    max_tokens: int
    rules: Rules
    resources: Resources
    configs: Path | None = None
    """The server's own folder of version folders: a partner that is not in there is nowhere."""
    tell: Callable[[str], None] = lambda _line: None
    """Where progress goes."""

    def tell_waiting(self) -> None:
        """Say how much is being compiled, where anything is."""
        if self.resources.waiting:
            self.tell(f"compiling {self.resources.waiting} variants, each about half a second of one core")


@dataclass(frozen=True)
class _Asked:
    file: str
    key: str
    launch: Launch
    device: DeviceSpec
    answer: Pending


def check_files(sources: Sequence[Source], context: Context) -> Report:
    """Check every file; raises UpstreamError where SGLang's kernel cannot be compiled at all."""
    files = [read_config(source.path, source.label) for source in sources]
    found: list[Finding] = []
    roots = {root: None for file in files if (root := configs_root(file.path)) is not None}
    for root in roots:
        found += folder_findings(root)
    asked: list[_Asked] = []
    given = {file.path.resolve() for file in files}
    for file in files:
        partner = find_partner(file)
        twice = _twice(file, partner, given)
        if not twice:
            asked += _launches(file, partner, context)
        found += file_findings(file, context)
        installed = context.configs is not None and configs_root(file.path) == context.configs.absolute()
        found += pair_findings(file, partner, context.rules, context.max_tokens, twice=twice, installed=installed)
    found += _related_keys(files)
    context.tell_waiting()
    for one in asked:
        found += use_findings(one.file, one.key, one.launch, one.answer.result(), one.device)
    found += _assumptions(asked, context)
    return Report(merged(found), tuple(file.label for file in files))


def _twice(file: ConfigFile, partner: Partner | None, given: set[Path]) -> bool:
    """Whether a down file is covered by the check of the up file beside it."""
    if file.name is None or not file.name.down or partner is None or not partner.beside:
        return False
    return partner.file.path.resolve() in given


def file_findings(file: ConfigFile, context: Context) -> list[Finding]:
    """Return everything that is wrong with one file by itself and needs no compilation."""
    found: list[Finding] = []
    if file.name is None:
        what = "no server asks for such a name (E=…,N=…,device_name=…[,dtype=…][,block_shape=[n, k]]…[_down].json)"
        found.append(Finding(Level.ERROR, "name", file.label, what, "name it as sm120tune tune does"))
    else:
        found += name_findings(file.label, file.name, context.device)
    return [*found, *file.findings, *ladder_findings(file, context.max_tokens)]


def use_findings(label: str, key: str, launch: Launch, use: Use, device: DeviceSpec) -> list[Finding]:
    """Return what is wrong with what a launch takes of the card."""
    name = f"{launch.gemm.value} {launch.tile}"
    if use.failure is not None:
        kind, message = use.failure.kind, use.failure.message
        code = kind.value.replace("_", "-")
        if kind in {FailureKind.SHARED_MEMORY, FailureKind.REGISTERS}:
            what = f"{name} {message} of {device.name}: the launch fails"
            fix = "fewer num_stages or a smaller tile; or tune the layer for this card"
            return [Finding(Level.ERROR, code, label, what, fix, key)]
        level = Level.WARNING if kind is FailureKind.COMPILE_TIMEOUT else Level.ERROR
        return [Finding(level, code, label, f"{name}: {message}", "tune the layer with this Triton", key)]
    if use.spill_bytes:
        what = f"{name} spills {use.spill_bytes} B of registers a thread"
        return [Finding(Level.INFO, "spills", label, what, "", key)]
    return []


def _launches(file: ConfigFile, partner: Partner | None, context: Context) -> list[_Asked]:
    problem = file.name.problem() if file.name is not None else None
    if file.name is None or problem is None or not file.rows:
        return []
    device = context.device or known_device(file.name.device)
    if device is None:
        return []
    asked: list[_Asked] = []

    def ask(label: str, key: str, gemm: Gemm, tile: Tile, sorted_rows: bool) -> None:
        launch = Launch(problem, gemm, tile, sorted_rows)
        asked.append(_Asked(label, key, launch, device, context.resources.ask(launch, device)))

    other = partner.file if partner is not None and partner.file.rows else None
    if file.name.down and other is None:
        for m, tile in file.rows.items():
            ask(file.label, str(m), Gemm.DOWN, tile, tile.USE_TMA)
        return asked
    up_file, down_file = (other or file, file) if file.name.down else (file, other or file)
    last = max(context.max_tokens, *up_file.rows, *down_file.rows)
    for reach in reachable(list(up_file.rows), list(down_file.rows), last):
        up, down = up_file.rows[reach.up_key], down_file.rows[reach.down_key]
        mixed = up.BLOCK_SIZE_M != down.BLOCK_SIZE_M
        key = f"{reach.down_key} with up row {reach.up_key}'s BLOCK_SIZE_M" if mixed else str(reach.down_key)
        ask(up_file.label, str(reach.up_key), Gemm.GATE_UP, up, down.USE_TMA)
        ask(down_file.label, key, Gemm.DOWN, down.with_block_m(up.BLOCK_SIZE_M), down.USE_TMA)
    return asked


def _related_keys(files: Sequence[ConfigFile]) -> list[Finding]:
    """Note files that differ in E alone by a whole factor: one of them may be keyed by the wrong count."""
    groups: dict[tuple[object, ...], list[ConfigFile]] = {}
    for file in files:
        if file.name is not None and not file.name.down:
            place = (file.path.parent, file.name.intermediate, file.name.device, file.name.selectors)
            groups.setdefault(place, []).append(file)
    found: list[Finding] = []
    for group in groups.values():
        for file in group:
            own = file.name.experts if file.name is not None else 0
            larger = [o.name.experts for o in group if o.name and o.name.experts > own and o.name.experts % own == 0]
            if larger:
                most = max(larger)
                what = (
                    f"E={own} is {most}/{most // own} at the same N as a file beside it: right for --ep {most // own} "
                    f"with N not split further; with tensor parallelism alone the server asks for E={most}"
                )
                found.append(Finding(Level.INFO, "related-key", file.label, what))
    return found


def _assumptions(asked: Sequence[_Asked], context: Context) -> list[Finding]:
    found: list[Finding] = []
    problems = {one.launch.problem for one in asked}
    compiled = {problem for problem in problems if context.resources.compiles(problem)}
    if compiled:
        what = (
            f"rows are compiled with an assumed hidden size of {ASSUMED_HIDDEN} and topk of {ASSUMED_TOPK}: "
            "shared memory does not depend on them"
        )
        found.append(Finding(Level.INFO, "assumed", "", what))
    bounded = sorted({problem.dtype for problem in problems - compiled})
    if bounded:
        found.append(lower_bound_note(bounded))
    return found


def lower_bound_note(dtypes: Sequence[str]) -> Finding:
    """Return the note that shared memory of these dtypes comes from the formula."""
    what = (
        f"{', '.join(dtypes)}: not compiled; shared memory is a lower bound, "
        "(num_stages-1)*(BLOCK_SIZE_M+BLOCK_SIZE_N)*BLOCK_SIZE_K*bytes"
    )
    return Finding(Level.INFO, "lower-bound", "", what)
