"""The elements of a tensor that are furthest off, and a small picture of all."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.locating.replay import distance
from refgrad.conformance.locating.verdicts import Element, Maps

_LISTED = 3  # elements
_ROWS, _COLUMNS = 24, 32  # of a picture


def elements_of(got: np.ndarray, due: np.ndarray) -> tuple[Element, ...]:
    """The elements that are furthest off, the furthest first; none if the shapes differ."""
    if got.shape != due.shape:
        return ()
    off = distance(got, due)
    order = np.argsort(-off, axis=None, kind="stable")[:_LISTED]
    places = [tuple(map(int, np.unravel_index(int(k), off.shape))) for k in order if off.flat[k] > 0]
    return tuple(Element(at, float(due[at]), float(got[at])) for at in places)


def maps_of(got: np.ndarray, due: np.ndarray) -> Maps | None:
    """A picture of the tensor as a matrix of all axes but the last by the last; None if the shapes differ or it is empty.

    A cell of several elements shows the one that is furthest off.
    """
    if got.shape != due.shape or not due.size:
        return None
    columns = (
        due.shape[-1] if due.ndim > 1 else max(1, int(np.ceil(np.sqrt(due.size))) if due.size > _COLUMNS else due.size)
    )
    pad = -due.size % columns
    expected, found = (np.pad(a.astype(np.float64).reshape(-1), (0, pad), constant_values=np.nan) for a in (due, got))
    expected, found = expected.reshape(-1, columns), found.reshape(-1, columns)
    off = np.where(np.isnan(expected) & np.isnan(found), -1.0, distance(found, expected))
    rows = np.array_split(np.arange(len(expected)), min(_ROWS, len(expected)))
    parts = np.array_split(np.arange(columns), min(_COLUMNS, columns))
    grids: list[list[tuple[float, ...]]] = [[], [], []]
    for row in rows:
        cells = []
        for part in parts:
            block = off[np.ix_(row, part)]
            k, n = np.unravel_index(int(np.argmax(block)), block.shape)
            at = int(row[k]), int(part[n])
            with np.errstate(invalid="ignore"):
                cells.append((float(expected[at]), float(found[at]), float(found[at] - expected[at])))
        for grid, values in zip(grids, zip(*cells, strict=True), strict=True):
            grid.append(tuple(values))
    return Maps(*map(tuple, grids))
