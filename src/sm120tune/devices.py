"""What is known about cards: their limits and peaks, by the name torch reports, and which of them are here."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune import _nvidia_smi
from sm120tune._device_spec import COUNTS, DeviceSpec, is_bandwidth
from sm120tune._jsonfile import parse_object, read_object
from sm120tune.errors import UserError

__all__ = [
    "DEFAULT_DEVICE_NAME",
    "DeviceSpec",
    "LocalGPU",
    "busy_reason",
    "find_device",
    "known_device",
    "known_devices",
    "load_device_spec",
    "local_gpus",
    "same_card",
]

DEFAULT_DEVICE_NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
"""The card that is meant where none is named and none is here."""

BUSY_SHARE = 0.10
"""Share of memory or of time in use above which a card does not count as idle."""

_PROBE = Path(__file__).with_name("_probe.py")


@functools.cache
def known_devices() -> tuple[DeviceSpec, ...]:
    """Return the cards that ship with the package; each one's ``source`` says where its figures come from."""
    text = importlib.resources.files("sm120tune").joinpath("data/devices.json").read_text(encoding="utf-8")
    return tuple(DeviceSpec.from_json({"name": name, **spec}) for name, spec in parse_object(text).items())


def known_device(name: str) -> DeviceSpec | None:
    """Return the shipped entry of a name, blanks or underscores and any case, or None."""
    key = _key(name)
    return next((spec for spec in known_devices() if _key(spec.name) == key), None)


def find_device(name: str) -> DeviceSpec:
    """Return the shipped entry of a name as :func:`known_device` does; raises UserError listing near names."""
    spec = known_device(name)
    if spec is not None:
        return spec
    names = {_key(known.name): known.name for known in known_devices()}
    key = _key(name)
    near = [known for known in names if key and key in known]
    near = near or difflib.get_close_matches(key, names, n=3, cutoff=0.4) or list(names)
    listed = ", ".join(names[known] for known in near)
    raise UserError(f"--device {name!r} is unknown; near names: {listed}; or describe the card with --device-spec FILE")


