"""How far a result may be from its reference; needs no torch, so that whoever decides need not import it."""

from __future__ import annotations

from dataclasses import dataclass

from sm120tune.errors import UserError

_BOUNDS = {
    "bf16": (0.01, 0.03),
    "fp16": (0.002, 0.006),
    "fp8_w8a8": (0.03, 0.09),
    "int8_w8a8": (0.02, 0.06),
    "int8_w8a16": (0.01, 0.03),
    "int4_w4a16": (0.01, 0.03),
}


@dataclass(frozen=True)
class ErrorMeasure:
    """How far an output is from its reference; both errors are infinite where the output is not finite."""

    relative: float
    """Norm of the difference over norm of the reference."""
    worst_row: float
    """The largest such ratio of a single row."""
    nan_rows: int
    """Rows of the output that hold a NaN or an infinity."""


def error_bound(dtype: str) -> tuple[float, float]:
    """Return the largest (relative, worst_row) errors of a right result with operands of ``dtype``.

    Rounding to bf16 (8 significant bits) costs about 0.0017 of a value's rms. Gate, up, their product, the down
    output and the sum are each rounded once: sqrt(5) * 0.0017 = 0.0038, which is what SGLang's own bf16 kernel was
    seen at. The overall bound is 2.6 times that. A row holds hundreds of columns, so its error is close to the
    overall one; the row bound is 8 times it. A wrong or missing choice moves its token's row by at least
    ``weight / norm of the token's weights``, so the row bound finds any choice that holds 3 % of that norm, where
    one wrong 16-row block among many thousand rows could hide in the overall one. fp16 has 3 bits more (8 times
    less rounding); its bounds are 5 times less, since accumulation inside the tensor cores does not shrink along.
    Raises UserError for another dtype.
    """
    if dtype not in _BOUNDS:
        raise UserError(f"no error bound for dtype {dtype!r}; choose one of {', '.join(_BOUNDS)}")
    return _BOUNDS[dtype]


def is_correct(error: ErrorMeasure, dtype: str) -> bool:
    """Whether an error is one that rounding alone can explain."""
    relative, worst_row = error_bound(dtype)
    return error.nan_rows == 0 and error.relative <= relative and error.worst_row <= worst_row
