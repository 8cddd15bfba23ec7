"""Reading JSON that people or earlier runs left behind, so that every fault names its field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parse_object(text: str) -> dict[str, Any]:
    """Parse one JSON object; raises ValueError for anything else, NaN and repeated keys included."""
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """Read a file as one JSON object; raises OSError or ValueError."""
    return parse_object(path.read_text(encoding="utf-8"))


def dump_object(data: Mapping[str, Any]) -> str:
    """Render as SGLang's own files are: four blanks, one trailing newline. Raises ValueError for NaN."""
    return json.dumps(data, indent=4, allow_nan=False) + "\n"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A key given twice would silently lose its first value.
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} is given twice")
        result[key] = value
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


LARGEST_INTEGER = 2**63 - 1
"""Python reads integers of any length; what computes with them takes 64 bits."""


def is_finite(value: object) -> bool:
    """Whether a value of a JSON file is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Fields:
    """Typed access to one JSON object; every ValueError names the field as ``prefix`` plus its name."""

    def __init__(self, data: object, prefix: str = "") -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{prefix.rstrip('.') or 'document'} must be a JSON object, not {data!r:.60}")
        self._data: dict[str, Any] = data
        self._prefix = prefix
        self._seen: set[str] = set()

    def name(self, key: str) -> str:
        """Return the field's name as a message shows it."""
        return self._prefix + key

    def take(self, key: str) -> Any:
        """Return a field of any type; raises ValueError where it is missing."""
        if key not in self._data:
            raise ValueError(f"{self.name(key)} is missing")
        self._seen.add(key)
        return self._data[key]

    def has(self, key: str) -> bool:
        """Whether a field that may be left out is there."""
        return key in self._data

    def _bad(self, key: str, wanted: str, value: object) -> ValueError:
        return ValueError(f"{self.name(key)} must be {wanted}, not {value!r:.60}")

    def text(self, key: str) -> str:
        """Return a string."""
        value = self.take(key)
        if not isinstance(value, str):
            raise self._bad(key, "a text", value)
        return value

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.take(key)
        if not isinstance(value, bool):
            raise self._bad(key, "true or false", value)
        return value

    def integer(self, key: str, *, least: int = 0, most: int | None = None) -> int:
        """Return an integer of at least ``least`` and at most ``most``, else below 2**63."""
        value = self.take(key)
        if type(value) is not int or not least <= value <= (LARGEST_INTEGER if most is None else most):
            wanted = f"of at least {least} and below 2**63" if most is None else f"from {least:,} to {most:,}"
            raise self._bad(key, f"an integer {wanted}", value)
        return value

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self.take(key)
        if not is_finite(value):
            raise self._bad(key, "a finite number", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a finite number or None."""
        return None if self.take(key) is None else self.number(key)

    def items(self, key: str) -> list[Any]:
        """Return a list."""
        value = self.take(key)
        if not isinstance(value, list):
            raise self._bad(key, "a list", value)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a JSON object."""
        value = self.take(key)
        if not isinstance(value, dict):
            raise self._bad(key, "a JSON object", value)
        return value

    def finish(self) -> None:
        """Raise ValueError for a field that nobody asked for."""
        unknown = sorted(set(self._data) - self._seen)
        if unknown:
            raise ValueError(f"{self.name(unknown[0])} is not a known field")