def load_device_spec(path: str | Path) -> DeviceSpec:
    """Read a card from a JSON object with :class:`DeviceSpec`'s field names.

    Raises UserError for a file that cannot be read, damaged JSON, or a missing, unknown or wrong field.
    """
    try:
        spec = DeviceSpec.from_json(read_object(Path(path)))
        spec.check_capability()
    except OSError as error:
        raise UserError(f"--device-spec {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"--device-spec {path}: {error}; give the fields of a DeviceSpec as one JSON object") from None
    return spec


def same_card(one: str, other: str) -> bool:
    """Whether two names are of one card, blanks or underscores and any case."""
    return _key(one) == _key(other)


def _key(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


@dataclass(frozen=True)
class LocalGPU:
    """One GPU of this machine at one moment."""

    index: int
    """Ordinal among the GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    visible_token: str
    """What a child's CUDA_VISIBLE_DEVICES must hold to see this GPU alone."""
    uuid: str
    spec: DeviceSpec
    driver: str
    """Driver version, or "unknown" without nvidia-smi."""
    free_bytes: int
    """0 where the card gave no context, as when it is full or held exclusively."""
    total_bytes: int
    utilization: int | None
    """Percent of the last second in which a kernel ran; None without nvidia-smi."""
    processes: int | None
    """Compute processes on the card as nvidia-smi counts them; None without it."""
    integrated: bool = False
    """Whether its memory is the machine's own, so that memory in use says nothing about the GPU."""


_early: list[Future[tuple[LocalGPU, ...]]] = []


def ask_early() -> None:
    """Begin to ask for the local GPUs in the background: child and parent both need seconds to import torch."""
    if _early:
        return
    answer: Future[tuple[LocalGPU, ...]] = Future()
    _early.append(answer)

    def ask() -> None:
        try:
            answer.set_result(_ask_now(60.0))
        except BaseException as error:
            answer.set_exception(error)

    # A daemon: who made a mistake on the command line does not wait for the answer.
    threading.Thread(target=ask, name="local-gpus", daemon=True).start()


def local_gpus(timeout_s: float = 60.0) -> tuple[LocalGPU, ...]:
    """Return the GPUs of this machine, from :func:`ask_early`'s answer where that was called.

    See :func:`_ask_now` for how they are asked for; raises what it raises.
    """
    return _early.pop().result() if _early else _ask_now(timeout_s)


def _ask_now(timeout_s: float) -> tuple[LocalGPU, ...]:
    """Ask a child process which GPUs CUDA sees, so that this one never touches CUDA.

    CUDA_VISIBLE_DEVICES is respected. Returns () where torch has no CUDA or there is no GPU; raises UserError where
    the child crashes or takes longer than ``timeout_s`` seconds.
    """
    # Before the child, whose own CUDA context would count.
    seen = _nvidia_smi.query(timeout_s)
    answer = _ask_probe(timeout_s)
    tokens = [token.strip() for token in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    gpus = []
    for raw in answer:
        index = int(raw["index"])
        reading = seen.get(raw["uuid"]) or _nvidia_smi.Reading(driver=_nvidia_smi.common_driver(seen))
        gpus.append(
            LocalGPU(
                index=index,
                visible_token=tokens[index] if index < len(tokens) and tokens[index] else str(index),
                uuid=raw["uuid"],
                spec=_local_spec(raw),
                driver=reading.driver,
                free_bytes=int(raw["free_bytes"]),
                total_bytes=int(raw["total_bytes"]),
                utilization=reading.utilization,
                processes=reading.processes,
                integrated=bool(raw["integrated"]),
            )
        )
    return tuple(gpus)


def busy_reason(gpu: LocalGPU) -> str | None:
    """Return one line on why a card is not idle, or None: over 10 % of its memory or of its time is in use."""
    used = (gpu.total_bytes - gpu.free_bytes) / gpu.total_bytes
    reasons = []
    if used > BUSY_SHARE and not gpu.integrated:
        reasons.append(f"{used:.0%} of its memory is in use")
    if gpu.utilization is not None and gpu.utilization > 100 * BUSY_SHARE:
        reasons.append(f"it is {gpu.utilization} % utilized")
    if not reasons:
        return None
    by = f" (compute processes: {gpu.processes})" if gpu.processes else ""
    return f"GPU {gpu.visible_token} ({gpu.spec.name}) is busy: {' and '.join(reasons)}{by}; times will be unreliable"


def _ask_probe(timeout_s: float) -> list[dict[str, Any]]:
    # -P: this package's modules must not shadow what torch imports, as a script's folder otherwise would.
    command = [sys.executable, "-P", str(_PROBE)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"torch did not list the local GPUs within {timeout_s:g} s; check nvidia-smi, or name a card with --device"
        ) from None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    last = lines[-1].strip() if lines else "no message"
    if done.returncode < 0:
        last = f"signal {-done.returncode}, {last}"
    if done.returncode == 0:
        try:
            gpus: list[dict[str, Any]] = json.loads(done.stdout)["gpus"]
        except (ValueError, KeyError, TypeError) as error:
            last = f"unreadable answer, {error}"
        else:
            return gpus
    raise UserError(f"torch could not list the local GPUs: {last}; repair it, or name a card with --device")


_FLOP_PER_CLOCK = {8: 2048, 9: 4096, 10: 8192}
"""Dense bf16 FLOP a clock and SM of the data-centre cards by major capability (8.0, 9.0, 10.x)."""

_BANDWIDTH_PER_SM = 9.5e9
"""Bytes per second: the RTX PRO 6000's 1.792 TB/s over its 188 SMs."""

_CLOCK_KHZ = 2_400_000
_LEAST_CLOCK_KHZ = 100_000
"""What reports less reports nothing."""


def _local_spec(raw: Mapping[str, Any]) -> DeviceSpec:
    """Combine torch's properties with the shipped peaks, or with an estimate that says so."""
    known = known_device(raw["name"])
    if known is not None:
        peaks = (known.bandwidth, known.bf16_flops)
        source = f"limits: torch on this machine; peaks: {known.source}"
    else:
        bandwidth, how = _estimated_bandwidth(raw)
        flops, how_flops = _estimated_flops(raw)
        peaks = (bandwidth, flops)
        source = f"limits: torch on this machine; {how}; {how_flops}"
    limits = {field: raw[field] for field in _LIMITS}
    try:
        return DeviceSpec.from_json({**limits, "bandwidth": peaks[0], "bf16_flops": peaks[1], "source": source})
    except ValueError as error:
        raise UserError(
            f"torch reports impossible limits for GPU {raw['index']}: {error}; name a card with --device"
        ) from None


_LIMITS = ("name", "capability", *COUNTS)


def _estimated_bandwidth(raw: Mapping[str, Any]) -> tuple[float, str]:
    # Two transfers a clock of the rate CUDA reports, GDDR and HBM alike; some drivers report a stand-in or nothing.
    derived = 2e3 * (raw["memory_clock_khz"] or 0) * (raw["memory_bus_bits"] or 0) / 8
    if is_bandwidth(derived):
        return derived, "derived: bandwidth from torch's memory clock and bus width"
    return raw["sm_count"] * _BANDWIDTH_PER_SM, "estimated: bandwidth as 9.5 GB/s an SM, like the RTX PRO 6000"


def _estimated_flops(raw: Mapping[str, Any]) -> tuple[float, str]:
    major, minor = raw["capability"]
    per_clock = _FLOP_PER_CLOCK.get(major, 1024) if minor == 0 or major == 10 else 1024
    if "GeForce" in raw["name"]:
        per_clock //= 2
    clock_khz = raw["clock_khz"] or 0
    if clock_khz < _LEAST_CLOCK_KHZ:
        clock_khz = _CLOCK_KHZ
    return (
        raw["sm_count"] * per_clock * clock_khz * 1e3,
        f"estimated: bf16 as {per_clock} FLOP a clock and SM at {clock_khz / 1e6:.2f} GHz",
    )
