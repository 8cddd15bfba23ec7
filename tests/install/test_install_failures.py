from __future__ import annotations

import fcntl
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_pairs import Maker, picture, rows

import sm120tune
from sm120tune.check.rules import rules_of
from sm120tune.errors import UserError
from sm120tune.install import InstallOptions, PickupError, find_pairs, find_place, install, uninstall
from sm120tune.install.manifest import MANIFEST
from sm120tune.install.place import locked
from sm120tune.upstream.locate import find_sglang

ENDED_BY_FORCE = 9


@pytest.fixture
def replacing(maker: Maker) -> Maker:
    """Return a writer whose pair takes the place of one that is there."""
    written = maker.write(rows(1, 4))
    folder = maker.place.configs / written.up_path.parent.name
    folder.mkdir(exist_ok=True)
    for path in (written.up_path, written.down_path):
        (folder / path.name).write_bytes(path.read_bytes())
        (folder / path.name).chmod(0o600)
    maker.write()
    return maker


class Stop(Exception):
    """Not an OSError: anything may end an install."""


def failing_at(number: int, failure: Callable[[], object], calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the nth renaming or removal fail, and everything after it work again."""

    def guard(original: Callable[..., Any], name: str) -> None:
        def guarded(*args: Any, **options: Any) -> Any:
            calls.append(args)
            if len(calls) == number:
                failure()
            return original(*args, **options)

        monkeypatch.setattr(os, name, guarded)

    guard(os.replace, "replace")
    guard(os.unlink, "unlink")


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Stop()], ids=["full", "stopped"])
def test_whatever_fails_midway_is_undone(replacing: Maker, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    site, base = replacing.site, replacing.place.base
    before = picture(site)
    expected = UserError if isinstance(error, OSError) else Stop
    # Known once for each tree, and found out in a temporary folder: no step of an install.
    rules_of(replacing.place.tree)
    steps: list[tuple[Callable[[], object], dict[str, Any]]] = [
        (lambda: replacing.install(replacing.output), before),
        (lambda: uninstall(base, None), {}),
    ]
    for action, start in steps:
        start = start or picture(site)
        for number in range(1, 30):
            calls: list[Any] = []
            with monkeypatch.context() as patch:
                failing_at(number, lambda: raise_(error), calls, patch)
                try:
                    action()
                except expected:
                    done = False
                else:
                    done = True
            if done:
                break
            assert picture(site) == start, number
        assert number > 5
    assert picture(site) == before


def test_a_killed_install_or_uninstall_can_be_finished(replacing: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    site, base = replacing.site, replacing.place.base
    before, configs = picture(site), picture(base / "configs")

    def killed(number: int, action: Callable[[], object]) -> bool:
        child = os.fork()
        if child == 0:
            try:
                failing_at(number, lambda: os._exit(ENDED_BY_FORCE), [], monkeypatch)
                action()
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, ENDED_BY_FORCE)
        return code == ENDED_BY_FORCE

    numbers = 0
    for number in range(1, 30):
        if not killed(number, lambda: replacing.install(replacing.output)):
            break
        numbers += 1
        if not (base / MANIFEST).exists():
            # What SGLang reads is touched only once there is something that explains it.
            assert picture(base / "configs") == configs
        if number % 2:
            uninstall(base, None)
        replacing.install(replacing.output)
        uninstall(base, None)
        assert picture(site) == before, number
    assert numbers > 5
    for number in range(1, 30):
        replacing.install(replacing.output)
        if not killed(number, lambda: uninstall(base, None)):
            break
        uninstall(base, None)
        assert picture(site) == before, number
    assert number > 5


def test_without_the_proof_everything_is_put_back(replacing: Maker) -> None:
    file = find_sglang(replacing.site).config_file
    text = file.read_text()
    found = "return {int(key): val for key, val in json.load(f).items()}"
    assert found in text
    for change, word in (("return None", "built-in default"), ("return {1: {}}", "other rows")):
        file.write_text(text.replace(found, change))
        before = picture(replacing.site)
        with pytest.raises(PickupError, match=word):
            replacing.install(replacing.output)
        assert picture(replacing.site) == before


def test_the_same_rows_from_another_folder_are_no_proof(replacing: Maker, tmp_path: Path) -> None:
    written = replacing.write(rows(1, 4))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(replacing.output / "measured" / "configs", elsewhere / "configs")
    file = find_sglang(replacing.site).config_file
    text = file.read_text()
    own = "os.path.dirname(os.path.realpath(__file__))"
    assert own in text
    file.write_text(text.replace(own, repr(str(elsewhere))))
    before = picture(replacing.site)
    with pytest.raises(PickupError, match="elsewhere"):
        replacing.install(written.up_path)
    assert picture(replacing.site) == before


def test_a_file_where_a_folder_must_be(maker: Maker) -> None:
    written = maker.write()
    base = maker.place.base
    folder = maker.place.configs / written.up_path.parent.name
    if folder.exists():
        folder.rmdir()
    for path in (base / "provenance", folder):
        path.write_text("here")
        before = picture(maker.site)
        with pytest.raises(UserError) as caught:
            maker.install(written.up_path)
        assert str(path) in str(caught.value)
        assert picture(maker.site) == before
        path.unlink()
    # A link to nowhere in the folder's place is none either.
    (base / "provenance").symlink_to("nowhere")
    before = picture(maker.site)
    with pytest.raises(UserError, match="provenance"):
        maker.install(written.up_path)
    assert picture(maker.site) == before


def test_a_full_disk(replacing: Maker) -> None:
    before = picture(replacing.site)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    env = {**os.environ, "PYTHONPATH": str(Path(sm120tune.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "sm120tune", "install", str(replacing.output), "--sglang", str(replacing.site)],
        env=env,
        preexec_fn=limit,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sm120tune: error: cannot write ")
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert picture(replacing.site) == before


def test_a_folder_that_takes_no_files(maker: Maker) -> None:
    written = maker.write()
    place = find_place(maker.site, Path("/proc/self/task"))
    with pytest.raises(UserError, match="/proc/"):
        install(find_pairs([written.up_path]), place, InstallOptions())


def test_one_install_at_a_time(maker: Maker) -> None:
    base = maker.place.base
    before = picture(maker.site)
    descriptor = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another sm120tune"), locked(base, timeout_s=0.1):
            pass
    finally:
        os.close(descriptor)
    with locked(base, timeout_s=0.1):
        assert picture(maker.site) == before
