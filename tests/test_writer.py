from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import filelock
import pytest

from sm120tune import provenance as prov
from sm120tune.errors import UserError
from sm120tune.problem import MoEProblem
from sm120tune.provenance import FileProvenance, RowProvenance, RowStatus
from sm120tune.tiles import Tile, TilePair
from sm120tune.writer import LOCK_NAME, Ladder, WrittenPair, write_ladder

UP_NAME = "E=256,N=256,device_name=NVIDIA_GB10,dtype=fp8_w8a8,block_shape=[128, 128].json"
DOWN_NAME = UP_NAME.replace(".json", "_down.json")
PROBLEM = MoEProblem(experts=256, intermediate=256, hidden=6144, topk=8, router_experts=256)
SPAWN = multiprocessing.get_context("spawn")


def pair(m: int, stages: int = 3) -> TilePair:
    return TilePair(Tile(16, 64, 128, 1, 4, stages), Tile(16, 128, 64, m, 8, 2))


def row(m: int, stages: int = 3) -> RowProvenance:
    return RowProvenance(
        m=m, status=RowStatus.TUNED, today=None, chosen=pair(m, stages), today_us=None, today_spread_us=None,
        chosen_us=100.0 + stages, chosen_spread_us=0.5, ratio=None, ratio_interval=None, roofline_share=None,
        bound="bandwidth", timer="cuda", measured=True, what="chain", repetitions=10, routing="uniform", error=None,
        date="2026-05-01T12:00:00+00:00",
    )  # fmt: skip


def ladder(*sizes: int, stages: int = 3, **changes: Any) -> Ladder:
    rows = tuple(row(m, stages) for m in sizes)
    record = FileProvenance(
        tool_version="0.1.0", kind="measured", problem=PROBLEM, device={"name": "NVIDIA GB10", "driver": "580.1"},
        versions={"torch": "2.11.0", "triton": "3.6.0", "sglang": "0.5.15"}, kernel_source_hash="abc", search={},
        failures={}, rows=rows,
    )  # fmt: skip
    record = dataclasses.replace(record, **changes)
    return Ladder(UP_NAME, DOWN_NAME, "3.6.0", {item.m: item.chosen for item in rows}, record)


def sglang_loads(path: Path) -> dict[int, dict[str, Any]]:
    """Read a file as SGLang does."""
    with open(path) as file:
        return {int(key): value for key, value in json.load(file).items()}


