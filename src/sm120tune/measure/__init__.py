"""How long a tile takes: on a GPU, by a model, or from a recorded table."""

from __future__ import annotations
