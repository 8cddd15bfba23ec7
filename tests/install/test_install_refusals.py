from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton
from made_pairs import CARD, FORCE, PROBLEM, Maker, copied, picture, rows

from sm120tune.errors import UserError
from sm120tune.install import Consent, InstallOptions, find_pairs, find_place, install, uninstall
from sm120tune.install.manifest import MANIFEST
from sm120tune.install.soundness import check_pair
from sm120tune.problem import MoEProblem
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.source import load_kernels
from sm120tune.writer import WrittenPair


def refused(action: Callable[[], object], *words: str, unchanged: Path) -> None:
    """Check that something ends in one line with these words, and that a folder stays as it is."""
    before = picture(unchanged)
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert picture(unchanged) == before


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_what_was_not_measured_needs_consent(maker: Maker) -> None:
    for kind in ("estimated", "replayed"):
        written = maker.write(kind=kind)
        refused(lambda w=written: maker.install(w.up_path), kind, "--allow-estimated", unchanged=maker.site)  # type: ignore[misc]
        refused(lambda w=written: maker.install(w.up_path, consent=FORCE), kind, unchanged=maker.site)  # type: ignore[misc]
        (item,) = maker.install(written.up_path, consent=Consent(allow_estimated=True)).pairs
        assert item.pair.record.kind == kind


def test_another_kernel_source_or_triton_needs_force_and_both_values_are_told(maker: Maker) -> None:
    here = load_kernels(maker.place.tree).source_hash
    other = maker.write(kernel_source_hash="abc" * 9)
    refused(lambda: maker.install(other.up_path), "abcabcabcabc", here[:12], "--force", unchanged=maker.site)
    older = maker.write(versions={"triton": "3.0.1"})
    refused(lambda: maker.install(older.up_path), "3.0.1", triton.__version__, "--force", unchanged=maker.site)
    outcome = maker.install(older.up_path, consent=FORCE)
    assert "3.0.1" in outcome.warnings[0]
    assert outcome.pairs[0].paths[0].parent.name == "triton_3_0_1"


def test_the_triton_beside_sglang_counts(maker: Maker) -> None:
    (maker.site / "triton").mkdir()
    (maker.site / "triton" / "__init__.py").write_text("__version__ = '3.1.4'\n")
    mine, its = maker.write(), maker.write(versions={"triton": "3.1.4"})
    refused(lambda: maker.install(mine.up_path), "3.1.4 is installed", unchanged=maker.site)
    assert maker.install(its.up_path).pairs[0].state == "installed"


def test_use_tma_in_an_up_file_needs_an_sglang_that_knows_it(sglang_0_5_15: Path, maker: Maker, tmp_path: Path) -> None:
    old = Maker(copied(sglang_0_5_15, tmp_path / "old", without_configs=True), tmp_path / "old-output")
    tma = rows(1, 8, tma="up down")
    written = old.write(tma)
    refused(lambda: old.install(written.up_path, consent=FORCE), "USE_TMA in an up file", "0.5.15", unchanged=old.site)
    assert old.install(old.write(rows(1, 8, tma="down")).up_path).pairs[0].state == "installed"
    assert maker.install(maker.write(tma).up_path).pairs[0].state == "installed"


def test_a_block_size_k_past_the_quantization_group(maker: Maker) -> None:
    problem = MoEProblem(
        experts=12, intermediate=256, hidden=256, topk=2, router_experts=12, dtype="fp8_w8a8", block_shape=(32, 32)
    )
    written = maker.write(problem=problem)
    refused(lambda: maker.install(written.up_path, consent=FORCE), "BLOCK_SIZE_K 64", "32", unchanged=maker.site)


def _unequal(row: dict[str, Any]) -> None:
    row["8"]["BLOCK_SIZE_M"] = 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_unequal, ["BLOCK_SIZE_M at M=8 is 16", "32"]),
        (lambda rows: rows["8"].update(num_stages=4), ["changed since it was written"]),
        (lambda rows: rows.pop("8"), ["M=8", "one only"]),
        (lambda rows: rows.update({"triton_version": "3.8.0"}), ["'triton_version'", "damaged"]),
        (lambda rows: rows.update({"08": rows["8"]}), ["'08'", "damaged"]),
        (lambda rows: rows.update({"1": rows.pop("1")}), ["not in order"]),
        (lambda rows: rows["8"].pop("BLOCK_SIZE_N"), ["BLOCK_SIZE_N", "damaged"]),
        (lambda rows: rows["8"].update(kpack=2), ["'kpack'", "damaged"]),
        (lambda rows: rows.clear(), ["no rows"]),
    ],
)
def test_a_file_that_is_not_as_it_was_written(maker: Maker, change: Callable[[Any], object], words: list[str]) -> None:
    written = maker.write()
    edit(written.down_path, change)
    refused(lambda: maker.install(written.up_path, consent=FORCE), *words, unchanged=maker.site)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"1": 3}', '{"1": {}, "1": {}}', "\x00", '{"1": NaN}'])
