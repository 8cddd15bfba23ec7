from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from sglang_copies import FOLDERS, RELEASES, config_path, kernel_path, slim_copy
from wheels import Trees

from sm120tune.errors import UserError
from sm120tune.upstream import UpstreamError, find_sglang


@pytest.mark.parametrize("release", RELEASES)
def test_site_packages_and_the_package_itself(sglang_trees: Trees, release: str) -> None:
    tree = sglang_trees[release]
    found = find_sglang(tree)
    package = (tree / "sglang").resolve()
    assert found.package == package
    assert found.kernel_file == package / kernel_path(release)
    assert found.config_file == package / config_path(release)
    assert found.configs_dir == package / FOLDERS[release][1] / "configs"
    assert found.fused_moe_file == package / FOLDERS[release][1] / "fused_moe.py"
    assert found.version == release
    assert any(found.configs_dir.glob("triton_3_*/E=*.json"))
    assert found.fused_moe_file.is_file()
    assert find_sglang(tree / "sglang") == found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("root", ["sglang", "checkout"])
def test_git_checkout(sglang_trees: Trees, tmp_path: Path, release: str, root: str) -> None:
    site = tmp_path / "site"
    slim_copy(sglang_trees[release], release, site)
    checkout = tmp_path / root
    (checkout / "python").mkdir(parents=True)
    shutil.move(site / "sglang", checkout / "python" / "sglang")
    found = find_sglang(checkout)
    assert found.package == checkout / "python" / "sglang"
    assert found.kernel_file == found.package / kernel_path(release)
    assert found.version == release
    assert find_sglang(checkout / "python") == found


def test_relative_path(sglang_trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = slim_copy(sglang_trees["0.5.23"], "0.5.23", tmp_path)
    monkeypatch.chdir(package)
    assert find_sglang(Path(".")).kernel_file == package / kernel_path("0.5.23")
    monkeypatch.chdir(tmp_path)
    assert find_sglang(Path("sglang")).kernel_file == package / kernel_path("0.5.23")


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"version.py": '__version__ = "1.2.3"\n'}, "1.2.3"),
        ({"version.py": '__version__: str = "1.2.3"\n'}, "1.2.3"),
        ({"_version.py": "__version__ = version = '1.2.3'\n__version_tuple__ = version_tuple = (1, 2, 3)\n"}, "1.2.3"),
        ({"_version.py": "version: str\n__version_tuple__ = ('9', '9')\nversion = '1.2.3'\n"}, "1.2.3"),
        # What SGLang falls back to is not its version.
        ({"version.py": 'try:\n    from x import __version__\nexcept ImportError:\n    __version__ = "0.0"\n'}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("installed", [False, True])
def test_version(
    sglang_trees: Trees, tmp_path: Path, files: dict[str, str], version: str | None, installed: bool
) -> None:
    package = slim_copy(sglang_trees["0.5.15"], "0.5.15", tmp_path)
    for name in ("version.py", "_version.py"):
        (package / name).unlink(missing_ok=True)
    for name, text in files.items():
        (package / name).write_text(text)
    if not installed:
        shutil.rmtree(tmp_path / "sglang-0.5.15.dist-info")
    assert find_sglang(tmp_path).version == (version or ("0.5.15" if installed else "unknown"))


@pytest.mark.parametrize("missing", [kernel_path("0.5.18"), config_path("0.5.18")])
def test_a_tree_without_its_files(sglang_trees: Trees, tmp_path: Path, missing: str) -> None:
    package = slim_copy(sglang_trees["0.5.18"], "0.5.18", tmp_path)
    (package / missing).unlink()
    with pytest.raises(UpstreamError) as raised:
        find_sglang(tmp_path)
    assert Path(missing).name in str(raised.value)
    assert str(package) in str(raised.value)


def test_a_folder_without_sglang(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no sglang package there") as raised:
        find_sglang(tmp_path)
    assert str(tmp_path) in str(raised.value)
    (tmp_path / "sglang").mkdir()
    with pytest.raises(UserError, match="no sglang package there"):
        find_sglang(tmp_path)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(UserError, match="pip install --no-deps sglang"):
        find_sglang()


def test_installed(sglang_trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = slim_copy(sglang_trees["0.5.10"], "0.5.10", tmp_path / "real")
    os.symlink(tmp_path / "real", tmp_path / "link")
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "link")
    found = find_sglang()
    # Through the real path, as SGLang itself names its config files.
    assert (found.package, found.version) == (package, "0.5.10")
    assert "sglang" not in sys.modules


def test_files_that_are_links(sglang_trees: Trees, tmp_path: Path) -> None:
    # Some installers link every file to a cache: SGLang then reads the configs beside the link's target.
    package = slim_copy(sglang_trees["0.5.23"], "0.5.23", tmp_path / "site")
    cached = slim_copy(sglang_trees["0.5.23"], "0.5.23", tmp_path / "cache")
    (package / config_path("0.5.23")).unlink()
    os.symlink(cached / config_path("0.5.23"), package / config_path("0.5.23"))
    found = find_sglang(tmp_path / "site")
    assert found.config_file == package / config_path("0.5.23")
    assert found.configs_dir == cached / FOLDERS["0.5.23"][1] / "configs"
