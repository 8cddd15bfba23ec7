from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from synthetic import SMALL, bowl, every_kind, open_journal

import sm120tune
from sm120tune.errors import UserError
from sm120tune.failures import Failure, FailureKind
from sm120tune.measure.lane import read_timing
from sm120tune.measure.results import Estimated
from sm120tune.search.board import halves
from sm120tune.search.journal import Journal, run_hash
from sm120tune.search.step import SearchStep, StepSettings
from sm120tune.search_space import Space, SpaceLimits, params_to_pair
from sm120tune.tiles import Tile, TilePair

IDENTITY: dict[str, Any] = {"problem": SMALL.to_json(), "device": "some card", "seed": 0}
SEEDS = [TilePair.same(Tile(16, 32, 64, 1)), TilePair(Tile(32, 64, 64, 1), Tile(32, 128, 64, 1))]
NOBODY = 65534


def make_step(m: int, trials: int) -> SearchStep:
    return SearchStep(Space(SMALL, m, SpaceLimits(101376)), StepSettings(trials), [])


def search(step: SearchStep, journal: Journal) -> list[TilePair]:
    """Search until the trials are used up, with some failures, and keep every trial."""
    asked = []
    step.add_seeds(SEEDS)
    while (pair := step.ask()) is not None:
        asked.append(pair)
        for gemm, tile in step.board.missing(pair):
            failure = every_kind((gemm, tile), list(FailureKind))
            step.board.put((gemm, tile), failure or Estimated(bowl(gemm, tile, step.m), "compute"))
        journal.add(step.m, step.tell(pair))
    return asked


def resume(step: SearchStep, journal: Journal) -> None:
    step.resume(journal.trials(step.m), lambda data: read_timing("model", data))


def filled(folder: Path, trials: int = 6, m: int = 64) -> Path:
    """Return the file of a journal with some trials."""
    journal = open_journal(folder, IDENTITY)
    search(make_step(m, trials), journal)
    return journal.path


# Resuming


def test_a_resumed_search_stands_where_it_stood_and_repeats_nothing(tmp_path: Path) -> None:
    for m in (16, 512):
        first = make_step(m, 20)
        told = search(first, open_journal(tmp_path, IDENTITY))
        assert any(isinstance(first.board.score(pair), Failure) for pair in told)

        journal = open_journal(tmp_path, IDENTITY)
        second = make_step(m, 40)
        resume(second, journal)
        assert second.told == len(told) == 20
        assert len(second.board) == len(first.board)
        for pair in told:
            assert second.board.score(pair) == first.board.score(pair)
            for half in halves(pair):
                assert second.board.get(half) == first.board.get(half)
        assert second.board.best_pairs(10) == first.board.best_pairs(10)
        assert second.board.failures() == first.board.failures()

        more = search(second, journal)
        assert len(more) == 20
        assert not set(more) & set(told)
        assert len(open_journal(tmp_path, IDENTITY).trials(m)) == 40


def test_a_spent_search_resumes_to_its_end(tmp_path: Path) -> None:
    search(make_step(64, 10), open_journal(tmp_path, IDENTITY))
    journal = open_journal(tmp_path, IDENTITY)
    again = make_step(64, 10)
    resume(again, journal)
    assert search(again, journal) == []
    assert again.finished


def test_resuming_twice_counts_once(tmp_path: Path) -> None:
    search(make_step(64, 6), open_journal(tmp_path, IDENTITY))
    journal = open_journal(tmp_path, IDENTITY)
    step = make_step(64, 6)
    resume(step, journal)
    resume(step, journal)
    assert step.told == 6


def test_each_m_has_a_study_of_its_own(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, IDENTITY)
    search(make_step(16, 3), journal)
    search(make_step(512, 5), journal)
    again = open_journal(tmp_path, IDENTITY)
    assert [len(again.trials(m)) for m in (16, 512, 4096)] == [3, 5, 0]


def test_only_finished_trials_are_returned(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, IDENTITY)
    search(make_step(16, 3), journal)
    journal.study(16).ask()
    trials = open_journal(tmp_path, IDENTITY).trials(16)
    assert len(trials) == 3
    assert all(trial.state in (TrialState.COMPLETE, TrialState.FAIL) for trial in trials)


def test_notes_are_kept_with_their_m(tmp_path: Path) -> None:
    open_journal(tmp_path, IDENTITY).save_note(16, "race", {"rounds": [1, 2]})
    again = open_journal(tmp_path, IDENTITY)
    assert again.note(16, "race") == {"rounds": [1, 2]}
    assert again.note(32, "race") is None
    assert again.note(16, "other") is None


def test_another_identity_is_another_run(tmp_path: Path) -> None:
    filled(tmp_path)
    other = open_journal(tmp_path, {**IDENTITY, "seed": 1})
    assert other.trials(64) == []
    assert run_hash({**IDENTITY, "seed": 1}) != run_hash(IDENTITY)
    # The order of the keys says nothing.
    assert run_hash(dict(reversed(IDENTITY.items()))) == run_hash(IDENTITY)


def test_the_folder_says_what_it_is_for(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, IDENTITY)
    assert json.loads((journal.folder / "identity.json").read_text()) == IDENTITY


def test_fresh_starts_over(tmp_path: Path) -> None:
    filled(tmp_path)
    assert open_journal(tmp_path, IDENTITY, fresh=True).trials(64) == []
    assert open_journal(tmp_path, IDENTITY).trials(64) == []


# Interrupted writes and damage


