"""The points of the scan: all magnitudes and signs of a type, dense where functions turn, and at the ends."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

TYPES = ("float16", "bfloat16", "float32", "float64")
_SPREAD = 40  # points over all magnitudes
_DENSE = 60  # points between 2⁻¹⁰ and 2¹⁰
_ROWS = 120  # points of a function of several numbers


def info(dtype: str) -> ml_dtypes.finfo:
    """The numbers of a type."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


@cache
def line(dtype: str, ends: tuple[float, ...] = ()) -> np.ndarray:
    """Numbers of the type, of both signs."""
    made, rng = np.dtype(dtype), np.random.default_rng(0)
    kind = info(dtype)
    least, most = float(np.log2(float(kind.smallest_subnormal))), float(np.log2(float(kind.max)))
    sizes = np.concatenate(
        [
            2.0 ** np.linspace(least, np.nextafter(most, 0), _SPREAD),
            2.0 ** rng.uniform(-10, min(10.0, most), _DENSE),
            [float(kind.smallest_subnormal), float(kind.tiny), float(kind.eps), 1.0, float(kind.max)],
        ]
    )
    near = [end + side * float(kind.eps) * 2.0**k for end in ends for side in (-1, 1) for k in (-1, 0, 1, 3, 5)]
    with np.errstate(over="ignore"):
        numbers = np.concatenate([sizes, -sizes, near, [0.0, -0.0]]).astype(made)
    finite = numbers[np.isfinite(numbers.astype(np.float64))]
    return finite[np.unique(finite.astype(np.float64), return_index=True)[1]]


@cache
def rows(dtype: str, arity: int) -> np.ndarray:
    """Rows of `arity` numbers of the type: of moderate sizes, of any size, and with zeros."""
    rng = np.random.default_rng(arity)
    made = np.dtype(dtype)
    kind = info(dtype)
    least, most = float(np.log2(float(kind.tiny))), float(np.log2(float(kind.max)))
    signs = rng.choice([-1.0, 1.0, 1.0], (_ROWS, arity))
    sizes = rng.uniform(-3, 3, (_ROWS, arity))
    half = _ROWS // 2
    sizes[half:] = rng.uniform(least, most - 1, (_ROWS - half, arity))
    numbers = signs * 2.0**sizes
    return np.asarray(numbers.astype(made))
