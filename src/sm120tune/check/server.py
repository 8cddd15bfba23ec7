"""Check what a server will do for one layer: which files it asks for, what it gets, and whether that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm120tune.check.content import ConfigFile, read_config, uneven_tma
from sm120tune.check.files import Context, file_findings, lower_bound_note, use_findings
from sm120tune.check.findings import Finding, Level, Report, merged
from sm120tune.check.folders import folder_findings
from sm120tune.check.near import near_misses
from sm120tune.check.pairs import Partner, pair_findings
from sm120tune.check.reach import nearest, starts
from sm120tune.check.resources import Launch, Use
from sm120tune.check.view import ServerView, Span
from sm120tune.devices import DeviceSpec
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.search_space import is_grouped, ragged_step
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import SGLangTree, UpstreamError
from sm120tune.upstream.lookup import BUILT_IN, ConfigLookup, Target

_NVFP4 = (
    "a checkpoint quantized with modelopt_fp4 (NVFP4) never reaches this kernel: no Triton file changes anything there"
)
_DETERMINISTIC = "with --enable-deterministic-inference SGLang ignores every file and runs its built-in default"


@dataclass(frozen=True)
class Server:
    """The server in question."""

    problem: MoEProblem
    device: DeviceSpec
    tree: SGLangTree
    config_dir: Path | None
    """SGLANG_MOE_CONFIG_DIR, which replaces the whole shipped tree."""
    triton_version: str

    @property
    def configs(self) -> Path:
        """The folder of version folders that the server reads."""
        return self.config_dir / "configs" if self.config_dir is not None else self.tree.configs_dir


def check_server(server: Server, context: Context) -> Report:
    """Follow a server's lookup for every M up to ``context.max_tokens``, with SGLang's own functions."""
    target = Target(server.device.name, server.device.shared_memory_per_block, server.triton_version)
    lookup = ConfigLookup(server.tree, target, config_dir=server.config_dir)
    asked = lookup.file_names(server.problem)
    found = _general(server, context)
    found += folder_findings(server.configs)
    sources: tuple[str, ...] = ()
    spans: list[Span] = []
    try:
        first = lookup.todays_pair(server.problem, 1)
        sources = (first.up_source, first.down_source)
        spans = _spans(server, lookup, context.max_tokens)
    except UpstreamError as error:
        fix = "see the errors of the files and folders here"
        found.append(Finding(Level.ERROR, "lookup-fails", asked[0], f"{error}: the server dies", fix))
    files = [read_config(path, f"{path.parent.name}/{path.name}") for path in _files(server, asked, sources)]
    for file in files:
        found += file_findings(file, context)
    found += _pair(files, context)
    found += _source_findings(server, asked, sources)
    exact = bool(sources) and Path(sources[0]).name == asked[0]
    found += near_misses(server.problem, asked[0], server.configs, Level.INFO if exact else Level.WARNING)
    spans, launched = _with_resources(server, spans, sources, context)
    found += launched
    shown = (sources[0], sources[1]) if sources else ("", "")
    view = ServerView(server.problem, server.device.name, asked, shown, tuple(spans))
    return Report(merged(found), tuple(file.label for file in files), view)


def _pair(files: Sequence[ConfigFile], context: Context) -> list[Finding]:
    """Return what is wrong with the files that SGLang pairs, or with a down file that serves without an up file."""
    ups = [file for file in files if file.name is not None and not file.name.down]
    downs = [file for file in files if file.name is not None and file.name.down]
    if len(ups) == 1 and len(downs) == 1:
        partner = Partner(downs[0], ups[0].path.parent == downs[0].path.parent)
        return pair_findings(ups[0], partner, context.rules, context.max_tokens)
    if len(downs) == 1 and not ups:
        return pair_findings(downs[0], None, context.rules, context.max_tokens)
    return []


def _general(server: Server, context: Context) -> list[Finding]:
    found = [
        Finding(Level.INFO, "deterministic", "", _DETERMINISTIC),
        Finding(Level.INFO, "nvfp4", "", _NVFP4),
    ]
    if server.config_dir is not None:
        what = f"SGLANG_MOE_CONFIG_DIR={server.config_dir} replaces the whole shipped tree"
        found.append(Finding(Level.INFO, "config-dir", "", what))
        if not server.configs.is_dir():
            what = f"{server.configs} is not there: every lookup raises FileNotFoundError"
            fix = "make it, or unset SGLANG_MOE_CONFIG_DIR"
            found.append(Finding(Level.ERROR, "config-dir", "", what, fix))
    if not context.resources.compiles(server.problem):
        found.append(lower_bound_note([server.problem.dtype]))
    return found


def _spans(server: Server, lookup: ConfigLookup, last: int) -> list[Span]:
    """Return the ranges of M that one pair of rows serves, each with what SGLang's lookup says at its first M."""
    keys = [list(lookup.rows(server.problem, down=down) or ()) for down in (False, True)]
    experts = server.problem.experts
    # The built-in default changes above E.
    points = {1, experts + 1} | set(starts(keys[0], last)) | set(starts(keys[1], last))
    points = {point for point in points if point <= last}
    spans: list[Span] = []
    for first, following in zip(sorted(points), [*sorted(points)[1:], last + 1], strict=True):
        today = lookup.todays_pair(server.problem, first)
        up, down = (nearest(some, first) if some else None for some in keys)
        new = Span(first, following - 1, up, down if down is not None else up, today.pair, today.problem)
        before = spans[-1] if spans else None
        if before is not None and _same_rows(before, new):
            spans[-1] = Span(before.first, new.last, new.up_key, new.down_key, new.pair, new.problem)
        else:
            spans.append(new)
    return spans


