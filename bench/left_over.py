"""Where SGLang's built-in default leaves most on a real RTX PRO 6000: measured time over the card's floor.

    python bench/left_over.py bench/field/*.parquet

The floor is the least bytes and operations of both GEMMs and the activation over the card's specified peaks
(sm120tune.measure.roofline); nothing can be faster, and no tile reaches it. Balanced routing, ep 1, tp 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from field_data import Field, read_field

from sm120tune.devices import DEFAULT_DEVICE_NAME, DeviceSpec, find_device

SIZES = (16, 64, 256, 512, 1024, 4096, 16384)


def over_floor(field: Field, card: DeviceSpec) -> npt.NDArray[np.float64]:
    """Return the measured time of every row over the card's floor."""
    element = np.where(field.fp8 > 0, 1.0, 2.0)
    weights = 3 * field.touched * field.intermediate * field.hidden * element
    activations = field.tokens * field.hidden * element + field.rows * (
        field.intermediate * (4 + 2 + element) + field.hidden * 2
    )
    flops = 6 * field.rows * field.intermediate * field.hidden
    floor = np.maximum((weights + activations) / card.bandwidth, flops / (card.bf16_flops * 2 / element)) * 1e6
    return np.asarray(field.us / floor)


def whole_layers(field: Field) -> npt.NDArray[np.bool_]:
    """Return which rows are of a layer on one GPU under balanced routing, with default tiles."""
    shard = np.array([float(name.split("-")[1]) for name in field.model]) == field.intermediate
    return np.asarray(shard & (field.ep == 1) & ~field.skewed.astype(bool) & ~field.tuned.astype(bool))


def main() -> int:
    """Print one line a model and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("field", type=Path)
    field, card = read_field(parser.parse_args().field), find_device(DEFAULT_DEVICE_NAME)
    times, whole = over_floor(field, card), whole_layers(field)
    print("| hidden-inter-topk-experts | dtype | " + " | ".join(f"M={m}" for m in SIZES) + " |")
    print("|---|---|" + "---:|" * len(SIZES))
    for fp8, dtype in ((0, "bf16"), (1, "fp8 block")):
        for model in sorted(set(field.model[whole & (field.fp8 == fp8)].tolist())):
            chosen = whole & (field.fp8 == fp8) & (field.model == model)
            over = [times[chosen & (field.m == m)] for m in SIZES]
            print(f"| {model} | {dtype} | " + " | ".join(f"{o[0]:.2f}" if len(o) else "" for o in over) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
