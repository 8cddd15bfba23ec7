"""Why a candidate could not be used: a closed set, counted and shown by kind."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FailureKind(enum.StrEnum):
    """Every way in which a candidate is known to fall out of a run."""

    SHARED_MEMORY = "shared_memory"
    REGISTERS = "registers"
    SPILLS = "spills"
    COMPILE_CRASH = "compile_crash"
    COMPILE_TIMEOUT = "compile_timeout"
    COMPILE_KILLED = "compile_killed"
    """The compiler was ended from outside: the machine was short of memory, or a person did it."""
    LAUNCH_ERROR = "launch_error"
    ILLEGAL_ACCESS = "illegal_access"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    NOT_RECORDED = "not_recorded"
    """A replay's table does not have it."""


INCONCLUSIVE = frozenset({FailureKind.COMPILE_TIMEOUT, FailureKind.COMPILE_KILLED, FailureKind.NOT_RECORDED})
"""What tells more of the machine's load, or of a table, than of the candidate: another time it may run."""


@dataclass(frozen=True)
class Failure:
    """One candidate's failure: its kind and a short reason for the journal."""

    kind: FailureKind
    message: str = ""

    @property
    def inconclusive(self) -> bool:
        """Whether its kind is one of :data:`INCONCLUSIVE`."""
        return self.kind in INCONCLUSIVE

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"

    def to_json(self) -> dict[str, str]:
        """Return a JSON object that :meth:`from_json` reads back."""
        return {"kind": self.kind.value, "message": self.message}

    @classmethod
    def from_json(cls, data: dict[str, str]) -> Failure:
        """Rebuild a failure; raises ValueError for a kind outside the closed set."""
        return cls(FailureKind(data["kind"]), data.get("message", ""))


def was_killed(result: object) -> bool:
    """Whether a result is none because the compiler was killed: it is not remembered, so that it is tried again."""
    return isinstance(result, Failure) and result.kind is FailureKind.COMPILE_KILLED