def _same_rows(one: Span, other: Span) -> bool:
    mine = (one.up_key, one.down_key, one.pair, one.problem)
    return mine == (other.up_key, other.down_key, other.pair, other.problem)


def _files(server: Server, asked: tuple[str, str], sources: Sequence[str]) -> list[Path]:
    """Return the files that serve, or where the lookup fails all that it may have failed at."""
    if sources:
        return [Path(source) for source in dict.fromkeys(sources) if source != BUILT_IN]
    return [path for path in sorted(server.configs.glob("triton_*/*.json")) if path.name in asked]


def _source_findings(server: Server, asked: tuple[str, str], sources: Sequence[str]) -> list[Finding]:
    found: list[Finding] = []
    own = f"triton_{server.triton_version.replace('.', '_')}"
    for name, source, gemm in zip(asked, sources, ("up", "down"), strict=False):
        path = Path(source)
        if source == BUILT_IN:
            what = f"no such file: the {gemm} GEMM runs SGLang's built-in default, which is tuned for no card"
            fix = "tune this layer with sm120tune tune"
            found.append(Finding(Level.WARNING, "built-in-default", name, what, fix))
        elif path.name != name:
            what = f"no such file: SGLang runs the rows of {path.parent.name}/{path.name} for the down GEMM too"
            found.append(Finding(Level.INFO, "partner-missing", name, what))
        elif path.parent.name != own:
            what = f"found in {path.parent.name}, the server has Triton {server.triton_version}: measured with another"
            fix = "tune again with this Triton"
            found.append(Finding(Level.WARNING, "other-triton", f"{path.parent.name}/{name}", what, fix))
        else:
            found.append(Finding(Level.INFO, "exact", f"{own}/{name}", f"serves the {gemm} GEMM"))
    return found


def _with_resources(
    server: Server, spans: Sequence[Span], sources: Sequence[str], context: Context
) -> tuple[list[Span], list[Finding]]:
    """Return the ranges with what their launches take of the card, and what is wrong with them."""
    labels = [
        BUILT_IN if source == BUILT_IN else f"{Path(source).parent.name}/{Path(source).name}" for source in sources
    ]
    asked = [
        [(launch, context.resources.ask(launch, server.device)) for launch in _launches(server.problem, span)]
        for span in spans
    ]
    context.tell_waiting()
    found: list[Finding] = []
    done: list[Span] = []
    for span, pending in zip(spans, asked, strict=True):
        key = f"M={span.label}"
        uses: dict[Gemm, Use] = {}
        for launch, answer in pending:
            use = answer.result()
            known = uses.setdefault(launch.gemm, use)
            uses[launch.gemm] = known if known.failure is not None else use
            label = labels[1] if launch.gemm is Gemm.DOWN else labels[0]
            found += use_findings(label, key, launch, use, server.device)
        if span.pair is None:
            found.append(Finding(Level.ERROR, "server-stops", labels[0], span.problem, "tune both as a pair", key))
        else:
            found += _uneven(server.problem, span.pair, labels, key)
            found += _ragged(server.problem, span.pair, labels, key)
        done.append(replace(span, gate_up=uses.get(Gemm.GATE_UP), down=uses.get(Gemm.DOWN)))
    return done, found


def _launches(problem: MoEProblem, span: Span) -> list[Launch]:
    """Return what runs in a range of M; both ends, since SGLang starts small launches in another way."""
    if span.pair is None:
        return []
    tma = span.pair.down.USE_TMA
    return [
        Launch(problem, gemm, tile, tma, m)
        for m in dict.fromkeys((span.first, span.last))
        for gemm, tile in ((Gemm.GATE_UP, span.pair.gate_up), (Gemm.DOWN, span.pair.down))
    ]


def _tiles(pair: TilePair, labels: Sequence[str]) -> tuple[tuple[Gemm, Tile, str], ...]:
    return ((Gemm.GATE_UP, pair.gate_up, labels[0]), (Gemm.DOWN, pair.down, labels[1]))


def _uneven(problem: MoEProblem, pair: TilePair, labels: Sequence[str], key: str) -> list[Finding]:
    return [
        uneven_tma(label, key, problem.gemm(gemm).k, tile)
        for gemm, tile, label in _tiles(pair, labels)
        # The kernel for groups has no descriptors, whatever a row says.
        if tile.USE_TMA and not is_grouped(problem) and problem.gemm(gemm).k % tile.BLOCK_SIZE_K
    ]


def _ragged(problem: MoEProblem, pair: TilePair, labels: Sequence[str], key: str) -> list[Finding]:
    found = []
    for gemm, tile, label in _tiles(pair, labels):
        why = ragged_step(problem, gemm, tile)
        if why is not None:
            what = f"{why}: the kernel for groups reads past the last expert's rows"
            found.append(Finding(Level.WARNING, "k-ragged", label, what, "choose a divisor of K", key))
    return found
