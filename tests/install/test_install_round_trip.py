from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from made_pairs import CARD, FORCE, PROBLEM, Maker, copied, picture, rows
from wheels import Trees

from sm120tune.errors import UserError
from sm120tune.install import find_place, list_installed, uninstall
from sm120tune.install.actions import InstallOptions, install
from sm120tune.install.manifest import MANIFEST
from sm120tune.install.pair import find_pairs
from sm120tune.problem import MoEProblem
from sm120tune.resolve import _own_files
from sm120tune.upstream.lookup import ConfigLookup, Target
from sm120tune.upstream.source import load_kernels

RELEASES = ("0.5.8.post1", "0.5.15", "0.5.23")


@pytest.fixture(params=RELEASES)
def each(request: pytest.FixtureRequest, sglang_trees: Trees, tmp_path: Path) -> Maker:
    """Return a writer of pairs for a copy of each release."""
    return Maker(copied(sglang_trees[request.param], tmp_path), tmp_path / "output")


def shipped_problem(place: Any) -> dict[str, Any]:
    """Return what a bf16 pair takes that replaces a file which the release ships."""
    for path in sorted(place.configs.glob("triton_*/*.json"), reverse=True):
        key = re.fullmatch(r"E=(\d+),N=(\d+),device_name=([^,]+)\.json", path.name)
        if key and not key[3].endswith("_down"):
            experts, n, card = int(key[1]), int(key[2]), key[3]
            problem = MoEProblem(experts=experts, intermediate=n, hidden=512, topk=2, router_experts=experts)
            version = path.parent.name.removeprefix("triton_").replace("_", ".")
            return {
                "problem": problem,
                "device": {"name": card.replace("_", " ")},
                "versions": {"triton": version},
            }
    raise AssertionError("no shipped bf16 file")


def lookup(maker: Maker, **changes: Any) -> ConfigLookup:
    version = changes.get("versions", {}).get("triton", triton.__version__)
    return ConfigLookup(maker.place.tree, Target(changes.get("device", {}).get("name", CARD), 101_376, version))


def as_sglang_reads(path: Path) -> dict[int, Any]:
    return {int(m): row for m, row in json.loads(path.read_text()).items()}


def test_a_pair_of_grouped_weights_belongs_to_the_other_kernel(each: Maker) -> None:
    problem = replace(PROBLEM, dtype="int4_w4a16", block_shape=(0, 32))
    kernels = load_kernels(each.place.tree)
    assert kernels.grouped_hash != kernels.source_hash
    each.install(each.write(problem=problem, kernel_source_hash=kernels.grouped_hash).up_path)
    (listed,) = list_installed(each.place.base, each.place)
    assert (listed.state, listed.up_path.name.split(",")[1]) == ("ok", "N=48")
    with pytest.raises(UserError, match="tuned for kernel source"):
        each.install(each.write(problem=problem, kernel_source_hash=kernels.source_hash).up_path)


def test_a_new_pair_is_loaded_and_leaves_no_trace(each: Maker) -> None:
    written = each.write()
    before = picture(each.site)
    assert lookup(each).rows(PROBLEM, down=False) is None
    outcome = each.install(written.down_path)
    (item,) = outcome.pairs
    assert (item.state, item.kept, outcome.warnings) == ("installed", (), ())
    assert item.pickup is not None
    assert "exactly these 3 rows" in str(item.pickup)
    loaded = lookup(each)
    assert loaded.rows(PROBLEM, down=False) == as_sglang_reads(written.up_path)
    assert loaded.rows(PROBLEM, down=True) == as_sglang_reads(written.down_path)
    assert [path.read_bytes() for path in item.paths] == [
        written.up_path.read_bytes(),
        written.down_path.read_bytes(),
    ]
    assert item.paths[0].parent == each.place.configs / f"triton_{triton.__version__.replace('.', '_')}"
    # Later runs do not take the pair for what SGLang runs by itself.
    names = (written.up_path.name, written.down_path.name)
    assert _own_files(each.place.tree, None, each.output / "none", names) == dict.fromkeys(item.paths)
    done = uninstall(each.place.base, None)
    assert [pair.up_name for pair in done.pairs] == [written.up_path.name]
    assert picture(each.site) == before


def test_a_shipped_pair_is_kept_and_comes_back(each: Maker) -> None:
    changes = shipped_problem(each.place)
    problem = changes["problem"]
    shipped = lookup(each, **changes).rows(problem, down=False)
    first = each.write(**changes)
    configs = each.place.configs / first.up_path.parent.name
    (configs / first.up_path.name).chmod(0o640)
    before = picture(each.site)
    assert shipped == as_sglang_reads(configs / first.up_path.name)
    (item,) = each.install(first.up_path, consent=FORCE).pairs
    assert as_sglang_reads(item.kept[0]) == shipped
    # A newer pair of ours takes its place: what SGLang shipped stays the backup.
    second = each.write(rows(1, 2, 4096, stages=2), **changes)
    (item,) = each.install(second.up_path.parent, consent=FORCE).pairs
    assert item.state == "updated"
    assert as_sglang_reads(item.kept[0]) == shipped
    assert lookup(each, **changes).rows(problem, down=False) == as_sglang_reads(second.up_path)
    done = uninstall(each.place.base, [Path(second.down_path.name)])
    assert configs / first.up_path.name in done.restored
    assert picture(each.site) == before