def test_damaged_json(maker: Maker, text: str) -> None:
    written = maker.write()
    for path in (written.up_path, written.provenance_paths[1]):
        good = path.read_bytes()
        path.write_text(text)
        refused(lambda: maker.install(written.up_path), "damaged", unchanged=maker.site)
        path.write_bytes(good)
    written.up_path.write_bytes(b"\xff\xfe")
    refused(lambda: maker.install(written.up_path), str(written.up_path), "damaged", unchanged=maker.site)


def test_a_lone_file_and_missing_or_foreign_provenance(maker: Maker) -> None:
    written = maker.write()
    refused(
        lambda: maker.install(written.up_path.with_name("E=1,N=1,device_name=x.json")), "no such", unchanged=maker.site
    )
    for gone, there in ((written.down_path, written.up_path), (written.up_path, written.down_path)):
        content = gone.read_bytes()
        gone.unlink()
        refused(lambda p=there: maker.install(p), "partner", gone.name, unchanged=maker.site)  # type: ignore[misc]
        refused(lambda: maker.install(maker.output), "partner", gone.name, unchanged=maker.site)
        gone.write_bytes(content)
    edit(written.provenance_paths[1], lambda data: data.update(tool_version="9"))
    refused(lambda: maker.install(written.up_path), "differ", unchanged=maker.site)
    written.provenance_paths[0].unlink()
    refused(lambda: maker.install(written.up_path), "no provenance", unchanged=maker.site)


def test_a_name_that_sglang_would_not_ask_for(maker: Maker) -> None:
    written = maker.write()
    for path in (written.up_path, written.down_path, *written.provenance_paths):
        path.rename(path.with_name(path.name.replace("E=12", "E=13")))
    refused(lambda: maker.install(maker.output, consent=FORCE), "E=13", "asks for E=12", unchanged=maker.site)


def test_paths_that_hold_no_pair(maker: Maker, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("nowhere")
    other = tmp_path / "notes.txt"
    other.touch()
    for path, words in (
        (link, ["symbolic link to nowhere"]),
        (tmp_path / "absent", ["no such file"]),
        (other, ["no SGLang config file"]),
        (tmp_path / "site-packages", ["no configs/triton_*"]),
    ):
        refused(lambda p=path: maker.install(p), str(path), *words, unchanged=tmp_path)  # type: ignore[misc]
    written = maker.write()
    written.down_path.unlink()
    written.down_path.symlink_to(tmp_path / "gone")
    refused(lambda: maker.install(written.up_path), "symbolic link to nowhere", unchanged=tmp_path)


def test_two_pairs_of_one_name(maker: Maker) -> None:
    maker.write()
    maker.write(kind="estimated")
    refused(lambda: maker.install(maker.output), "give one of them", unchanged=maker.site)


def test_a_tree_that_is_no_sglang(maker: Maker, tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "output", ["no sglang package"]),
        (tmp_path / "absent", ["no sglang package"]),
    ):
        refused(lambda p=path: find_place(p, None), *words, unchanged=tmp_path)  # type: ignore[misc]
    refused(lambda: find_place(maker.site, tmp_path / "absent"), "--config-dir", unchanged=tmp_path)
    (tmp_path / "empty" / "sglang" / "srt").mkdir(parents=True)
    refused(lambda: find_place(tmp_path / "empty", None), "fused_moe_triton_kernels.py", unchanged=tmp_path)
    shutil.rmtree(maker.place.configs)
    refused(lambda: maker.place, "without its configs", unchanged=tmp_path)


def test_files_edited_since_the_install(maker: Maker) -> None:
    written = maker.write()
    before = picture(maker.site)
    (item,) = maker.install(written.up_path).pairs
    base = maker.place.base
    item.paths[1].write_text("{}\n")
    newer = maker.write(rows(1, 2))
    refused(lambda: maker.install(newer.up_path), "was edited", "--force", unchanged=maker.site)
    refused(lambda: uninstall(base, None), str(item.paths[1]), "was edited", "--force", unchanged=maker.site)
    assert maker.install(newer.up_path, consent=FORCE).pairs[0].state == "updated"
    item.paths[0].write_text("{}\n")
    uninstall(base, None, force=True)
    assert picture(maker.site) == before
    # Nothing was there before, so a file that is gone already is no edit to lose.
    item = maker.install(newer.up_path).pairs[0]
    item.paths[0].unlink()
    uninstall(base, None)
    assert picture(maker.site) == before


