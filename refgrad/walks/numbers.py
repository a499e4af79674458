"""How arrays look in a walk: a small one in full, a larger one by its corner and by what its numbers are like."""

from __future__ import annotations

from typing import Any

import numpy as np

FULL = 64  # elements of an array that is shown in full
_CORNER = 4  # elements along each axis of the corner of a larger one
_ROWS = 24  # lines of one array
_DIGITS = 5
_PRECISION = f".{_DIGITS}g"
_INLINE = 12  # elements on one line
LISTED = 4096  # elements of an array that is written as nested lists


def shape_of(value: Any) -> str:
    """The type and the shape of a value, "float32[2, 3]"; of a sequence, of each element."""
    if isinstance(value, list | tuple):
        return f"sequence of {len(value)}" + (f": {', '.join(map(shape_of, value[:3]))}" if value else "")
    if not isinstance(value, np.ndarray):
        return "nothing" if value is None else type(value).__name__
    return f"{value.dtype.name}[{', '.join(map(str, value.shape))}]"


def number(value: Any) -> str:
    """One element as text: five significant digits of a float."""
    if isinstance(value, str | bytes | bool | np.bool_ | int | np.integer):
        return str(value)
    if isinstance(value, complex | np.complexfloating):
        return f"{value:{_PRECISION}}"
    return f"{float(value) + 0.0:{_PRECISION}}"  # -0 is 0


def lines(value: Any, width: int = 76) -> list[str]:
    """The numbers of a value: all of a small array, the corner and the statistics of a large one. No line is wider."""
    if isinstance(value, list | tuple):
        listed: list[str] = []
        for k, item in enumerate(value[:_CORNER]):
            listed += [f"[{k}] {shape_of(item)}", *(f"  {line}" for line in lines(item, width - 2))]
        more = [f"... {len(value) - _CORNER} more elements"] if len(value) > _CORNER else []
        return [*(listed or ["(empty)"]), *more]
    if not isinstance(value, np.ndarray):
        return ["(nothing)" if value is None else str(value)]
    if not value.size:
        return ["(no elements)"]
    whole = value.size <= FULL
    shown = value if whole else value[tuple(slice(0, _CORNER) for _ in value.shape)]
    rows = shown.reshape(-1, shown.shape[-1]) if shown.ndim else shown.reshape(1, 1)
    texts = [[number(item) for item in row] for row in rows[:_ROWS]]
    widest = max(len(text) for row in texts for text in row)
    along = max((width - 6) // (widest + 1), 1)
    cut = "" if whole or value.shape[-1] <= _CORNER else " ..."
    found = []
    for row in texts:
        pieces = [row[k : k + along] for k in range(0, len(row), along)]
        found.append([" ".join(text.rjust(widest) for text in piece) for piece in pieces])
        found[-1][-1] += cut
    made = _blocks(found, shown.shape[:-1]) if shown.ndim > 2 else [line for row in found for line in row]
    if len(rows) > _ROWS:
        made.append(f"... {len(rows) - _ROWS} more rows")
    if not whole:
        made.append(f"(the corner) {statistics(value)}")
    return made


def _blocks(rows: list[list[str]], shape: tuple[int, ...]) -> list[str]:
    """The rows of an array of more than two axes, each matrix under its index."""
    found = []
    for k, row in enumerate(rows):
        at = np.unravel_index(k, shape)
        if at[-1] == 0:
            found.append(f"[{', '.join(str(int(i)) for i in at[:-1])}]")
        found += [f"  {line}" for line in row]
    return found


def inline(value: Any) -> str:
    """A value on one line: a few numbers in brackets, else its type, shape and statistics."""
    if isinstance(value, np.ndarray) and 0 < value.size <= _INLINE:
        return _nested(value)
    if isinstance(value, np.ndarray) and value.size:
        return f"{shape_of(value)}: {statistics(value)}"
    return shape_of(value)


def _nested(value: np.ndarray) -> str:
    return f"[{' '.join(map(_nested, value))}]" if value.ndim else number(value[()])


def statistics(value: np.ndarray) -> str:
    """The smallest, the mean and the largest element, the norm, and how many elements are 0 or not finite."""
    if value.dtype.kind in "OUSc" or not value.size:
        return f"{value.size} elements"
    wide = value.astype(np.float64)
    with np.errstate(all="ignore"):
        told = {"min": wide.min(), "mean": wide.mean(), "max": wide.max(), "norm": np.linalg.norm(wide)}
    said = [f"{name} {number(one)}" for name, one in told.items()]
    zeros, odd = int((wide == 0).sum()), int((~np.isfinite(wide)).sum())
    said += [f"{zeros} of {value.size} are 0"] if zeros else []
    said += [f"{odd} are not finite"] if odd else []
    return ", ".join(said)


def as_json(value: Any) -> Any:
    """A value for JSON: its type and shape, and its elements as nested lists where it has few, else its statistics."""
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if not isinstance(value, np.ndarray):
        return None if value is None else plain(value)
    made: dict[str, Any] = {"dtype": value.dtype.name, "shape": list(value.shape)}
    if value.size <= LISTED:
        return made | {"elements": plain(value)}
    return made | {"statistics": statistics(value)}


def plain(value: Any) -> Any:
    """Lists, dictionaries, numbers and text in place of arrays and their like: an infinity and NaN become text."""
    match value:
        case np.ndarray():
            if value.dtype.kind not in "biuOUSfc":  # a float of ml_dtypes
                value = value.astype(np.float64)
            return plain(value.tolist())
        case np.generic():
            return plain(np.asarray(value))
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case bool() | int() | str() | None:
            return value
        case float():
            return value if np.isfinite(value) else str(value)
        case bytes():
            return value.decode(errors="replace")
    return str(value)