def test_the_same_again_changes_nothing(maker: Maker) -> None:
    written = maker.write()
    maker.install(written.up_path)
    before = picture(maker.site)
    stamps = {path: path.stat().st_mtime_ns for path in maker.site.rglob("*")}
    (item,) = maker.install(maker.output, written.up_path, written.down_path).pairs
    assert item.state == "unchanged"
    assert item.pickup is not None
    assert picture(maker.site) == before
    assert {path: path.stat().st_mtime_ns for path in maker.site.rglob("*")} == stamps


def test_a_dry_run_changes_nothing(maker: Maker) -> None:
    written = maker.write()
    before = picture(maker.site)
    (item,) = maker.install(written.up_path, dry_run=True).pairs
    assert (item.state, item.pickup) == ("installed", None)
    assert picture(maker.site) == before


def test_pairs_go_one_by_one_and_folders_stay_as_long_as_needed(maker: Maker) -> None:
    other = MoEProblem(experts=20, intermediate=96, hidden=256, topk=2, router_experts=20)
    one, two = maker.write(), maker.write(problem=other)
    before = picture(maker.site)
    assert [item.state for item in maker.install(maker.output).pairs] == ["installed", "installed"]
    base = maker.place.base
    uninstall(base, [one.up_path])
    assert [item.pair.up_name for item in list_installed(base, maker.place)] == [two.up_path.name]
    assert lookup(maker).rows(PROBLEM, down=False) is None
    assert lookup(maker).rows(other, down=True) == as_sglang_reads(two.down_path)
    uninstall(base, [two.up_path])
    assert picture(maker.site) == before


def test_a_checkout_and_the_package_itself_are_found(maker: Maker, tmp_path: Path) -> None:
    written = maker.write()
    checkout = tmp_path / "checkout"
    (checkout / "python").mkdir(parents=True)
    shutil.move(maker.site / "sglang", checkout / "python" / "sglang")
    before = picture(checkout)
    for path in (checkout, checkout / "python", checkout / "python" / "sglang"):
        place = find_place(path, None)
        (item,) = install(find_pairs([written.up_path]), place, InstallOptions()).pairs
        assert item.paths[0].is_relative_to(checkout / "python" / "sglang")
        uninstall(place.base, None)
        assert picture(checkout) == before


def test_a_config_folder_hides_the_shipped_tree_unless_filled(whole: Maker, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    changes = shipped_problem(whole.place)
    shipped = list(whole.place.configs.glob("triton_*/*.json"))
    written = whole.write(**changes)
    site = picture(whole.site)
    place = find_place(whole.site, folder)
    pairs = find_pairs([written.up_path])
    assert install(pairs, place, InstallOptions(FORCE)).filled == 0
    uninstall(folder, None)
    assert list(folder.iterdir()) == []

    outcome = install(pairs, place, InstallOptions(FORCE, fill=True))
    assert outcome.filled == len(shipped)
    for path in shipped:
        copy = folder / "configs" / path.parent.name / path.name
        ours = path.name in (written.up_path.name, written.down_path.name) and path.parent.name in str(written.up_path)
        assert ours or copy.read_bytes() == path.read_bytes()
    # Without the pair the folder holds the shipped rows, as if it had only been filled.
    uninstall(folder, [written.up_path])
    assert {
        path.relative_to(folder / "configs"): path.read_bytes() for path in (folder / "configs").rglob("*.json")
    } == {path.relative_to(whole.place.configs): path.read_bytes() for path in shipped}
    assert install(pairs, place, InstallOptions(FORCE, fill=True)).filled == 0
    assert uninstall(folder, None).filled == len(shipped)
    assert list(folder.iterdir()) == []
    assert picture(whole.site) == site


def test_filling_leaves_our_own_pairs_out(whole: Maker, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    changes = shipped_problem(whole.place)
    written = whole.write(**changes)
    target = whole.place.configs / written.up_path.parent.name / written.up_path.name
    shipped = target.read_bytes()
    other = whole.write()
    whole.install(whole.output, consent=FORCE)
    place = find_place(whole.site, folder)
    new = whole.write(problem=MoEProblem(experts=20, intermediate=96, hidden=256, topk=2, router_experts=20))
    install(find_pairs([new.up_path]), place, InstallOptions(FORCE, fill=True))
    assert (folder / "configs" / target.parent.name / target.name).read_bytes() == shipped
    assert not (folder / "configs" / other.up_path.parent.name / other.up_path.name).exists()


def test_list_tells_changed_and_stale(maker: Maker) -> None:
    written = maker.write(kernel_source_hash="0" * 64, versions={"triton": "3.1.0"})
    (item,) = maker.install(written.up_path, consent=FORCE).pairs
    (listed,) = list_installed(maker.place.base, maker.place)
    assert listed.state == "stale"
    assert "000000000000" in listed.stale[0]
    assert "3.1.0" in listed.stale[1]
    assert triton.__version__ in listed.stale[1]
    item.paths[1].write_text("{}")
    (listed,) = list_installed(maker.place.base, maker.place)
    assert listed.state == "changed, stale"
    assert listed.changed == (item.paths[1],)
    (listed,) = list_installed(maker.place.base, None)
    assert listed.state == "changed"
    fresh = maker.write()
    maker.install(fresh.up_path)
    states = {item.pair.triton_folder: item.state for item in list_installed(maker.place.base, maker.place)}
    assert states[fresh.up_path.parent.name] == "ok"
    assert (maker.place.base / MANIFEST).is_file()
