"""What ``explain`` prints of a kernel's machine code."""

from __future__ import annotations

from collections.abc import Mapping

from sm120tune.compiler.sass import bytes_per_thread
from sm120tune.explain import Explained


def code_lines(one: Explained) -> list[str]:
    """Return a few lines, those left out that would say nothing; none without machine code."""
    code = one.code
    if code is None:
        return []
    inside = f"main loop of {code.loop_instructions:,}" if code.loop_instructions else "no loop (K is one step)"
    if one.steps is not None and one.steps != 1:
        inside += f" for {one.steps:g} steps of K"
    parts = (_counts(code.mma) or "no mma", _counts(code.matrix_loads), f"{code.barriers} barriers")
    lines = [f"{code.instructions:,} instructions, {inside}: {', '.join(filter(None, parts))}"]
    if one.repeated > 1:
        lines.append(f"each product is computed {one.repeated:g} times: the tile is too small for its warps")
    if code.copies:
        kinds = ", ".join(f"{count} {name} ({_kind(name)})" for name, count in code.copies.items())
        lines.append(f"copies from global to shared memory: {kinds}")
    if code.global_loads:
        lines.append(f"loads to registers: {_widths(code.global_loads)}")
    if code.shared_stores or code.shared_loads:
        moved = (_widths(names) for names in (code.shared_stores, code.shared_loads) if names)
        lines.append(f"through shared memory: {', '.join(moved)}")
    if code.conversions:
        lines.append(f"conversions: {_counts(code.conversions)}")
    if code.local_loads or code.local_stores:
        each = f"{code.loop_local_loads:,} and {code.loop_local_stores:,} of them in every pass of the main loop"
        where = each if code.spills_in_loop else "none in the main loop"
        lines.append(f"spills: {code.local_loads:,} LDL and {code.local_stores:,} STL, {where}")
    return lines


def _counts(names: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in names.items())


def _widths(names: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name} ({_size(name)})" for name, count in names.items())


def _size(name: str) -> str:
    return "matrices" if "M88" in name or "MT88" in name else f"{bytes_per_thread(name)} B a thread"


def _kind(name: str) -> str:
    return f"cp.async, {bytes_per_thread(name)} B a thread" if name.startswith("LDGSTS") else "TMA, one thread"
