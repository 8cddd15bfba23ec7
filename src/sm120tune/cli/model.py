"""The ``--model`` option, which tune and check share: what it excludes, and when it ends a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from sm120tune.errors import UserError
from sm120tune.models import MoEModel, load_model
from sm120tune.quantization import DTYPES

_F = TypeVar("_F", bound=Callable[..., Any])

_BROUGHT = (
    "experts", "inter", "hidden", "topk", "dtype", "shared_experts", "block_shape", "per_channel", "group_size",
    "zero_points", "no_gate",
)  # fmt: skip
"""Options whose values a model brings itself."""


def model_options(command: _F) -> _F:
    """Add ``--model`` and ``--force``."""
    model = click.option(
        "--model",
        metavar="SOURCE",
        help="Checkpoint instead of the numbers: its folder, its config.json, or a preset such as GLM-5.  "
        "[this or the numbers]",
    )
    force = click.option(
        "--force", is_flag=True, help="Go on with a --model whose experts SGLang runs without this kernel."
    )
    return model(force(command))


def given_model(source: str | None, *, force: bool) -> MoEModel | None:
    """Load what ``--model`` names; raises UserError for numbers beside it and for experts that run elsewhere."""
    check_force(source, force=force)
    if source is None:
        return None
    check_no_numbers("--model")
    model = load_model(source)
    check_served_here(model, force=force)
    return model


def check_force(source: str | None, *, force: bool) -> None:
    """Raise UserError for ``--force`` without a model."""
    if force and source is None:
        raise UserError("--force is about the experts of a --model; give one or drop --force")


def check_no_numbers(source: str, *more: str) -> None:
    """Raise UserError where a number stands beside what brings its own."""
    context = click.get_current_context()
    for name in (*_BROUGHT, *more):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UserError(f"{source} brings its own --{name.replace('_', '-')}; drop one of the two")


def check_served_here(model: MoEModel, *, force: bool) -> None:
    """Raise UserError for experts that SGLang runs without its Triton kernel, unless forced."""
    if model.served_elsewhere is not None and not force:
        raise UserError(
            f"{model.name}: SGLang runs these experts in {model.served_elsewhere}; a file for its Triton kernel "
            "changes nothing. --force goes on, for a server that is told to use the Triton kernel"
        )


def require_tunable(model: MoEModel) -> None:
    """Raise UserError for experts that cannot be tuned yet."""
    if model.dtype not in DTYPES:
        raise UserError(
            f"{model.name}: its experts are {model.dtype}, which cannot be tuned yet ({', '.join(DTYPES)} can); "
            "the check command takes it"
        )
    if model.served_elsewhere is not None and model.dtype.endswith("a16") and model.block_shape is None:
        # SGLang's grouped kernel is another one, and the file name does not say the group.
        raise UserError(
            f"{model.name}: its config names no group size for its {model.dtype} experts; give the numbers with "
            "--dtype, --group-size and --zero-points"
        )


def model_lines(model: MoEModel) -> list[str]:
    """Return what a run says about its model, before any work."""
    lines = [f"model: {model}", *(f"note: {note}" for note in model.notes)]
    if model.served_elsewhere is not None:
        lines.append(f"note: forced; by default SGLang runs these experts in {model.served_elsewhere}")
    return lines