def test_a_replaced_file_that_is_gone(maker: Maker) -> None:
    written = maker.write()
    target = maker.place.configs / written.up_path.parent.name / written.up_path.name
    target.parent.mkdir(exist_ok=True)
    target.write_text('{"1": {}}')
    before = picture(maker.site)
    maker.install(written.up_path)
    target.unlink()
    refused(lambda: uninstall(maker.place.base, None), str(target), "is gone", unchanged=maker.site)
    uninstall(maker.place.base, None, force=True)
    assert picture(maker.site) == before


def test_what_uninstall_cannot_do(maker: Maker) -> None:
    base = maker.place.base
    nothing = uninstall(base, None)
    assert (nothing.pairs, nothing.filled) == ((), 0)
    written, older = maker.write(), maker.write(versions={"triton": "3.0.1"})
    maker.install(written.up_path, older.up_path, consent=FORCE)
    refused(lambda: uninstall(base, [Path("E=1.json")]), "E=1.json", "not installed", unchanged=maker.site)
    refused(lambda: uninstall(base, [Path(written.up_path.name)]), "triton_3_0_1", unchanged=maker.site)
    uninstall(base, [Path("triton_3_0_1", written.up_path.name)])
    manifest = base / MANIFEST
    good = manifest.read_text()
    for text in ("{", "{}", good.replace('"configs/', '"/configs/', 1), good.replace('"configs/', '"../configs/', 1)):
        manifest.write_text(text)
        refused(lambda: uninstall(base, None), str(manifest), "damaged", unchanged=maker.site)
        refused(lambda: maker.install(written.up_path), str(manifest), "damaged", unchanged=maker.site)
    manifest.write_text(good)
    assert len(uninstall(base, None).pairs) == 1


def test_a_damaged_backup_is_not_put_back(maker: Maker) -> None:
    written = maker.write()
    target = maker.place.configs / written.up_path.parent.name / written.up_path.name
    target.parent.mkdir(exist_ok=True)
    target.write_text('{"1": {}}')
    (item,) = maker.install(written.up_path).pairs
    (kept,) = item.kept
    kept.write_text("other")
    refused(lambda: uninstall(maker.place.base, None), str(kept), "damaged", unchanged=maker.site)


def test_targets_that_are_links_or_the_source_itself(maker: Maker, tmp_path: Path) -> None:
    written = maker.write()
    target = maker.place.configs / written.up_path.parent.name / written.down_path.name
    target.parent.mkdir(exist_ok=True)
    target.symlink_to(tmp_path / "nowhere")
    refused(lambda: maker.install(written.up_path), str(target), "symbolic link", unchanged=maker.site)
    place = find_place(maker.site, maker.output / "measured")
    pairs = find_pairs([written.up_path])
    refused(lambda: install(pairs, place, InstallOptions()), "very file", unchanged=tmp_path)
    refused(lambda: install(pairs, maker.place, InstallOptions(fill=True)), "--config-dir", unchanged=tmp_path)


def test_without_any_triton_the_version_is_not_compared(maker: Maker) -> None:
    import dataclasses

    written: WrittenPair = maker.write(versions={"triton": "3.0.1"})
    (pair,) = find_pairs([written.up_path])
    place = dataclasses.replace(maker.place, triton_version=None)
    (warning,) = check_pair(pair, place, Consent())
    assert "not compared" in warning
    assert (pair.device_name, pair.record.problem) == (CARD, PROBLEM)


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        (Tile(128, 256, 128, 1, 8, 4), ["needs at least", "of 101,376 B", "at M=8"]),
        (Tile(16, 64, 64, 1, 6, 3), ["num_warps=6 is no power of two", "at M=8"]),
        (Tile(16, 64, 128, 1, 4, 2, USE_TMA=True), ["USE_TMA with K=96", "at M=8"]),
    ],
)
def test_what_check_calls_an_error_is_never_installed(maker: Maker, tile: Tile, words: list[str]) -> None:
    up = Tile(tile.BLOCK_SIZE_M, 32, 32, 1, 4, 2)
    written = maker.write({1: rows(1)[1], 8: TilePair(up, tile), 64: rows(64)[64]})
    refused(lambda: maker.install(written.up_path, consent=FORCE), *words, unchanged=maker.site)


def test_a_folder_that_breaks_other_lookups_is_told(maker: Maker) -> None:
    (maker.place.configs / "triton_3_7_0rc1").mkdir(parents=True)
    (warning,) = maker.install(maker.write().up_path).warnings
    assert "triton_3_7_0rc1" in warning
    assert "ValueError" in warning
