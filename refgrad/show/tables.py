"""Tables for people: numbers in three digits, and no character of a name moves the cursor or counts as markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from refgrad.escaping import printable
from refgrad.markup import text_of

GOOD, WRONG, UNKNOWN = "green", "bold red", "yellow"  # the colours of verdicts


def cell(value: Any) -> Text:
    """Return what a table shows of a value: "-" for None, three digits of a float."""
    return Text(printable(text_of(value)))


def table(rows: Iterable[Mapping[str, Any]], styles: Mapping[str, Mapping[str, str]] | None = None) -> Table:
    """Return a table of rows that have the same keys, under a header of these keys. A column of numbers never breaks.

    :param styles: for a column, the colour of some of its values, where the terminal has colours.
    """
    made = Table(box=None, pad_edge=False)
    listed = list(rows)
    for name in listed[0] if listed else ():
        number = any(isinstance(row[name], float | int) for row in listed)
        made.add_column(Text(printable(name)), justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in listed:
        cells = {name: cell(value) for name, value in row.items()}
        for name, colours in (styles or {}).items():
            if row.get(name) in colours:
                cells[name].stylize(colours[row[name]])
        made.add_row(*cells.values())
    return made


def statistics(name: str, value: Any) -> dict[str, Any]:
    """Return a row about an array: its name, dtype, shape, minimum, mean, maximum and norm.

    A sequence or an optional value has no shape; a string or complex array has no minimum.
    """
    row: dict[str, Any] = {"name": name, "dtype": type(value).__name__, "shape": None}
    row |= dict.fromkeys(("min", "mean", "max", "norm"))
    if not isinstance(value, np.ndarray):
        return row
    row |= {"dtype": value.dtype.name, "shape": list(value.shape)}
    if value.size and value.dtype.kind not in "OUSc":
        wide = value.astype(np.float64)
        with np.errstate(all="ignore"):
            row |= {
                "min": float(wide.min()),
                "mean": float(wide.mean()),
                "max": float(wide.max()),
                "norm": float(np.linalg.norm(wide)),
            }
    return row


def is_finite(value: Any) -> bool:
    """True if `value` has no infinity and no NaN. A value that is not an array of numbers has neither."""
    numbers = isinstance(value, np.ndarray) and value.dtype.kind not in "OUS"
    return not numbers or bool(np.all(np.isfinite(value)))
