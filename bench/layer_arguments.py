"""A layer's numbers as arguments of the scripts here, named as the main command names them."""

from __future__ import annotations

import argparse
from dataclasses import fields

from sm120tune.cli.targets import LayerOptions
from sm120tune.problem import MoEProblem


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them; the four that make a layer must be given."""
    for name in ("--experts", "--inter", "--hidden", "--topk"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--shared-experts", type=int, default=0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--block-shape", help="for example 128,128")
    parser.add_argument("--per-channel", action="store_true")
    parser.add_argument("--group-size", type=int)


def layer_of(args: argparse.Namespace) -> MoEProblem:
    """Return the layer on one GPU; raises UserError for what no server could run."""
    known = {entry.name for entry in fields(LayerOptions)}
    given = {name: value for name, value in vars(args).items() if name in known}
    (target,) = LayerOptions(**{**given, "tp": (args.tp,)}).targets()
    return target.problem
