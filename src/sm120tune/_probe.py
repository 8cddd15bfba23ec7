"""Asks CUDA about the local GPUs. Run as a script in a child, so that its parent never holds a CUDA context.

Prints one JSON document: ``{"gpus": [...]}`` with torch's device properties, sizes in bytes, clocks in kHz. It is
run by path and not imported, hence no import of the package.
"""

from __future__ import annotations

import json
import os
from typing import Any


def _memory(torch: Any, index: int) -> tuple[int, int] | None:
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:
        # A full or exclusively held card gives no context; that is the caller's "busy", not a crash.
        return None
    return int(free), int(total)


def _describe(torch: Any, index: int) -> dict[str, Any]:
    props = torch.cuda.get_device_properties(index)
    memory = _memory(torch, index)
    uuid = str(getattr(props, "uuid", ""))
    return {
        "index": index,
        "name": props.name,
        "uuid": uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
        "capability": [props.major, props.minor],
        "sm_count": props.multi_processor_count,
        "shared_memory_per_block": props.shared_memory_per_block_optin,
        "shared_memory_per_sm": props.shared_memory_per_multiprocessor,
        "registers_per_sm": props.regs_per_multiprocessor,
        "max_warps_per_sm": props.max_threads_per_multi_processor // 32,
        "l2_bytes": props.L2_cache_size,
        "memory_bytes": props.total_memory,
        "integrated": bool(getattr(props, "is_integrated", 0)),
        # Older releases of torch do not have these three.
        "clock_khz": getattr(props, "clock_rate", 0),
        "memory_clock_khz": getattr(props, "memory_clock_rate", 0),
        "memory_bus_bits": getattr(props, "memory_bus_width", 0),
        "free_bytes": memory[0] if memory else 0,
        "total_bytes": memory[1] if memory else props.total_memory,
    }


def main() -> None:
    """Print the document on the real standard output; whatever torch prints goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    gpus: list[dict[str, Any]] = []
    if torch.version.cuda is not None and torch.cuda.is_available():
        gpus = [_describe(torch, index) for index in range(torch.cuda.device_count())]
    with answer:
        json.dump({"gpus": gpus}, answer)


if __name__ == "__main__":
    main()
