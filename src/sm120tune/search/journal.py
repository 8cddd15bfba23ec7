"""Every finished trial on disk, in Optuna's JournalStorage, so that an interruption loses nothing.

One study per M, named after the search space; only the parent process writes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial

from sm120tune.errors import UserError
from sm120tune.search_space import space_hash

_FILE = "journal.log"


def run_hash(identity: Mapping[str, Any]) -> str:
    """Return the name of a run: the same problem, card, software, routing and seed resume each other."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


class Journal:
    """The journal of one run; raises UserError when its folder cannot be written or its file is damaged."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, fresh: bool, space: str | None = None) -> None:
        self._space = space_hash() if space is None else space
        self.folder = folder / run_hash(identity)
        self.path = self.folder / _FILE
        self._studies: dict[int, optuna.Study] = {}
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                self.path.unlink(missing_ok=True)
            lock = _ProcessLock(self.path)
            with filelock.FileLock(lock.path):
                _drop_torn_tail(self.path)
            (self.folder / "identity.json").write_text(json.dumps(identity, indent=4, sort_keys=True) + "\n")
            self._storage = JournalStorage(JournalFileBackend(str(self.path), lock))
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot write the journal {self.path}: {reason}") from error
        except Exception as error:
            # Optuna replays the lines without looking at them first, so that damage can be any exception.
            said = str(error) or type(error).__name__
            raise UserError(f"the journal {self.path} is damaged ({said}); start over with --fresh") from error

    def study(self, m: int) -> optuna.Study:
        """Return the stored study of one M, made if it is not there."""
        if m not in self._studies:
            self._studies[m] = optuna.create_study(
                storage=self._storage, study_name=f"{self._space}-M{m}", direction="minimize", load_if_exists=True
            )
        return self._studies[m]

    def trials(self, m: int) -> list[FrozenTrial]:
        """Return the finished trials of one M."""
        return [trial for trial in self.study(m).get_trials(deepcopy=False) if trial.state.is_finished()]

    def add(self, m: int, trial: FrozenTrial) -> None:
        """Append one finished trial; raises UserError on a full disk, with all earlier ones safe."""
        try:
            self.study(m).add_trial(trial)
        except OSError as error:
            raise UserError(f"cannot write the journal {self.path}: {error.strerror}") from error

    def save_note(self, m: int, name: str, value: Any) -> None:
        """Keep a JSON value with one M: the result of its race, for example."""
        try:
            self.study(m).set_user_attr(name, value)
        except OSError as error:
            raise UserError(f"cannot write the journal {self.path}: {error.strerror}") from error

    def note(self, m: int, name: str) -> Any:
        """Return what :meth:`save_note` kept, or None."""
        return self.study(m).user_attrs.get(name)


class _ProcessLock(JournalFileSymlinkLock):
    """A lock that ends with its process; Optuna's own, left by a killed one, is waited for half a minute."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self.path = journal.with_suffix(".lock")
        self._held = filelock.FileLock(self.path)

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._held.acquire()
        return True

    def release(self) -> None:
        """Let others append."""
        self._held.release()


def _drop_torn_tail(path: Path) -> None:
    """Cut a last line that a killed process left without its end; Optuna would refuse the whole file.

    Raises ValueError for a last line that has its end and is no JSON: Optuna would see it at the next append only.
    """
    if not path.is_file():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("rb+") as file:
            file.truncate(end)
    if end:
        json.loads(content[content.rfind(b"\n", 0, end - 1) + 1 : end])
