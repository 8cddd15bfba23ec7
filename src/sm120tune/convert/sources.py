"""What is converted: rows from a file of vLLM or of SGLang, and what is known of their origin."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm120tune._jsonfile import parse_object
from sm120tune.check.content import ConfigFile, read_config
from sm120tune.check.findings import Level
from sm120tune.check.names import ConfigName, parse_name
from sm120tune.check.pairs import find_partner
from sm120tune.check.reach import nearest
from sm120tune.devices import known_device
from sm120tune.errors import UserError
from sm120tune.install.pair import read_pair
from sm120tune.problem import MoEProblem, check_size
from sm120tune.provenance import UNKNOWN_SOURCE
from sm120tune.tiles import TilePair
from sm120tune.upstream import vllm


@dataclass(frozen=True)
class Layer:
    """What a config file does not say of its layer."""

    hidden: int | None
    topk: int | None


@dataclass(frozen=True)
class Source:
    """Rows that both GEMMs can run, and where they came from."""

    path: Path
    origin: str
    """vLLM or SGLang."""
    problem: MoEProblem
    device_name: str
    """With blanks, as torch reports it."""
    rows: Mapping[int, TilePair]
    triton_version: str | None
    kernel_source_hash: str
    notes: Mapping[int, str] = field(default_factory=dict)
    """What is to be said of single rows."""
    plain: bool = False
    """Without provenance: of the layer it is known what the name says and what a person added."""

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def from_vllm(path: Path, layer: Layer, *, per_channel: bool = False) -> Source:
    """Read a file of vLLM; raises UserError for one that does not mean the same in SGLang."""
    name = _name(path)
    if name.down:
        raise UserError(f"{path}: vLLM has no _down files; give --to vllm or --alias-device for a file of SGLang")
    if name.dtype in vllm.UNLIKE:
        raise UserError(f"{path}: {name.dtype} is not converted: {vllm.UNLIKE[name.dtype]}; tune for SGLang")
    try:
        version, rows = vllm.read_rows(parse_object(_text(path)))
    except ValueError as error:
        raise UserError(f"{path} is no config file of vLLM that SGLang could run: {error}") from None
    if per_channel and name.dtype != "fp8_w8a8":
        raise UserError(f"--per-channel is for fp8_w8a8 files; {path.name} is none")
    problem = replace(_problem(path, name, layer), per_channel_quant=per_channel)
    taken = {m: vllm.clamped(tile, name.block_shape) for m, tile in rows.items()}
    notes = {
        m: f"BLOCK_SIZE_K {rows[m].BLOCK_SIZE_K} clamped to {tile.BLOCK_SIZE_K}, as vLLM does at launch"
        for m, tile in taken.items()
        if tile != rows[m]
    }
    pairs = {m: TilePair.same(tile) for m, tile in taken.items()}
    return Source(path, "vLLM", problem, _device(name), pairs, version, UNKNOWN_SOURCE, notes)


def from_sglang(path: Path, layer: Layer, like: MoEProblem | None = None) -> Source:
    """Read a pair of SGLang: ours with its provenance, or any, then with the layer's numbers.

    Of a pair for several layers it is the one that the numbers mean, or with ``like`` that one where it is among them.
    """
    up_path = path.with_name(path.stem.removesuffix("_down") + path.suffix)
    if record_of(up_path) is not None:
        pair = read_pair(up_path)
        record = pair.record
        return Source(
            path=up_path,
            origin="SGLang",
            problem=_layer_of(up_path, record.problems, layer, like),
            device_name=pair.device_name,
            rows=pair.ladder.rows,
            triton_version=record.versions["triton"],
            kernel_source_hash=record.kernel_source_hash,
            notes={row.m: f"{row.status.value} on {pair.device_name}" for row in record.rows},
        )
    up, down = read_sglang_files(up_path)
    assert up.name is not None
    rows: dict[int, TilePair] = {}
    for m in sorted({*up.rows, *(down or up).rows}):
        tiles = up.rows[nearest(up.rows, m)], (down or up).rows[nearest((down or up).rows, m)]
        # As SGLang from 0.5.15 on overrides it; earlier ones stop.
        rows[m] = TilePair(tiles[0], tiles[1].with_block_m(tiles[0].BLOCK_SIZE_M))
    problem = _problem(up_path, up.name, layer)
    device = _device(up.name)
    return Source(up_path, "SGLang", problem, device, rows, triton_of(up_path), UNKNOWN_SOURCE, plain=True)


def _layer_of(path: Path, problems: Sequence[MoEProblem], layer: Layer, like: MoEProblem | None) -> MoEProblem:
    if like is not None:
        return like if like in problems else problems[0]
    for one in problems:
        if layer.hidden in {None, one.hidden} and layer.topk in {None, one.topk, one.routed_topk}:
            return one
    given = [f"--{name} {value}" for name, value in vars(layer).items() if value is not None]
    raise UserError(f"{path} is for {' and '.join(map(str, problems))}, not for {' '.join(given)}; leave them out")


def read_sglang_files(up_path: Path) -> tuple[ConfigFile, ConfigFile | None]:
    """Read an up file and the ``_down`` file beside it, if there is one; raises UserError where SGLang could not."""
    _name(up_path)
    up = read_config(up_path, str(up_path))
    partner = find_partner(up)
    down = partner.file if partner is not None and partner.beside else None
    for file in (up, down):
        error = next((one for one in (file.findings if file else ()) if one.level is Level.ERROR), None)
        if error is not None:
            key = f" at M={error.key}" if error.key else ""
            raise UserError(f"{error.file}{key}: {error.what}; {error.fix}")
    if not up.rows:
        raise UserError(f"{up_path} has no rows")
    return up, down


def triton_of(path: Path) -> str | None:
    """Return the Triton version of the folder that a file lies in, if it lies in such a folder."""
    folder = path.absolute().parent.name
    return folder.removeprefix("triton_").replace("_", ".") if folder.startswith("triton_") else None


def record_of(up_path: Path) -> Path | None:
    """Return the provenance file that lies beside the tree of a config file, or None where there is none."""
    folder = up_path.absolute().parent
    record = folder.parent.parent / "provenance" / folder.name / up_path.name
    return record if record.is_file() else None


def _name(path: Path) -> ConfigName:
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a config file (E=…,N=…,device_name=….json)")
    name = parse_name(path.name)
    if name is None:
        raise UserError(f"{path}: the name is not that of a config file (E=…,N=…,device_name=….json)")
    return name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _device(name: ConfigName) -> str:
    known = known_device(name.device)
    return known.name if known is not None else name.device.replace("_", " ")


def _problem(path: Path, name: ConfigName, layer: Layer) -> MoEProblem:
    for option, value in (("--hidden", layer.hidden), ("--topk", layer.topk)):
        if value is None:
            raise UserError(f"missing {option}: no file name says it, and there is no provenance for {path.name}")
        check_size(option, value)
    named = name.problem()
    if named is None:
        raise UserError(f"{path}: dtype {name.dtype} is none of SGLang's")
    assert layer.hidden is not None
    assert layer.topk is not None
    for size, value in (("E", named.experts), ("N", named.intermediate)):
        check_size(f"{path}: {size} of its name", value)
    # A file for fewer experts than a token chooses is for one of several ranks.
    router_experts = max(named.router_experts, layer.topk)
    problem = replace(named, hidden=layer.hidden, topk=layer.topk, router_experts=router_experts)
    try:
        _ = problem.quantization
    except UserError:
        # The groups of int4, or a name that SGLang never asks for.
        raise UserError(
            f"{path}: its name does not say how {name.dtype} weights are scaled, and there is no provenance for it; "
            "tune the layer"
        ) from None
    return problem
