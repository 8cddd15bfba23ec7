"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

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
