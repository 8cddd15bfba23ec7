"""Find an SGLang checkout or installation, in any of its three layouts."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from sm120tune.errors import UserError
from sm120tune.upstream.errors import UpstreamError

_KERNEL_FOLDERS = (
    "kernels/ops/moe",
    "srt/layers/moe/moe_runner/triton_utils",
    "srt/layers/moe/fused_moe_triton",
)
_CONFIG_FOLDERS = _KERNEL_FOLDERS[1:]
_QUANTIZE_FOLDERS = ("kernels/ops/quantization", "srt/layers/quantization")
_QUANTIZE_NAME = "fp8_kernel.py"
_KERNEL_NAME = "fused_moe_triton_kernels.py"
_CONFIG_NAME = "fused_moe_triton_config.py"

HOW_TO_GET_SGLANG = "pip install --no-deps sglang"


@dataclass(frozen=True)
class SGLangTree:
    """One SGLang source tree: the package folder and the files that matter in it."""

    package: Path
    """The ``sglang`` package folder itself."""
    version: str
    kernel_file: Path
    config_file: Path

    @property
    def configs_dir(self) -> Path:
        """Folder with the ``triton_X_Y_Z`` folders that the lookup reads by default."""
        # SGLang asks for its own realpath, which differs where an installer made links to its cache.
        return self.config_file.resolve().parent / "configs"

    @property
    def quantize_file(self) -> Path:
        """Where SGLang keeps the kernel that quantizes activations; raises UpstreamError where it is not there."""
        return _first(self.package, _QUANTIZE_FOLDERS, _QUANTIZE_NAME)

    @property
    def fused_moe_file(self) -> Path:
        """SGLang's own fused_moe, which decides about TMA and the launch order."""
        return self.config_file.parent / "fused_moe.py"

    def module_of(self, file: Path) -> str:
        """Return the name by which Python imports one of the tree's files."""
        return ".".join(file.relative_to(self.package.parent).with_suffix("").parts)


def find_sglang(path: Path | None = None) -> SGLangTree:
    """Locate SGLang: under ``path`` (a checkout, site-packages or the package), else the importable one.

    Raises UserError when there is none, UpstreamError when the tree lacks the kernel or the lookup.
    """
    if path is not None:
        package = _package_under(path)
        if package is None:
            raise UserError(
                f"--sglang {path}: no sglang package there; give a checkout, a site-packages folder or the package"
            )
        return _tree(package)
    spec = importlib.util.find_spec("sglang")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise UserError(f"SGLang not found; get its source with: {HOW_TO_GET_SGLANG} (or give --sglang PATH)")
    return _tree(Path(locations[0]).resolve())


def _package_under(path: Path) -> Path | None:
    for candidate in (path / "python" / "sglang", path / "sglang", path):
        if candidate.name == "sglang" and (candidate / "srt").is_dir():
            return candidate.resolve()
    resolved = path.resolve()
    return resolved if (resolved / "srt").is_dir() else None


def _first(package: Path, folders: tuple[str, ...], name: str) -> Path:
    for folder in folders:
        file = package / folder / name
        if file.is_file():
            return file
    raise UpstreamError(f"{package}: no {name} in any known folder; this SGLang is older or newer than supported")


def _tree(package: Path) -> SGLangTree:
    return SGLangTree(
        package=package,
        version=_version(package),
        kernel_file=_first(package, _KERNEL_FOLDERS, _KERNEL_NAME),
        config_file=_first(package, _CONFIG_FOLDERS, _CONFIG_NAME),
    )


def _version(package: Path) -> str:
    for name in ("version.py", "_version.py"):
        file = package / name
        if file.is_file():
            # setuptools-scm writes: __version__ = version = '0.5.23'
            found = re.search(r"^(?:__version__|version)\b[^'\"\n]*=\s*['\"]([^'\"]+)", file.read_text(), re.MULTILINE)
            if found:
                return found.group(1)
    for metadata in sorted(package.parent.glob("sglang-*.dist-info/METADATA")):
        found = re.search(r"^Version: (\S+)", metadata.read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return "unknown"
