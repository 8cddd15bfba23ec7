"""SGLang's sources for the tests: its published wheels, each fetched once and cut down to a few folders.

A tree is a folder like site-packages that holds ``sglang/`` and its ``dist-info``. Trees are kept in
``$SM120TUNE_TEST_CACHE``, by default ``sm120tune-tests`` in the user's cache folder.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock

VERSIONS = ("0.5.8.post1", "0.5.10", "0.5.12", "0.5.15", "0.5.18", "0.5.23")
"""The releases whose sources differ in what matters here, oldest first."""

KEEP = (
    "sglang/__init__.py",
    "sglang/version.py",
    "sglang/_version.py",
    "sglang/srt/layers/moe/*",
    "sglang/kernels/ops/moe/*",
    "sglang/srt/layers/quantization/fp8_kernel.py",
    "sglang/kernels/ops/quantization/fp8_kernel.py",
    "*.dist-info/METADATA",
)
LAYOUT = 2
"""Raised when KEEP changes, so that older trees are made anew."""

KEEP_MODELS = ("sglang/srt/models/*.py", "sglang/srt/configs/*.py", "sglang/srt/layers/quantization/*.py")
"""What decides how a checkpoint's experts are served; only one release is asked for it."""

# Nothing compiled is read, so one platform's wheels serve every machine.
PLATFORM = [
    "--python-version=3.12",
    "--implementation=cp",
    *("--abi=cp312", "--abi=abi3", "--abi=none"),
    *("--platform=manylinux_2_34_x86_64", "--platform=any"),
]


class WheelUnavailableError(RuntimeError):
    """A release of SGLang could not be fetched."""


def _cache_folder() -> Path:
    """Say where the trees are kept."""
    chosen = os.environ.get("SM120TUNE_TEST_CACHE")
    if chosen:
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "sm120tune-tests"


CACHE = _cache_folder()
"""Read at import, before the tests' own cache folder takes the user's place."""


def _download(version: str, folder: Path) -> Path:
    """Fetch one wheel into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *PLATFORM]
    command += ["--quiet", "--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["-d", str(folder), f"sglang=={version}"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900)
        said, failed = done.stderr + done.stdout, done.returncode != 0
    except subprocess.TimeoutExpired:
        said, failed = "no end after 900 s", True
    wheels = list(folder.glob("*.whl"))
    if failed or len(wheels) != 1:
        raise WheelUnavailableError(
            f"the tests need the source of SGLang {version}, and pip could not download its wheel:\n"
            f"{said.strip()[-2000:]}\nThey need a package index once; trees are then kept in {CACHE}"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path, keep: tuple[str, ...]) -> None:
    """Take what ``keep`` names out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if any(fnmatch.fnmatchcase(name, kept) for kept in keep)]
        archive.extractall(folder, names)


def sglang_tree(version: str) -> Path:
    """Return the folder that holds ``sglang/`` of one release; fetch it on the first call."""
    return _tree(f"sglang-{version}-{LAYOUT}", version, KEEP)


def model_sources(version: str) -> Path:
    """Return the folder that holds ``sglang/`` with one release's model classes; fetch it on the first call."""
    return _tree(f"sglang-models-{version}-1", version, KEEP_MODELS)


def _tree(name: str, version: str, keep: tuple[str, ...]) -> Path:
    tree = CACHE / name
    if tree.is_dir():
        return tree
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{tree}.lock"):
        if tree.is_dir():
            return tree
        scratch = Path(tempfile.mkdtemp(prefix=f"{tree.name}.", dir=CACHE))
        try:
            wheel = _download(version, scratch)
            _unpack(wheel, scratch / "tree", keep)
            (scratch / "tree").rename(tree)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return tree


class Trees(Mapping[str, Path]):
    """The trees of all releases by version; each is fetched when it is asked for."""

    def __getitem__(self, version: str) -> Path:
        if version not in VERSIONS:
            raise KeyError(version)
        return sglang_tree(version)

    def __iter__(self) -> Iterator[str]:
        return iter(VERSIONS)

    def __len__(self) -> int:
        return len(VERSIONS)