@pytest.mark.parametrize("cut", [1, 2, 40, 1000, -1])
def test_a_torn_last_line_costs_that_line_alone(tmp_path: Path, cut: int) -> None:
    path = filled(tmp_path)
    content = path.read_bytes()
    last = content[:-1].rfind(b"\n") + 1
    end = last + 1 if cut < 0 else len(content) - cut
    assert last < end < len(content)
    path.write_bytes(content[:end])

    journal = open_journal(tmp_path, IDENTITY)
    assert len(journal.trials(64)) == 5
    step = make_step(64, 9)
    resume(step, journal)
    assert len(search(step, journal)) == 4
    assert len(open_journal(tmp_path, IDENTITY).trials(64)) == 9


@pytest.mark.parametrize(
    "line",
    [b"garbage", b"{", b"{}", b"[1]", b"123", b"null", b'"text"', b"\xff\xfe\x00", b"\0" * 512, b"",
     b'{"op_code": 99, "worker_id": "w"}', b'{"op_code": 4, "worker_id": "w"}'],
)  # fmt: skip
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_damage_is_told_in_one_line_and_fresh_goes_on(tmp_path: Path, line: bytes, where: str) -> None:
    path = filled(tmp_path, trials=2)
    lines = path.read_bytes().splitlines()
    lines.insert({"first": 0, "middle": len(lines) // 2, "last": len(lines)}[where], line)
    damaged = b"\n".join(lines) + b"\n"
    path.write_bytes(damaged)
    with pytest.raises(UserError) as caught:
        open_journal(tmp_path, IDENTITY)
    message = str(caught.value)
    assert str(path) in message
    assert "--fresh" in message
    assert "\n" not in message
    assert path.read_bytes() == damaged

    journal = open_journal(tmp_path, IDENTITY, fresh=True)
    search(make_step(64, 2), journal)
    assert len(open_journal(tmp_path, IDENTITY).trials(64)) == 2


APPEND = """
import sys
from pathlib import Path
from optuna.trial import create_trial
from sm120tune.search.journal import Journal
from sm120tune.search_space import distributions

journal = Journal(Path(sys.argv[1]), {"run": "killed"}, fresh=False)
values = distributions()
params = {name: choices.choices[0] for name, choices in values.items()}
for number in range(int(sys.argv[2])):
    attrs = {"gate_up": {"timing": {"us": float(number), "bound": "compute"}}}
    journal.add(64, create_trial(value=float(number), params=params, distributions=values, user_attrs=attrs))
    print(number + 1, flush=True)
"""


def child(script: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(sm120tune.__file__).parents[1])}
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@contextlib.contextmanager
def appender(folder: Path, count: int = 100_000, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that appends trials and prints how many there are."""
    with child(APPEND, folder, count, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_process_loses_nothing_that_it_had_finished(tmp_path: Path) -> None:
    wanted = 5
    for _ in range(2):
        with appender(tmp_path) as process:
            assert process.stdout is not None
            said = 0
            while said < wanted:
                said = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            said = int((process.stdout.read().split() or [str(said)])[-1])
        begin = time.monotonic()
        journal = open_journal(tmp_path, {"run": "killed"})
        trials = journal.trials(64)
        assert len(trials) >= said
        assert all(params_to_pair(trial.params) for trial in trials)
        # What the dead process held must not be waited for until it counts as forgotten.
        journal.save_note(64, "opened", True)
        assert time.monotonic() - begin < 20


def test_a_process_killed_in_the_middle_of_an_append_is_not_waited_for(tmp_path: Path) -> None:
    script = "import os, signal\nos.fsync = lambda _file: os.kill(os.getpid(), signal.SIGKILL)\n" + APPEND
    with child(script, tmp_path, 1) as process:
        process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    begin = time.monotonic()
    journal = open_journal(tmp_path, {"run": "killed"})
    search(make_step(64, 2), journal)
    assert len(journal.trials(64)) == 2
    assert time.monotonic() - begin < 20


def test_two_processes_append_to_one_journal(tmp_path: Path) -> None:
    count = 60
    with appender(tmp_path, count) as one, appender(tmp_path, count) as other:
        for process in (one, other):
            process.communicate(timeout=120)
            assert process.returncode == 0
    trials = open_journal(tmp_path, {"run": "killed"}).trials(64)
    assert sorted(trial.value for trial in trials if trial.value is not None) == sorted(
        2 * list(map(float, range(count)))
    )


def test_opening_a_journal_leaves_alone_what_another_process_is_writing(tmp_path: Path) -> None:
    with appender(tmp_path, 400) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while process.poll() is None:
            open_journal(tmp_path, {"run": "killed"})
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert len(open_journal(tmp_path, {"run": "killed"}).trials(64)) == 400


# Folders that cannot be written


def test_a_folder_in_the_way_of_which_there_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"cannot write the journal .*runs"):
        open_journal(tmp_path / "runs", IDENTITY)


READ_ONLY = """
import os, sys
from pathlib import Path
from sm120tune.errors import UserError
from sm120tune.search.journal import Journal

if os.getuid() == 0:
    os.setuid(65534)
try:
    Journal(Path(sys.argv[1]), {"run": "killed"}, fresh=False)
except UserError as error:
    print(error)
"""


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == folder.owner() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    with child(READ_ONLY, folder) as process:
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out.startswith(f"cannot write the journal {folder}")
    assert out.strip().endswith("Permission denied")
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_told_and_all_earlier_trials_are_safe(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    with appender(tmp_path, 100, preexec_fn=limit) as process:
        out, errors = process.communicate(timeout=120)
    said = int(out.split()[-1])
    assert process.returncode != 0
    assert "UserError: cannot write the journal" in errors
    assert "File too large" in errors
    journal = open_journal(tmp_path, {"run": "killed"})
    assert len(journal.trials(64)) == said
    journal.save_note(64, "still", "works")
