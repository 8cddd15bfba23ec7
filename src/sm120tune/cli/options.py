"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from sm120tune.errors import UserError
from sm120tune.problem import check_batch_sizes
from sm120tune.quantization import DTYPES, GROUP_SIZES
from sm120tune.upstream import SGLangTree, UpstreamError, find_sglang

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


def sglang_if_there(path: Path | None) -> SGLangTree | None:
    """Return the tree that a person named, else the importable one, else None; raises UserError for a wrong path."""
    if path is not None:
        return find_sglang(path)
    try:
        return find_sglang()
    except UpstreamError:
        raise
    except UserError:
        return None


def quantization_options(command: _F) -> _F:
    """Add the options that say how weights and activations are quantized."""
    return click.option("--dtype", default="bf16", help=f"One of {', '.join(DTYPES)}.")(scale_options(command))


def scale_options(command: _F) -> _F:
    """Add the options that say what shares one weight scale, and whether experts have a gate."""
    options = (
        click.option(
            "--block-shape", help="Block of a block-wise checkpoint, for example 128,128.  [default: no blocks]"
        ),
        click.option("--per-channel", is_flag=True, help="The checkpoint is quantized per channel."),
        click.option(
            "--group-size",
            type=int,
            help="Group of int4 and grouped int8 weights, for example 128.  [default: no groups]",
        ),
        click.option("--zero-points", is_flag=True, help="The groups have zero points (AWQ, asymmetric GPTQ)."),
        click.option(
            "--no-gate", is_flag=True, help="Experts without a gate projection and with squared ReLU (Nemotron-H)."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def calibration_option(command: _F) -> _F:
    """Add ``--calibration``: what :func:`sm120tune.calibrate.applied.calibrated` is given."""
    return click.option(
        "--calibration",
        metavar="FILE",
        help="Calibration of the card for the cost model, or none.  [default: the one that calibrate --apply kept]",
    )(command)


def check_folder(option: str, folder: Path, *, writes: bool) -> None:
    """Raise UserError where a folder cannot be made or, if the command ``writes``, written to."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink()), None)
    if there is not None and not there.is_dir():
        raise UserError(f"{option} {folder}: {there} is a file; give a folder")
    if there is not None and writes and not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{option} {folder}: {there} cannot be written to; choose another folder")


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
    sizes = integers("--block-shape", text.strip("[]"), "128,128")
    if len(sizes) != 2 or min(sizes) < 1:
        raise UserError(f"--block-shape {text!r} is no pair of positive integers; write for example 128,128")
    return (sizes[0], sizes[1])


def layer_options(dtypes: Sequence[str], hidden: int | str, topk: int | str) -> Callable[[_F], _F]:
    """Add a model's numbers, all None where not given; ``hidden`` and ``topk`` are what is assumed then."""
    options = (
        click.option("--experts", type=int, help="Routed experts of the model."),
        click.option("--tp", type=int, help="Tensor parallel size.  [default: 1]"),
        click.option("--ep", type=int, help="Expert parallel size.  [default: 1]"),
        click.option("--inter", type=int, help="moe_intermediate_size of the model, before any split."),
        click.option("--hidden", type=int, help=f"Hidden size.  [default: {hidden}]"),
        click.option("--topk", type=int, help=f"Experts per token.  [default: {topk}]"),
        click.option("--dtype", help=f"One of {', '.join(dtypes)}.  [default: bf16]"),
        click.option("--shared-experts", type=int, help="Shared experts fused into the routed ones.  [default: 0]"),
    )

    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def given(value: object) -> bool:
    """Whether an option without a default was given."""
    return value is not None and value is not False


def given_or(value: int | None, default: int) -> int:
    """Return an option's value, 0 too, or the default where it was not given."""
    return default if value is None else value


def batch_sizes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Read ``--batch-sizes``, () where it was not given; raises UserError for what is no list of distinct sizes."""
    if value is None:
        return ()
    return check_batch_sizes(integers("--batch-sizes", value, "1,64,4096"))


def integers(option: str, text: str, example: str) -> tuple[int, ...]:
    """Read integers with commas between; raises UserError that shows the example."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} {text!r} is no list of integers; write for example {example}") from None
