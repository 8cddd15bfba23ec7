"""Expert choices that a server made, read from a file."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sm120tune.errors import UserError

_SHOWN_DIGEST = 8
_LARGEST_ID = 2**31 - 1
"""The kernels read int32."""


@functools.lru_cache(maxsize=4)
def recorded_ids(path: str) -> npt.NDArray[np.int64]:
    """Return the global expert ids ``[tokens, topk]`` of a ``.npy`` file, or of a ``.pt`` file that holds one tensor.

    Raises UserError for a file that cannot be read or holds anything else.
    """
    try:
        ids = _load(Path(path))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--routing file:{path} cannot be read: {' '.join(str(error).split())[:160]}") from None
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"--routing file:{path} holds {ids.dtype} {list(ids.shape)}, not integer topk_ids [tokens, topk]"
        )
    for wrong in (ids.min(), ids.max()):
        if not 0 <= wrong <= _LARGEST_ID:
            raise UserError(f"--routing file:{path} holds the id {wrong}; record the router's own ids")
    ids = ids.astype(np.int64)
    twice = np.flatnonzero((np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1))
    if twice.size:
        raise UserError(
            f"--routing file:{path} gives token {twice[0]} an expert twice ({ids[twice[0]].tolist()}); record topk_ids "
            "as the router made them"
        )
    ids.setflags(write=False)
    return ids


def digest_of(path: str) -> str:
    """Return a short hash of a file's content, which tells a run that the choices are others now."""
    recorded_ids(path)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:_SHOWN_DIGEST]


def draw(path: str, m: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return M consecutive recorded tokens from a random start on; past the end it goes on from the first."""
    ids = recorded_ids(path)
    return ids[(int(rng.integers(len(ids))) + np.arange(m)) % len(ids)]


def _load(path: Path) -> npt.NDArray[Any]:
    if path.suffix == ".npy":
        return np.asarray(np.load(path, allow_pickle=False))
    if path.suffix == ".pt":
        import torch

        held = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(held, torch.Tensor):
            raise UserError(f"--routing file:{path} holds a {type(held).__name__}; save the one tensor topk_ids alone")
        return np.asarray(held.numpy())
    raise UserError(f"--routing file:{path}: give a .npy or .pt file with topk_ids [tokens, topk]")
