"""A candidate tile, and the pair of tiles that SGLang runs for one M.

Field names are SGLang's own, so that a row of its JSON files and a :class:`Tile` are the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

TRITON_DEFAULT_NUM_WARPS = 4
TRITON_DEFAULT_NUM_STAGES = 3

TILE_FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
_REQUIRED = TILE_FIELDS[:4]


def is_field_value(value: object) -> bool:
    """Whether a field of a row can hold a value: a positive integer of 32 bits, as the kernel's launch takes."""
    return type(value) is int and 1 <= value < 2**31


@dataclass(frozen=True, order=True)
class Tile:
    """One launch configuration of ``fused_moe_kernel`` for one GEMM."""

    BLOCK_SIZE_M: int
    BLOCK_SIZE_N: int
    BLOCK_SIZE_K: int
    GROUP_SIZE_M: int
    num_warps: int = TRITON_DEFAULT_NUM_WARPS
    num_stages: int = TRITON_DEFAULT_NUM_STAGES
    USE_TMA: bool = False

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Tile:
        """Read a row of an SGLang config file.

        A row without ``num_warps`` or ``num_stages`` (SGLang's bf16 default is one) runs with Triton's own
        4 and 3. Raises ValueError for a missing field, one that :func:`is_field_value` refuses, or an unknown field.
        """
        if not isinstance(row, Mapping):
            raise ValueError(f"a row must be an object with BLOCK_SIZE_M and so on, not {row!r:.60}")
        for name in _REQUIRED:
            if name not in row:
                raise ValueError(f"row has no {name}: {dict(row)}")
        unknown = set(row) - {*TILE_FIELDS, "USE_TMA"}
        if unknown:
            raise ValueError(f"row has unknown field {sorted(unknown)[0]!r}: {dict(row)}")
        values: dict[str, int] = {}
        for name in TILE_FIELDS:
            if name in row:
                value = row[name]
                if not is_field_value(value):
                    raise ValueError(f"{name} must be a positive integer below 2**31, not {value!r:.60}")
                values[name] = value
        return cls(**values, USE_TMA=bool(row.get("USE_TMA", False)))

    def to_row(self) -> dict[str, int | bool]:
        """Return the row as SGLang's JSON holds it; ``USE_TMA`` only where it is on.

        Up to SGLang 0.5.15 the mere presence of the key in an up file raises KeyError at launch.
        """
        row: dict[str, int | bool] = {name: getattr(self, name) for name in TILE_FIELDS}
        if self.USE_TMA:
            row["USE_TMA"] = True
        return row

    def with_block_m(self, block_size_m: int) -> Tile:
        """Return the same tile with another BLOCK_SIZE_M, as SGLang overrides a down row's."""
        return replace(self, BLOCK_SIZE_M=block_size_m)

    def __str__(self) -> str:
        tma = " tma" if self.USE_TMA else ""
        return (
            f"{self.BLOCK_SIZE_M}x{self.BLOCK_SIZE_N}x{self.BLOCK_SIZE_K} g{self.GROUP_SIZE_M} "
            f"w{self.num_warps} s{self.num_stages}{tma}"
        )


@dataclass(frozen=True, order=True)
class TilePair:
    """What SGLang runs for one M: one align feeds both GEMMs, so BLOCK_SIZE_M is shared."""

    gate_up: Tile
    down: Tile

    def __post_init__(self) -> None:
        if self.gate_up.BLOCK_SIZE_M != self.down.BLOCK_SIZE_M:
            raise ValueError(
                f"a pair shares BLOCK_SIZE_M: gate_up has {self.gate_up.BLOCK_SIZE_M}, "
                f"down has {self.down.BLOCK_SIZE_M}"
            )

    @classmethod
    def same(cls, tile: Tile) -> TilePair:
        """Return the pair that uses one tile for both GEMMs."""
        return cls(tile, tile)

    @property
    def block_size_m(self) -> int:
        """BLOCK_SIZE_M of both rows."""
        return self.gate_up.BLOCK_SIZE_M

    def __str__(self) -> str:
        return str(self.gate_up) if self.gate_up == self.down else f"{self.gate_up} | {self.down}"
