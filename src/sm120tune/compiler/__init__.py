"""One candidate to one binary, with exact resources or a classified failure; no GPU is needed."""

from __future__ import annotations

from sm120tune.compiler.facts import TileFacts
from sm120tune.compiler.spec import ActivationVariant, CompileSpec, Limits

__all__ = ["ActivationVariant", "CompileSpec", "Limits", "TileFacts"]
