from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import InProcess, files_under

PAIR = "E=256,N=256,device_name=NVIDIA_H200"
SHIPPED_OUTPUT = Path(__file__).resolve().parents[2] / "generated_configs"
FORCE = "--force"
"""The pair was measured with Triton 3.6.0, which need not be the one that runs the tests."""


@pytest.fixture
def site(sglang_0_5_15: Path, command: InProcess) -> Path:
    """Return a copy of the release that the project's own pair was tuned for."""
    shutil.copytree(sglang_0_5_15, command.line.folder / "site")
    return command.line.folder / "site"


@pytest.fixture
def output(command: InProcess) -> Path:
    """Return a copy of that pair."""
    for path in SHIPPED_OUTPUT.glob(f"measured/*/*/{PAIR}*.json"):
        target = command.line.output / path.relative_to(SHIPPED_OUTPUT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return command.line.output


def test_install_list_uninstall(command: InProcess, site: Path, output: Path) -> None:
    before = files_under(command.line.folder)
    tree = ["--sglang", str(site)]
    dry = command.run("install", str(output), *tree, FORCE, "--dry-run")
    assert (dry.code, "would install" in dry.out) == (0, True)
    assert files_under(command.line.folder) == before
    done = command.run("install", str(output), *tree, FORCE)
    assert done.code == 0, done.err
    assert f"{PAIR}.json" in done.out
    assert done.out.count("proof: SGLang 0.5.15's own lookup returns exactly these 20 rows") == 1
    again = command.run("install", str(output), *tree, FORCE)
    assert (again.code, "nothing changed" in again.out) == (0, True)
    listed = command.run("list", *tree)
    assert listed.code == 0
    for word in (PAIR, "measured", "0.1.0"):
        assert word in listed.out
    removed = command.run("uninstall", f"{PAIR}_down.json", *tree)
    assert (removed.code, removed.err) == (0, "")
    assert "uninstalled" in removed.out
    assert files_under(command.line.folder) == before
    assert "nothing is installed" in command.run("list", *tree).out
    assert "nothing is installed" in command.run("uninstall", "--all", *tree).out


def test_json_is_one_document_on_stdout(command: InProcess, site: Path, output: Path) -> None:
    tree = ["--sglang", str(site), "--json"]
    done = command.run("install", str(output), *tree, FORCE).document
    (pair,) = done["pairs"]
    assert (pair["state"], pair["kind"], pair["pickup"]["rows"]) == ("installed", "measured", 20)
    assert all(Path(path).is_file() for path in pair["files"])
    (item,) = command.run("list", *tree).document["pairs"]
    assert item["file"] == pair["files"][0]
    assert item["tuned_for"]["sglang"] == "0.5.15"
    assert item["changed"] == []
    gone = command.run("uninstall", "--all", *tree).document
    assert gone["uninstalled"] == [pair["files"]]


def test_a_config_folder_is_explained(command: InProcess, site: Path, output: Path) -> None:
    folder = command.line.folder / "folder"
    folder.mkdir()
    options = ["--sglang", str(site), "--config-dir", str(folder)]
    done = command.run("install", str(output), *options, FORCE)
    assert done.code == 0, done.err
    assert "instead of its whole shipped tree" in done.err
    assert "--fill" in done.err
    assert f"SGLANG_MOE_CONFIG_DIR={folder}" in done.out
    filled = command.run("install", str(output), *options, FORCE, "--fill")
    assert "shipped files" in filled.out
    assert "instead of" not in filled.err
    assert "stale" not in command.run("list", "--config-dir", str(folder)).err
    # Nothing of SGLang is needed to clean up.
    assert command.run("uninstall", "--all", "--config-dir", str(folder)).code == 0
    assert list(folder.iterdir()) == []


def test_a_pair_that_is_not_picked_up_ends_with_1(command: InProcess, site: Path, output: Path) -> None:
    (file,) = site.rglob("fused_moe_triton_config.py")
    found = "return {int(key): val for key, val in json.load(f).items()}"
    file.write_text(file.read_text().replace(found, "return None"))
    before = files_under(command.line.folder)
    done = command.run("install", str(output), "--sglang", str(site), FORCE)
    assert (done.code, done.out) == (1, "")
    assert "put back" in done.err
    assert done.err.count("\n") == 1
    assert files_under(command.line.folder) == before


def test_one_line_and_nothing_changed(command: InProcess, site: Path, output: Path) -> None:
    tree = ["--sglang", str(site)]
    up = output / "measured" / "configs" / "triton_3_6_0" / f"{PAIR}.json"
    command.refused("install", *tree, words=["FILE"])
    command.refused("install", str(output / "none"), *tree, words=["none", "no such"])
    command.refused("install", str(up), "--sglang", str(output), words=["no sglang package"])
    command.refused("install", str(up), *tree, FORCE, "--fill", words=["--config-dir"])
    command.refused("uninstall", *tree, words=["--all"])
    command.refused("uninstall", "--all", f"{PAIR}.json", *tree, words=["--all"])
    command.refused("uninstall", f"{PAIR}.json", *tree, words=[PAIR, "not installed"])
    command.refused("list", "--config-dir", str(output / "none"), words=["--config-dir"])
    provenance = output / "measured" / "provenance" / "triton_3_6_0" / f"{PAIR}.json"
    record = json.loads(provenance.read_text())
    record["rows"][0]["chosen"]["down"]["BLOCK_SIZE_M"] = 64
    provenance.write_text(json.dumps(record))
    command.refused("install", str(up), *tree, FORCE, words=["damaged", "BLOCK_SIZE_M"])


def test_a_set_config_folder_is_pointed_out(
    command: InProcess, site: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "/elsewhere")
    done = command.run("install", str(output), "--sglang", str(site), FORCE)
    assert done.code == 0
    assert "SGLANG_MOE_CONFIG_DIR=/elsewhere" in done.err
