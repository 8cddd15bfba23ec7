"""How long SGLang's CUDA quantizer of 8-bit activation groups takes over some numbers of rows.

    python bench/quantizer.py

Its time depends on how many groups there are modulo 16, not only on how many: sorted rows with their padding (USE_TMA
on a down row) often make an odd number. Needs a GPU and sgl-kernel.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import torch

COLUMNS, GROUP = 768, 128
ROWS = (32_768, 40_880, 40_888, 40_892, 40_894, 40_895, 40_896, 131_072, 139_199, 139_200)
CALLS = 20


def quantize_us(kernel: Any, rows: int) -> float:
    """Return the µs of one call over bf16 ``[rows, COLUMNS]``, from a warm cache."""
    x = torch.randn(rows, COLUMNS, dtype=torch.bfloat16, device="cuda")
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty((rows, COLUMNS // GROUP), dtype=torch.float32, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        kernel(x, codes, scales, GROUP, 1e-10, -448.0, 448.0)
    begin.record()
    for _ in range(CALLS):
        kernel(x, codes, scales, GROUP, 1e-10, -448.0, 448.0)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS * 1e3


def main() -> int:
    """Print one line for each number of rows."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    kernel = importlib.import_module("sgl_kernel").sgl_per_token_group_quant_8bit
    print("| rows | groups | groups modulo 16 | µs |\n|---:|---:|---:|---:|")
    for rows in ROWS:
        groups = rows * COLUMNS // GROUP
        print(f"| {rows:,} | {groups:,} | {groups % 16} | {quantize_us(kernel, rows):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
