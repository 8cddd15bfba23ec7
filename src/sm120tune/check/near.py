"""Files that a server does not ask for although they look as if meant for it."""

from __future__ import annotations

import re
from pathlib import Path

from sm120tune.check.findings import Finding, Level
from sm120tune.check.names import ConfigName, parse_name
from sm120tune.problem import MoEProblem

_LIKE = 0.7
"""Share of common words from which one device name may be meant for the other: editions of a card."""


def near_misses(problem: MoEProblem, asked: str, configs: Path, level: Level) -> list[Finding]:
    """Return the up files of a config tree whose name differs in one part from the one asked for."""
    wanted = parse_name(asked)
    if wanted is None:
        return []
    found: list[Finding] = []
    for path in sorted(configs.glob("triton_*/*.json")):
        name = parse_name(path.name)
        if name is None or name.down or name == wanted:
            continue
        why = _difference(problem, wanted, name)
        if why is not None:
            label = f"{path.parent.name}/{path.name}"
            what = f"a near miss, never read by this server: {why}"
            fix = "tune for this layer and card; a copy under the right name is unmeasured"
            found.append(Finding(level, "near-miss", label, what, fix))
    return found


def _difference(problem: MoEProblem, wanted: ConfigName, name: ConfigName) -> str | None:
    """Return the one part in which a name differs, where that is a known mistake."""
    parts = [
        (wanted.experts, name.experts, _experts),
        (wanted.intermediate, name.intermediate, _intermediate),
        (wanted.device, name.device, _device),
        (wanted.selectors, name.selectors, _selectors),
    ]
    differing = [(mine, other, explain) for mine, other, explain in parts if mine != other]
    if len(differing) != 1:
        return None
    return differing[0][2](problem, wanted, name)


def _experts(problem: MoEProblem, wanted: ConfigName, name: ConfigName) -> str | None:
    text = f"E={name.experts}, the server asks for E={wanted.experts}"
    if abs(name.experts - wanted.experts) == 1:
        return f"{text}; they differ by a fused shared expert (--shared-experts)"
    routed = problem.router_experts
    if name.experts < routed and routed % name.experts == 0:
        return f"{text}; {name.experts} is {routed}/{routed // name.experts}, the key of --ep {routed // name.experts}"
    if name.experts == routed:
        return f"{text}; {routed} counts the experts of all expert-parallel ranks"
    return None


def _intermediate(_problem: MoEProblem, wanted: ConfigName, name: ConfigName) -> str | None:
    text = f"N={name.intermediate}, the server asks for N={wanted.intermediate}"
    if 2 * name.intermediate == wanted.intermediate or name.intermediate == 2 * wanted.intermediate:
        return f"{text}; off by a factor of two (N is w2.shape[2]: inter / tp, for int4 half of that)"
    return None


def _device(_problem: MoEProblem, wanted: ConfigName, name: ConfigName) -> str | None:
    text = f"device_name={name.device}, the server asks for {wanted.device}"
    if name.device.replace(" ", "_").casefold() == wanted.device.casefold():
        return f"{text}; blanks and case count"
    words, others = (set(re.split("[_-]", device)) for device in (wanted.device, name.device))
    if len(words & others) >= _LIKE * min(len(words), len(others)):
        return f"{text}; another card or edition with a like name"
    return None


def _selectors(_problem: MoEProblem, wanted: ConfigName, name: ConfigName) -> str | None:
    return f"{_text(name)}, the server asks for {_text(wanted)}"


def _text(name: ConfigName) -> str:
    parts = [f"dtype={name.dtype}" if name.dtype else "no dtype"]
    if name.shape_text:
        parts.append(f"block_shape={name.shape_text}")
    if name.per_channel:
        parts.append("per_channel_quant=True")
    return ",".join(parts)
