"""The errors that have a reason. They are in explanations.toml, whose first lines describe a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from refgrad.conformance.known.records import read
from refgrad.conformance.tools.precision import points
from refgrad.conformance.tools.precision.scan import Measured, Miss
from refgrad.errors import choices

_FILE = Path(__file__).with_suffix(".toml")
_PATTERNS = ("function", "dtype", "executor", "order")
_LIMITS = ("absolute", "units", "near_largest", "subnormal", "squares")
_KEYS = {"reason": str, "absolute": float, "units": float, "near_largest": float, "subnormal": bool, "squares": bool}


@dataclass(frozen=True)
class ErrorExplanation:
    """Errors above the bound, and why. The patterns in `of` say whose: function, type, executor and order.

    A miss is explained if it is within one of the limits: `absolute` is in the relative rounding error of the type, `units`
    in units; `near_largest`: an input is at least this part of the largest number; `subnormal`: the derivative is;
    `squares`: the square of an input leaves the range of the type.
    """

    reason: str
    of: tuple[str, str, str, str]
    absolute: float = 0.0
    units: float = 0.0
    near_largest: float = math.inf
    subnormal: bool = False
    squares: bool = False

    def matches(self, measured: Measured) -> bool:
        """True if the row is about these derivatives."""
        names = (measured.function, measured.dtype, measured.executor, str(measured.order))
        return all(fnmatchcase(name, pattern.replace("[", "[[]")) for name, pattern in zip(names, self.of, strict=True))

    def covers(self, miss: Miss, dtype: str) -> bool:
        """True if the miss is within a limit."""
        kind = points.info(dtype)
        sizes = [abs(x) for x in miss.at if x]
        least, most = float(kind.tiny), float(kind.max)
        return (
            miss.absolute <= self.absolute
            or miss.error <= self.units
            or max(sizes, default=0.0) >= self.near_largest * most
            or (self.subnormal and abs(float(miss.expected)) < least)
            or (self.squares and any(size < 2 * math.sqrt(least) or size > math.sqrt(most) / 2 for size in sizes))
        )


def reason(measured: Measured, miss: Miss, rows: Iterable[ErrorExplanation] | None = None) -> str:
    """The reason of the first row that explains the miss, "" if there is none."""
    found = (row for row in _matching(measured, rows) if row.covers(miss, measured.dtype))
    return next((row.reason for row in found), "")


def unexplained(measured: Measured, rows: Iterable[ErrorExplanation] | None = None) -> list[Miss]:
    """The errors above the bound that no row explains."""
    matching = list(_matching(measured, rows))
    return [miss for miss in measured.beyond if not any(row.covers(miss, measured.dtype) for row in matching)]


def _matching(measured: Measured, rows: Iterable[ErrorExplanation] | None) -> Iterator[ErrorExplanation]:
    return (row for row in (explanations() if rows is None else rows) if row.matches(measured))


@cache
def explanations() -> tuple[ErrorExplanation, ...]:
    """Every row of the table."""
    return tuple(_read())


def _read() -> Iterator[ErrorExplanation]:
    for record in read(_FILE, "explanation", {**_KEYS, "of": list}, optional=_LIMITS, named_by=("reason",)):
        limits = {key: record.values[key] for key in _LIMITS if key in record.values}
        if not limits:
            raise record.wrong(f"it has no limit. Give it one of {choices(_LIMITS)}.")
        for row in record["of"]:
            if not isinstance(row, list) or len(row) != len(_PATTERNS) or not all(isinstance(p, str) for p in row):
                raise record.wrong(f"of has {row!r}. Write four patterns: [{', '.join(_PATTERNS)}].")
            yield ErrorExplanation(record["reason"], (row[0], row[1], row[2], row[3]), **limits)
