"""The two folders of configs that SGLang reads in turn: without the pair, and with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sm120tune.errors import UserError
from sm120tune.install import Place
from sm120tune.install.originals import originals
from sm120tune.install.pair import ConfigPair


@dataclass(frozen=True)
class Folders:
    """What goes into SGLANG_MOE_CONFIG_DIR on either side, None for SGLang's own tree, and the pair's two files."""

    without: Path
    with_pair: Path | None
    up_path: Path
    down_path: Path


@contextmanager
def both_sides(pair: ConfigPair, place: Place, *, installed: bool) -> Iterator[Folders]:
    """Yield both folders for as long as they are needed.

    Both have every config that ``place`` serves. Without the pair, installed ones and identical copies of this one
    are out, and what they replaced is in. An ``installed`` pair is read where it is.
    """
    with TemporaryDirectory(prefix="sm120tune-verify-") as name:
        root = Path(os.path.realpath(name))
        with_pair = place.config_dir if installed else root / "with"
        try:
            served = _served_without(pair, place)
            _write(root / "without", served)
            if not installed:
                _write(root / "with", {**served, **dict(zip(pair.targets[:2], pair.contents[:2], strict=True))})
        except OSError as error:
            raise UserError(f"cannot copy {place.configs} to {root}: {error.strerror or error}") from None
        up_path, down_path = ((place.base if installed else root / "with") / target for target in pair.targets[:2])
        yield Folders(root / "without", with_pair, up_path, down_path)


def _served_without(pair: ConfigPair, place: Place) -> dict[str, bytes | None]:
    """Return the config files by path below the folder; None for a folder without files, whose name may matter."""
    before = originals(place.base)
    ours = dict(zip((Path(target).name for target in pair.targets[:2]), pair.contents[:2], strict=True))
    # Without a folder named configs every lookup raises.
    served: dict[str, bytes | None] = {"configs/": None}
    served |= {f"configs/{folder.name}/": None for folder in place.configs.glob("triton_*")}
    for path in sorted(place.configs.glob("triton_*/*.json")):
        source = before.get(path, path)
        content = source.read_bytes() if source is not None else None
        if content is not None and content != ours.get(path.name):
            served[f"configs/{path.parent.name}/{path.name}"] = content
    return served


def _write(folder: Path, files: dict[str, bytes | None]) -> None:
    for name, content in files.items():
        path = folder / name
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)
