"""Strategies of the operators that read or write elements by index."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, Shape, strategy


@strategy("Gather")
def gather(d: Drawing) -> Case:
    """Indices of any rank, sometimes empty, with duplicates, counted from either end."""
    shape = d.shape(1, 3, elements=24, empty=False)
    axis = d.axis(len(shape))
    indices = _indices(d, d.shape(0, 2, size=3), shape[axis])
    return d.case(d.floats(shape), indices, axis=None if axis == 0 else axis, fixed=["indices"])


@strategy("GatherElements")
def gather_elements(d: Drawing) -> Case:
    """Along every other axis as many indices as elements, or fewer."""
    shape, axis = _along_axis(d)
    indices = _indices(d, _within(d, shape, axis, 1), shape[axis])
    return d.case(d.floats(shape), indices, axis=None if axis == 0 else axis, fixed=["indices"])


@strategy("GatherND")
def gather_nd(d: Drawing) -> Case:
    """Index tuples for some or all of the axes after the batch axes."""
    shape = d.shape(1, 4, size=3, empty=False)
    batch = d.integer(0, len(shape) - 1)
    length = d.integer(1, len(shape) - batch)
    several = d.shape(0, 2, size=2)
    indices = _tuples(d, (*shape[:batch], *several), shape[batch : batch + length])
    return d.case(d.floats(shape), indices, batch_dims=batch if batch or d.flag() else None, fixed=["indices"])


@strategy("ScatterElements", kinks=True)
def scatter_elements(d: Drawing) -> Case:
    """Every reduction; indices repeat only where it adds, multiplies or compares."""
    reduction = _reduction(d)
    shape, axis = _along_axis(d)
    once = reduction in (None, "none")
    several = _within(d, shape, axis, 0 if once else 1)
    indices = _different(d, several, shape, axis) if once else _indices(d, several, shape[axis])
    data, updates = _data_and_updates(d, shape, several, reduction)
    named: dict[str, Any] = {"axis": None if axis == 0 else axis, "reduction": reduction}
    return d.case(data, indices, updates, fixed=["indices"], **named)


@strategy("Scatter", oldest=9, newest=10)
def scatter(d: Drawing) -> Case:
    """As ScatterElements without a reduction."""
    shape, axis = _along_axis(d)
    several = _within(d, shape, axis, 0)
    indices = _different(d, several, shape, axis) % shape[axis]
    return d.case(d.floats(shape), indices, d.floats(several), fixed=["indices"], axis=None if axis == 0 else axis)


@strategy("ScatterND", kinks=True)
def scatter_nd(d: Drawing) -> Case:
    """Every reduction; rows or elements, repeated only where the reduction allows it."""
    reduction = _reduction(d)
    shape = d.shape(1, 3, size=3, empty=False)
    sizes = shape[: d.integer(1, len(shape))]
    if reduction in (None, "none"):
        order = d.permutation(prod(sizes))[: d.integer(0, prod(sizes))]
        places = np.unravel_index(np.array(order, np.int64), sizes)
        indices = np.stack(places, -1).astype(np.int64).reshape(len(order), len(sizes))
        indices -= np.array(sizes) * d.bools(indices.shape)
    else:
        indices = _tuples(d, d.shape(0, 2, size=3), sizes).astype(np.int64)
    several = (*indices.shape[:-1], *shape[len(sizes) :])
    data, updates = _data_and_updates(d, shape, several, reduction)
    return d.case(data, indices, updates, fixed=["indices"], reduction=reduction)


@strategy("Compress")
def compress(d: Drawing) -> Case:
    """Along an axis or of all elements; a shorter condition leaves out the rest."""
    shape = d.shape(1, empty=False)
    axis = d.optional(lambda: d.axis(len(shape)))
    length = prod(shape) if axis is None else shape[axis]
    condition = d.bools((d.integer(1, length),))
    return d.case(d.floats(shape), condition, axis=axis, fixed=["condition"])


@strategy("TopK", kinks=True)
def top_k(d: Drawing) -> Case:
    """The largest or the smallest, none to all of them. Unsorted only if k is 1: the order of several is undefined."""
    shape = d.shape(1, empty=False)
    axis = d.axis(len(shape))
    k = d.integer(0, shape[axis])
    named: dict[str, Any] = {
        "axis": None if axis == -1 else axis,
        "largest": d.pick(None, 0, 1),
        "sorted": d.pick(None, 1, *([0] if k == 1 else [])),
    }
    return d.case(d.distinct(shape), np.array([k], np.int64), outputs=2, fixed=["K"], **named)


@strategy("Unique", kinks=True)
def unique(d: Drawing) -> Case:
    """Elements or slices, sorted or as they come, with every number of outputs."""
    shape = d.shape(1, 3, elements=24, empty=False)
    axis = d.optional(lambda: d.axis(len(shape)))
    return d.case(d.distinct(shape), axis=axis, sorted=d.pick(None, 0, 1), outputs=d.integer(1, 4))


@strategy("OneHot")
def one_hot(d: Drawing) -> Case:
    """Indices of one axis or more, some out of range, and the new axis anywhere."""
    shape = d.shape(1, 2)
    depth = d.integer(1, 4)
    rank = len(shape) + 1
    return d.case(
        d.integers(shape, -depth - 1, depth + 1),
        np.array(depth, np.int64),
        d.floats((2,)),
        axis=d.pick(None, *range(rank), *range(-rank, 0)),
        fixed=["indices", "depth"],
    )


def _along_axis(d: Drawing) -> tuple[Shape, int]:
    shape = d.shape(1, 3, elements=24, empty=False)
    return shape, d.axis(len(shape))


def _within(d: Drawing, shape: Shape, axis: int, more: int) -> Shape:
    """A shape no larger than `shape`; only along `axis` it may have up to `more` elements more, or none."""
    at = axis % len(shape)
    return tuple(d.integer(0, n + more) if k == at else d.integer(1, n) for k, n in enumerate(shape))


def _indices(d: Drawing, shape: Shape, size: int) -> np.ndarray:
    return d.integers(shape, -size, size - 1, d.pick(np.int64, np.int32))


def _tuples(d: Drawing, several: Shape, sizes: Shape) -> np.ndarray:
    """Tuples of indices into axes of these sizes."""
    each = [d.integers(several, -size, size - 1) for size in sizes]
    return np.stack(each, -1)


def _different(d: Drawing, several: Shape, shape: Shape, axis: int) -> np.ndarray:
    """Indices along the axis, all different within a lane: each lane has its own permutation of the elements."""
    at, size = axis % len(shape), shape[axis]
    order = np.array(d.permutation(size), np.int64)
    lanes = np.indices(several)
    places = (order[lanes[at]] + lanes.sum(0) - lanes[at]) % size
    placed: np.ndarray = places - size * d.bools(several)
    return placed


def _reduction(d: Drawing) -> str | None:
    if d.opset < 16:
        return None
    some: list[str] = ["max", "min"] if d.opset >= 18 else []
    if d.values == "kink" and some:
        return d.pick(*some)
    options: list[str | None] = [None, "none", "add", "mul", *some]
    return d.pick(*options)


def _data_and_updates(d: Drawing, shape: Shape, several: Shape, reduction: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Data and updates; for a maximum or minimum from `Drawing.distinct`, so that they do not tie."""
    if reduction not in ("max", "min"):
        return d.floats(shape), d.floats(several)
    numbers = d.distinct((prod(shape) + prod(several),))
    return numbers[: prod(shape)].reshape(shape), numbers[prod(shape) :].reshape(several)
