"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sm120tune.errors import UserError
from sm120tune.quantization import DTYPES, GROUP_SIZES

_F = TypeVar("_F", bound=Callable[..., Any])


def place_options(command: _F) -> _F:
    """Add ``--sglang`` and ``--config-dir``: where the configs that SGLang reads lie."""
    config_dir = click.option(
        "--config-dir",
        type=click.Path(path_type=Path),
        help="Folder for SGLANG_MOE_CONFIG_DIR instead.  [default: SGLang's own tree]",
    )
    sglang = click.option(
        "--sglang",
        type=click.Path(path_type=Path),
        help="SGLang checkout, site-packages or package.  [default: the importable one]",
    )
    return sglang(config_dir(command))


def quantization_options(command: _F) -> _F:
    """Add the options that say how weights and activations are quantized."""
    options = (
        click.option("--dtype", default="bf16", help=f"One of {', '.join(DTYPES)}."),
        click.option(
            "--block-shape", help="Quantization block of a block-wise checkpoint, for example 128,128.  [default: none]"
        ),
        click.option("--per-channel", is_flag=True, help="The checkpoint is quantized per channel."),
        click.option(
            "--group-size", type=int, help="Group of int4 and grouped int8 weights, for example 128.  [default: none]"
        ),
        click.option("--zero-points", is_flag=True, help="The groups have zero points (AWQ, asymmetric GPTQ)."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def scale_shape(block: str | None, group_size: int | None) -> tuple[int, int] | None:
    """Return SGLang's ``block_shape`` of ``--block-shape`` or ``--group-size``; raises UserError for both."""
    if group_size is None:
        return block_shape(block)
    if block is not None:
        raise UserError("--block-shape and --group-size exclude each other; give the one that the checkpoint has")
    if group_size not in GROUP_SIZES:
        raise UserError(f"--group-size {group_size} is unknown; choose one of {', '.join(map(str, GROUP_SIZES))}")
    return (0, group_size)


def block_shape(text: str | None) -> tuple[int, int] | None:
    """Read ``128,128`` or ``[128, 128]``; raises UserError for anything else."""
    if text is None:
        return None
    parts = text.strip("[]").split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--block-shape {text!r} is no pair of positive integers; write for example 128,128")
    return (int(parts[0]), int(parts[1]))
