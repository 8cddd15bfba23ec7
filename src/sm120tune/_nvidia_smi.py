"""What nvidia-smi adds to torch: driver, utilization and processes. Everything is optional: without it, unknown."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

UNKNOWN_DRIVER = "unknown"


@dataclass(frozen=True)
class Reading:
    """One GPU's row; None where nvidia-smi does not say."""

    driver: str = UNKNOWN_DRIVER
    utilization: int | None = None
    """Percent."""
    processes: int | None = None


def query(timeout_s: float) -> dict[str, Reading]:
    """Return the readings by UUID ("GPU-..."); {} without nvidia-smi or where it fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    rows = _table(program, "--query-gpu=uuid,driver_version,utilization.gpu", timeout_s)
    apps = _table(program, "--query-compute-apps=gpu_uuid,pid", timeout_s)
    counts = None if apps is None else Counter(row[0] for row in apps)
    return {
        uuid: Reading(
            driver=driver,
            # "[N/A]" on some cards and under MIG.
            utilization=int(utilization) if utilization.isdecimal() else None,
            processes=None if counts is None else counts[uuid],
        )
        for uuid, driver, utilization in (row for row in rows or [] if len(row) == 3)
    }


def common_driver(readings: Mapping[str, Reading]) -> str:
    """Return the driver version, which all GPUs of a machine share."""
    return next((reading.driver for reading in readings.values()), UNKNOWN_DRIVER)


_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "max_sm_mhz": "clocks.max.sm",
    "max_memory_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def clocks(uuid: str, timeout_s: float) -> dict[str, float] | None:
    """Return one GPU's clocks, power and temperature at this moment; None where nvidia-smi does not say.

    A figure that the card does not report is left out.
    """
    program = shutil.which("nvidia-smi")
    rows = None if program is None else _table(program, f"--query-gpu=uuid,{','.join(_CLOCKS.values())}", timeout_s)
    row = next((row for row in rows or [] if row[0] == uuid and len(row) == 1 + len(_CLOCKS)), None)
    if row is None:
        return None
    read = {name: _number(cell) for name, cell in zip(_CLOCKS, row[1:], strict=True)}
    return {name: value for name, value in read.items() if value is not None} or None


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        # "[N/A]", "[Not Supported]"
        return None
    return value if math.isfinite(value) else None


def _table(program: str, what: str, timeout_s: float) -> list[list[str]] | None:
    command = [program, what, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout_s, check=True, stdin=subprocess.DEVNULL, text=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