def tree(root: Path) -> dict[str, bytes | None]:
    """Return everything under a folder, folders as None, the lock left out."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if path.name != LOCK_NAME
    }


def refused(root: Path, new: Ladder, *words: str, **options: Any) -> None:
    """Check that a write fails in one line with these words and changes nothing."""
    before = tree(root)
    with pytest.raises(UserError) as caught:
        write_ladder(root, new, **options)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert tree(root) == before


def test_a_pair_is_written_as_sglang_reads_it(tmp_path: Path) -> None:
    written = write_ladder(tmp_path, ladder(64, 1, 1024))
    folder = tmp_path / "measured"
    assert written == WrittenPair(
        up_path=folder / "configs" / "triton_3_6_0" / UP_NAME,
        down_path=folder / "configs" / "triton_3_6_0" / DOWN_NAME,
        provenance_paths=(
            folder / "provenance" / "triton_3_6_0" / UP_NAME,
            folder / "provenance" / "triton_3_6_0" / DOWN_NAME,
        ),
    )
    assert sglang_loads(written.up_path) == {m: pair(m).gate_up.to_row() for m in (1, 64, 1024)}
    assert sglang_loads(written.down_path) == {m: pair(m).down.to_row() for m in (1, 64, 1024)}
    assert list(sglang_loads(written.up_path)) == list(sglang_loads(written.down_path)) == [1, 64, 1024]
    text = written.up_path.read_text()
    assert text.startswith('{\n    "1": {\n        "BLOCK_SIZE_M": 16,\n        "BLOCK_SIZE_N": 64,\n')
    assert text.endswith('        "num_stages": 3\n    }\n}\n')
    assert prov.load(written.provenance_paths[0]) == prov.load(written.provenance_paths[1])
    assert [item.m for item in prov.load(written.provenance_paths[0]).rows] == [1, 64, 1024]
    # Nothing else: no temporary file is left, and nothing that SGLang's lookup would trip over.
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        [UP_NAME, DOWN_NAME] * 2 + [LOCK_NAME]
    )
    assert [path.name for path in (folder / "configs").iterdir()] == ["triton_3_6_0"]


def test_the_kind_is_a_folder_of_its_own(tmp_path: Path) -> None:
    for kind in prov.KINDS:
        assert write_ladder(tmp_path, ladder(1, kind=kind)).up_path.parts[-4:-2] == (kind, "configs")


def test_use_tma_is_written_only_where_it_is_on(tmp_path: Path) -> None:
    tile = Tile(16, 64, 128, 1, 4, 3)
    chosen = TilePair(tile, dataclasses.replace(tile, USE_TMA=True))
    made = ladder(1)
    record = dataclasses.replace(made.provenance, rows=(dataclasses.replace(row(1), chosen=chosen),))
    written = write_ladder(tmp_path, dataclasses.replace(made, rows={1: chosen}, provenance=record))
    assert "USE_TMA" not in sglang_loads(written.up_path)[1]
    assert sglang_loads(written.down_path)[1]["USE_TMA"] is True
    # And read back without a quarrel.
    write_ladder(tmp_path, ladder(2))
    assert sglang_loads(written.down_path)[1]["USE_TMA"] is True


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        written = write_ladder(tmp_path, ladder(1))
    finally:
        os.umask(old)
    assert written.up_path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("version", ["3.8.0+git", "3.7.0rc1", "3.6.0.post1", "3", "", "3.6.0\n", "٣.٦.٠"])
def test_a_version_that_crashes_sglangs_lookup_is_refused(tmp_path: Path, version: str) -> None:
    refused(tmp_path, dataclasses.replace(ladder(1), triton_version=version), repr(version))
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    "names", [("a/b.json", "c.json"), ("../a.json", "c.json"), ("a.json", "c"), ("", "c.json"), ("a.json", "a.json")]
)
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    refused(tmp_path, dataclasses.replace(ladder(1), up_name=names[0], down_name=names[1]), "name")


def test_rows_and_provenance_must_agree() -> None:
    whole = ladder(1, 2)
    for rows in ({}, {1: pair(1)}, {1: pair(1), 2: pair(1)}):
        with pytest.raises(ValueError, match="provenance"):
            dataclasses.replace(whole, rows=rows)


# Merging


def test_new_rows_win_and_others_survive(tmp_path: Path) -> None:
    write_ladder(tmp_path, ladder(1, 64))
    written = write_ladder(tmp_path, ladder(64, 8, stages=5))
    assert {m: values["num_stages"] for m, values in sglang_loads(written.up_path).items()} == {1: 3, 8: 5, 64: 5}
    assert list(sglang_loads(written.down_path)) == [1, 8, 64]
    rows = {item.m: item for item in prov.load(written.provenance_paths[1]).rows}
    assert rows == {1: row(1), 8: row(8, 5), 64: row(64, 5)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"problem": dataclasses.replace(PROBLEM, hidden=2048)}, "problem.hidden is 6144 there and 2048 here"),
        ({"kernel_source_hash": "def"}, "kernel_source_hash is abc there and def here"),
        ({"rows": (dataclasses.replace(row(8), routing="skewed"),)}, "routing is uniform there and skewed here"),
    ],
)
def test_another_problem_is_never_merged(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    written = write_ladder(tmp_path, ladder(1))
    new = ladder(8, **changes)
    refused(tmp_path, new, named, str(written.up_path), "--replace", "--output")
    write_ladder(tmp_path, new, replace=True)
    assert list(sglang_loads(written.up_path)) == [8]
    assert [item.m for item in prov.load(written.provenance_paths[0]).rows] == [8]


def up(written: WrittenPair) -> Path:
    return written.up_path


def down(written: WrittenPair) -> Path:
    return written.down_path


def up_record(written: WrittenPair) -> Path:
    return written.provenance_paths[0]


def down_record(written: WrittenPair) -> Path:
    return written.provenance_paths[1]


FILES = [up, down, up_record, down_record]


@pytest.mark.parametrize("which", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text("{"),
        lambda path: path.write_text("{}"),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.write_text(path.read_text().replace("16", "32")),
        lambda path: path.write_text('{"triton_version": "3.6.0"}'),
    ],
    ids=["missing", "cut", "empty", "bytes", "edited", "foreign"],
)
def test_what_is_not_ours_or_damaged_is_kept(
    tmp_path: Path, which: Callable[[WrittenPair], Path], damage: Callable[[Path], object]
) -> None:
    written = write_ladder(tmp_path, ladder(1))
    damage(which(written))
    refused(tmp_path, ladder(8), str(which(written)), "--replace", "--output")
    write_ladder(tmp_path, ladder(8), replace=True)
    assert list(sglang_loads(written.up_path)) == list(sglang_loads(written.down_path)) == [8]


def test_a_config_without_provenance_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "measured" / "configs" / "triton_3_6_0"
    folder.mkdir(parents=True)
    (folder / UP_NAME).write_text("{}")
    refused(tmp_path, ladder(1), str(folder / UP_NAME), "--replace")


# Places that cannot be written


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    written = write_ladder(tmp_path / "a", ladder(1))
    for place in (written.up_path, written.provenance_paths[1]):
        root = tmp_path / place.parent.parent.name
        blocked = root / place.relative_to(tmp_path / "a")
        blocked.mkdir(parents=True)
        refused(root, ladder(1), str(blocked), "irectory")
        refused(root, ladder(1), str(blocked), "irectory", replace=True)


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    for place in ("measured", "measured/configs", "measured/provenance/triton_3_6_0"):
        root = tmp_path / place.replace("/", "_")
        blocked = root / place
        blocked.parent.mkdir(parents=True)
        blocked.write_text("mine")
        refused(root, ladder(1), str(blocked), "--output")
        refused(root, ladder(1), str(blocked), "--output", replace=True)


def test_a_root_that_is_a_file_or_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/sm120tune")):
        with pytest.raises(UserError, match="choose another --output") as caught:
            write_ladder(root, ladder(1))
        assert str(root) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert tree(tmp_path) == {"file": b"mine"}


def test_a_symlinked_root_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    written = write_ladder(tmp_path / "link", ladder(1))
    write_ladder(tmp_path / "real", ladder(2))
    assert list(sglang_loads(written.up_path)) == [1, 2]
    assert (tmp_path / "link").is_symlink()


def limited_write(root: Path, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    refused(root, ladder(8), "cannot write", "File too large", "nothing was changed")


@pytest.mark.parametrize("existing", [False, True])
def test_a_file_size_limit_leaves_everything_as_it_was(tmp_path: Path, existing: bool) -> None:
    before: dict[str, bytes | None] = {}
    if existing:
        write_ladder(tmp_path, ladder(1))
        before = tree(tmp_path)
    # Config files fit, the provenance does not.
    child = SPAWN.Process(target=limited_write, args=(tmp_path, 700))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert tree(tmp_path) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 pages; only root can have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_gives_all_four_files_or_none(small_disk: Path) -> None:
    written = write_ladder(small_disk, ladder(1, 2, 4))
    before = tree(small_disk)
    filler = small_disk / "filler"
    outcomes = set()
    for free_pages in range(14):
        filler.write_bytes(b"")
        room = os.statvfs(small_disk).f_bavail - free_pages
        filler.write_bytes(b"x" * room * os.statvfs(small_disk).f_frsize)
        kept = tree(small_disk)
        message = ""
        try:
            write_ladder(small_disk, ladder(8, 16, 32, 64))
        except UserError as error:
            message = str(error)
        if message:
            assert "No space left" in message
            assert tree(small_disk) == kept
            outcomes.add("refused")
        else:
            assert (
                list(sglang_loads(written.up_path)) == list(sglang_loads(written.down_path)) == [1, 2, 4, 8, 16, 32, 64]
            )
            outcomes.add("written")
            filler.unlink()
            write_ladder(small_disk, ladder(1, 2, 4), replace=True)
            assert tree(small_disk) == before
    assert outcomes == {"refused", "written"}


# A failure between two replacements


@pytest.mark.parametrize("which", FILES)
def test_an_immutable_file_rolls_the_others_back(tmp_path: Path, which: Callable[[WrittenPair], Path]) -> None:
    written = write_ladder(tmp_path, ladder(1))
    command = shutil.which("chattr")
    if command is None or subprocess.run([command, "+i", which(written)], capture_output=True, check=False).returncode:
        pytest.skip("no file can be made immutable here")
    try:
        refused(tmp_path, ladder(8), str(which(written)), "Operation not permitted", "nothing was changed")
    finally:
        subprocess.run([command, "-i", which(written)], check=True)
    write_ladder(tmp_path, ladder(8))
    assert list(sglang_loads(written.up_path)) == [1, 8]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_failure_at_any_replacement_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, existing: bool, at: int
) -> None:
    # Stands in for a disk that fails at one exact moment, which nothing real does on demand.
    if existing:
        write_ladder(tmp_path, ladder(1))
    before = tree(tmp_path)
    real, calls = os.replace, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == at:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt):
        write_ladder(tmp_path, ladder(8))
    assert len(calls) >= at
    assert tree(tmp_path) == before


def write_and_die(root: Path) -> None:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    write_ladder(root, ladder(8))


def test_what_a_killed_process_left_is_cleaned_up(tmp_path: Path) -> None:
    written = write_ladder(tmp_path, ladder(1))
    child = SPAWN.Process(target=write_and_die, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert list(sglang_loads(written.up_path)) == [1]
    left = list(tmp_path.rglob("*.tmp"))
    assert len(left) == 4
    # Its lock died with it.
    write_ladder(tmp_path, ladder(2), lock_timeout_s=5)
    assert list(sglang_loads(written.up_path)) == [1, 2]
    assert not any(path.exists() for path in left)


# Several processes


def hold_lock(path: Path, held: Event, done: Event) -> None:
    with filelock.FileLock(path):
        held.set()
        done.wait()


def test_a_held_lock_is_named(tmp_path: Path) -> None:
    held, done = SPAWN.Event(), SPAWN.Event()
    child = SPAWN.Process(target=hold_lock, args=(tmp_path / LOCK_NAME, held, done))
    child.start()
    try:
        assert held.wait(60)
        refused(tmp_path, ladder(1), str(tmp_path / LOCK_NAME), "wait for it", lock_timeout_s=0.1)
    finally:
        done.set()
        child.join()
    write_ladder(tmp_path, ladder(1), lock_timeout_s=5)


def write_sizes(root: Path, sizes: tuple[int, ...], start: Barrier) -> None:
    start.wait()
    for m in sizes:
        write_ladder(root, ladder(m))


def test_two_processes_lose_nothing_and_no_reader_sees_half_a_file(tmp_path: Path) -> None:
    sizes = ((1, 4, 16, 64, 256, 1024, 4096), (2, 8, 32, 128, 512, 2048, 8192))
    start = SPAWN.Barrier(3)
    children = [SPAWN.Process(target=write_sizes, args=(tmp_path, part, start)) for part in sizes]
    for child in children:
        child.start()
    start.wait()
    folder = tmp_path / "measured" / "configs" / "triton_3_6_0"
    seen = 0
    while any(child.is_alive() for child in children):
        for name in (UP_NAME, DOWN_NAME):
            if (folder / name).exists():
                assert sglang_loads(folder / name)
                seen += 1
    assert seen
    assert [child.exitcode for child in children] == [0, 0]
    wanted = sorted(sizes[0] + sizes[1])
    assert list(sglang_loads(folder / UP_NAME)) == list(sglang_loads(folder / DOWN_NAME)) == wanted
    record = prov.load(tmp_path / "measured" / "provenance" / "triton_3_6_0" / DOWN_NAME)
    assert record.rows == tuple(row(m) for m in wanted)
