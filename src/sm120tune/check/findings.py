"""What a check found: small frozen records that the command prints or writes as JSON."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sm120tune.check.view import ServerView


class Level(enum.StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """The server stops, computes wrong numbers, or never reads the file."""
    WARNING = "warning"
    """It runs, but probably not as whoever wrote the file meant."""
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One fault or fact, where it is, and what to do about it."""

    level: Level
    code: str
    """A short fixed name of the kind, for scripts."""
    file: str
    """The file or folder, or what the server asks for; empty for what concerns no file."""
    what: str
    fix: str = ""
    key: str = ""
    """The row's key or a range of M; empty for the whole file."""

    def to_json(self) -> dict[str, str]:
        """Return a JSON object."""
        return {
            "level": self.level.value,
            "code": self.code,
            "file": self.file,
            "key": self.key,
            "what": self.what,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Report:
    """Everything that one check found."""

    findings: tuple[Finding, ...]
    files: tuple[str, ...]
    """The files that were read."""
    server: ServerView | None = None
    """What a server would launch, where the check was asked about one."""

    def count(self, level: Level) -> int:
        """Return the number of findings of a level."""
        return sum(finding.level is level for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "files": list(self.files),
            "counts": {level.value: self.count(level) for level in Level},
            "findings": [finding.to_json() for finding in self.findings],
            "server": self.server.to_json() if self.server is not None else None,
        }


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings without repeats; those that differ in their key alone become one with all keys."""
    kept: dict[Finding, list[str]] = {}
    for finding in findings:
        keys = kept.setdefault(replace(finding, key=""), [])
        if finding.key and finding.key not in keys:
            keys.append(finding.key)
    return tuple(replace(finding, key=", ".join(keys)) for finding, keys in kept.items())
