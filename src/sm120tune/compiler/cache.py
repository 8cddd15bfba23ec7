"""Outcomes of compilations on disk, so that a second run and every other M compile nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

from sm120tune.compiler.facts import TileFacts
from sm120tune.compiler.spec import CompileSpec
from sm120tune.failures import Failure, was_killed
from sm120tune.state import write_atomically

Outcome = TileFacts | Failure


class CompileCache:
    """One small JSON file per variant; a damaged one counts as absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._memory: dict[str, Outcome] = {}

    @property
    def triton_folder(self) -> Path:
        """Triton's own cache, which holds the binaries."""
        return self.folder / "triton"

    def get(self, spec: CompileSpec) -> Outcome | None:
        """Return the recorded outcome, or None when there is none that can be read."""
        key = spec.key
        known = self._memory.get(key)
        if known is None:
            known = self._read(key)
            if known is not None:
                self._memory[key] = known
        return known

    def put(self, spec: CompileSpec, outcome: Outcome) -> None:
        """Record an outcome; a full disk costs the record, not the run.

        An inconclusive one is recorded for this run alone, one that was killed not at all: asked for again, it is
        compiled again.
        """
        if was_killed(outcome):
            return
        key = spec.key
        self._memory[key] = outcome
        if isinstance(outcome, Failure):
            if outcome.inconclusive:
                return
            content: dict[str, object] = {"failure": outcome.to_json()}
        else:
            content = {"facts": outcome.to_json()}
        try:
            write_atomically(self._path(key), json.dumps(content).encode())
        except OSError:
            return

    def _path(self, key: str) -> Path:
        return self.folder / "outcomes" / key[:2] / f"{key}.json"

    def _read(self, key: str) -> Outcome | None:
        try:
            content = json.loads(self._path(key).read_bytes())
            if "failure" in content:
                return Failure.from_json(content["failure"])
            return TileFacts(**content["facts"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
