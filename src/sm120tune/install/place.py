"""Where pairs are installed: a tree of SGLang, or a folder for SGLANG_MOE_CONFIG_DIR."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm120tune.errors import UserError
from sm120tune.upstream import SGLangTree, find_sglang
from sm120tune.upstream.lookup import ConfigLookup, Target

_NO_DIRECTORY_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What file systems answer that cannot lock a folder (NFS)."""


@dataclass(frozen=True)
class Place:
    """One folder that holds ``configs``, and the SGLang that reads it."""

    base: Path
    tree: SGLangTree
    config_dir: Path | None
    """``base``, where SGLang reads it through SGLANG_MOE_CONFIG_DIR only."""
    triton_version: str | None
    """Of the Triton beside SGLang, else of this interpreter's; None where there is neither."""

    @property
    def configs(self) -> Path:
        """Folder of the ``triton_X_Y_Z`` folders."""
        return self.base / "configs"

    def lookup(self, device_name: str, triton_version: str) -> ConfigLookup:
        """Return SGLang's own lookup over this folder; raises UpstreamError for a source that it cannot load."""
        # Only SGLang's built-in default depends on the shared memory, and it is not asked for.
        return ConfigLookup(self.tree, Target(device_name, 0, triton_version), config_dir=self.config_dir)

    def __str__(self) -> str:
        return f"{self.configs} (SGLang {self.tree.version})"


def find_base(sglang: Path | None, config_dir: Path | None) -> Path:
    """Find the folder that holds ``configs``; raises UserError where there is none.

    A ``config_dir`` needs no SGLang.
    """
    if config_dir is not None:
        if not config_dir.is_dir():
            raise UserError(f"--config-dir {config_dir}: no such folder; make it first, or give another")
        return config_dir.resolve()
    tree = find_sglang(sglang)
    if not tree.configs_dir.is_dir():
        raise UserError(f"{tree.package}: no folder {tree.configs_dir}; this SGLang came without its configs")
    return tree.configs_dir.parent


def find_place(sglang: Path | None, config_dir: Path | None) -> Place:
    """Find the folder to install into; raises UserError where there is no SGLang or no such folder."""
    base = find_base(sglang, config_dir)
    tree = find_sglang(sglang)
    return Place(base, tree, None if config_dir is None else base, _triton_version(tree))


def _triton_version(tree: SGLangTree) -> str | None:
    files = [tree.package.parent / "triton" / "__init__.py"]
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        files.append(Path(spec.origin))
    for file in files:
        if file.is_file():
            found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
            if found:
                return found.group(1)
    return None


@contextmanager
def locked(base: Path, timeout_s: float = 60.0) -> Iterator[None]:
    """Hold ``base`` against other installs; raises UserError where another holds it for ``timeout_s`` seconds.

    The folder itself is locked, since a lock file would be a trace in SGLang's tree. A file system that cannot do
    that goes without.
    """
    try:
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"cannot open {base}: {error.strerror or error}") from None
    try:
        _acquire(descriptor, base, timeout_s)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, base: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"another sm120tune has been changing {base} for {timeout_s:g} s; wait for it"
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno in _NO_DIRECTORY_LOCKS:
                return
            raise UserError(f"cannot lock {base}: {error.strerror or error}") from None
