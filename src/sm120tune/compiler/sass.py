"""What a kernel's machine code (SASS) does in its main loop, read from the text that ``nvdisasm -c`` prints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\(([^)]+)\)")

_GROUP_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)\b")
_WARP_SHAPE = re.compile(r"\.168(\d\d?)\b")

_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
"""Suffixes that say how many bytes one thread moves; 4 without any."""


@dataclass(frozen=True)
class MachineCode:
    """What one kernel consists of.

    Counts are of instructions as they stand in the program, each of which every warp runs once a pass; the mappings
    name whole mnemonics, most frequent first. All but the first three fields are of the main loop, or of the whole
    kernel where it has none.
    """

    instructions: int
    """Without NOP."""
    local_loads: int
    """LDL: values that were spilled to memory come back."""
    local_stores: int
    """STL."""
    loop_instructions: int
    """0 without a main loop: K is one step and known to the compiler."""
    loop_local_loads: int
    loop_local_stores: int
    mma: Mapping[str, int]
    """Products of the tensor cores: HMMA, IMMA, QMMA; HGMMA, IGMMA and QGMMA are wgmma's."""
    copies: Mapping[str, int]
    """Asynchronous copies from global to shared memory: LDGSTS is ``cp.async``, UTMALDG and UBLKCP are TMA's."""
    global_loads: Mapping[str, int]
    """Loads into registers: scales, indices, and operands that Triton does not copy asynchronously."""
    shared_stores: Mapping[str, int]
    matrix_loads: Mapping[str, int]
    """LDSM is ``ldmatrix``; M88.4 are four 8x8 matrices of 16-bit elements."""
    shared_loads: Mapping[str, int]
    conversions: Mapping[str, int]
    """Instructions that convert numbers or, PRMT, move their bytes."""
    barriers: int
    """Waits of the whole block."""

    @property
    def spills_in_loop(self) -> bool:
        """Whether every pass of the main loop moves spilled values."""
        return self.loop_instructions > 0 and self.loop_local_loads + self.loop_local_stores > 0

    @property
    def products(self) -> int | None:
        """Multiply-adds of one warp in one pass; None where a product's shape is not known."""
        each = [_products(name) for name in self.mma]
        if None in each:
            return None
        return sum((one or 0) * count for one, count in zip(each, self.mma.values(), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class _Instruction:
    name: str
    guard: str
    """``@P0`` or the like, empty without one."""
    operands: str

    @property
    def runs(self) -> bool:
        """Whether it ever does: ptxas fills in loads under a guard that never holds."""
        return self.guard not in {"@!PT", "@!UPT"}

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> str:
        """The label that it names, empty without one."""
        found = _TARGET.search(self.operands)
        return "" if found is None else found.group(1)


def read_sass(text: str) -> MachineCode:
    """Read the disassembly of one kernel; raises ValueError for a text without any instruction.

    The main loop is every instruction that can be reached from a product of the tensor cores and from which that
    product can be reached again. So blocks that the compiler moved out of line (waits for TMA's barriers) count too.
    """
    program, labels = _parse(text)
    if not program:
        raise ValueError("the disassembly has no instruction")
    loop = _main_loop(program, labels)
    body = [program[index] for index in sorted(loop)] or program

    def count(chosen: Callable[[str], bool]) -> dict[str, int]:
        return dict(Counter(one.name for one in body if one.runs and chosen(one.base)).most_common())

    return MachineCode(
        instructions=len(program),
        local_loads=_total(program, "LDL"),
        local_stores=_total(program, "STL"),
        loop_instructions=len(loop),
        loop_local_loads=_total(body, "LDL"),
        loop_local_stores=_total(body, "STL"),
        mma=count(_is_mma),
        copies=count({"LDGSTS", "UTMALDG", "UBLKCP"}.__contains__),
        global_loads=count({"LDG", "LD"}.__contains__),
        shared_stores=count({"STS", "STSM"}.__contains__),
        matrix_loads=count({"LDSM"}.__contains__),
        shared_loads=count({"LDS"}.__contains__),
        conversions=count(lambda base: base == "PRMT" or re.fullmatch(r"[FI]2[FI]P?", base) is not None),
        barriers=_total(body, "BAR"),
    )


def bytes_per_thread(name: str) -> int:
    """Return how many bytes a thread moves with one load, store or ``cp.async`` of this mnemonic."""
    return next((_BYTES[part] for part in name.split(".") if part in _BYTES), 4)


def _products(name: str) -> int | None:
    """Return a warp's share of ``64x128x16``, which four warps multiply, or all of ``16816``: 16x8x16."""
    shape = _GROUP_SHAPE.search(name)
    if shape is not None:
        return math.prod(map(int, shape.groups())) // 4
    depth = _WARP_SHAPE.search(name)
    return None if depth is None else 16 * 8 * int(depth.group(1))


def _is_mma(base: str) -> bool:
    return base.endswith("MMA")


def _total(program: Iterable[_Instruction], base: str) -> int:
    return sum(one.base == base and one.runs for one in program)


def _parse(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    program: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label is not None:
            labels[label.group(1)] = len(program)
            continue
        found = _INSTRUCTION.search(line)
        if found is not None and found.group(2) != "NOP":
            program.append(_Instruction(found.group(2), found.group(1) or "", found.group(3).strip()))
    return program, labels


def _main_loop(program: Sequence[_Instruction], labels: Mapping[str, int]) -> set[int]:
    following = _edges(program, labels)
    preceding: list[list[int]] = [[] for _ in program]
    for index, targets in enumerate(following):
        for target in targets:
            preceding[target].append(index)
    best: set[int] = set()
    products = [index for index, one in enumerate(program) if _is_mma(one.base)]
    seen: set[int] = set()
    for index in products:
        if index not in seen:
            loop = _reached(index, following) & _reached(index, preceding)
            seen |= loop
            best = max(best, loop, key=lambda found: sum(product in found for product in products))
    return best


def _edges(program: Sequence[_Instruction], labels: Mapping[str, int]) -> list[list[int]]:
    """Return what can run after each instruction; a call comes back to the next one."""
    meeting: dict[str, list[int]] = {}
    for one in program:
        if one.base == "BSSY" and one.target in labels:
            meeting.setdefault(_first(one.operands), []).append(labels[one.target])
    edges: list[list[int]] = []
    for index, one in enumerate(program):
        targets = [] if one.base in {"CALL", "RET", "BSSY"} or one.target not in labels else [labels[one.target]]
        if one.base == "BSYNC":
            targets = meeting.get(_first(one.operands), [])
        ends = one.base in {"EXIT", "RET", "BRX", "JMX"} or (one.base in {"BRA", "JMP"} and one.operands[:1] == "`")
        if not ends or one.guard:
            targets = [*targets, index + 1]
        edges.append([target for target in targets if target < len(program)])
    return edges


def _first(operands: str) -> str:
    """Return the first operand; what some releases of the tool add on scheduling is none."""
    return re.split(r"[,\s]", operands, maxsplit=1)[0]


def _reached(start: int, edges: Sequence[Sequence[int]]) -> set[int]:
    """Return every node on a path of at least one edge from ``start``."""
    found: set[int] = set()
    waiting = list(edges[start])
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(edges[node])
    return found
