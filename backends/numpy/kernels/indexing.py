"""Gathers, scatters, slices and their gradients. Negative indices count from the end; duplicates add up."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_axes, check_axis, check_indices, check_shape
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel, reuse_first
from refgrad.protos.domains import MICROSOFT


def add_at(size: int, flat: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Zeros (size,) of the type of `values` with `values` added where `flat` points; sums of floats are in double."""
    flat, values = flat.reshape(-1), values.reshape(-1)
    if values.dtype.kind in "iub":
        total = np.zeros(size, values.dtype)
        np.add.at(total, flat, values)
        return total
    return np.bincount(flat, values.astype(np.float64, copy=False), size).astype(values.dtype)


def add_rows(count: int, indices: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Zeros (count, row) with each of `rows` (len(indices), row) added at its index."""
    if not rows.size:
        return np.zeros((count, rows.shape[1]), rows.dtype)
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    total = np.zeros((count, rows.shape[1]), rows.dtype)
    if len(starts) == len(indices):
        total[indices] = rows
    else:
        total[ordered[starts]] = np.add.reduceat(rows[order], starts, 0, dtype=rows.dtype)
    return total


def _flat_elements(shape: tuple[int, ...], indices: np.ndarray, axis: int) -> np.ndarray:
    """Flat positions of `indices` of GatherElements or ScatterElements in an array of `shape`."""
    axis = check_axis(axis, len(shape))
    if indices.ndim != len(shape):
        raise ValueError(f"indices have rank {indices.ndim} and the data {len(shape)}; the ranks must be equal")
    if any(n > size for i, (n, size) in enumerate(zip(indices.shape, shape, strict=True)) if i != axis):
        raise ValueError(f"indices {list(indices.shape)} are larger than the data {list(shape)} beside axis {axis}")
    flat, stride, offset = check_indices(indices, shape[axis]), 1, None
    for i in reversed(range(len(shape))):
        if i == axis:
            flat = flat if stride == 1 else flat * np.int64(stride)
        elif indices.shape[i] > 1:
            steps = (np.arange(indices.shape[i]) * stride).reshape(-1, *[1] * (len(shape) - i - 1))
            offset = steps if offset is None else offset + steps
        stride *= shape[i]
    return flat if offset is None else flat + offset


def _flat_tuples(shape: tuple[int, ...], indices: np.ndarray, batch_dims: int = 0) -> tuple[np.ndarray, int]:
    """The number of the slice that each tuple of GatherND points at, and how many elements a slice has."""
    depth = indices.shape[-1] if indices.ndim else 0
    if not indices.ndim or not 0 <= batch_dims < indices.ndim or batch_dims + depth > len(shape):
        raise ValueError(
            f"indices {list(indices.shape)} with batch_dims={batch_dims} do not fit data {list(shape)}: batch_dims is "
            "below the ranks, and the last axis of the indices counts axes of the data behind the batch"
        )
    if shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ValueError(f"data {list(shape)} and indices {list(indices.shape)} differ in the {batch_dims} batch axes")
    indexed = shape[batch_dims : batch_dims + depth]
    flat = np.zeros(indices.shape[:-1], np.int64)
    for i, n in enumerate(indexed):
        part = check_indices(indices[..., i], n)
        flat = flat * n + part if i else part.astype(np.int64, copy=False)
    if batch_dims:
        batch = np.arange(math.prod(shape[:batch_dims])) * math.prod(indexed)
        flat = flat + batch.reshape((*shape[:batch_dims], *[1] * (flat.ndim - batch_dims)))
    return flat, math.prod(shape[batch_dims + depth :])


@kernel("Gather", fresh=True)
def gather(data: np.ndarray, indices: np.ndarray, *, axis: int) -> np.ndarray:
    axis = check_axis(axis, data.ndim)
    try:
        if data.size:  # NumPy does not check the indices of empty data
            return np.asarray(data.take(indices, axis), data.dtype)  # one string is not an array
    except IndexError:
        pass  # check_indices says more
    return np.asarray(data.take(check_indices(indices, data.shape[axis]), axis), data.dtype)


@kernel("ShrunkenGather", domain=MICROSOFT, fresh=True)
def shrunken_gather(data: np.ndarray, indices: np.ndarray, *, axis: int = 0) -> np.ndarray:
    """Gather with a vector of indices"""
    if indices.ndim != 1:
        raise ValueError(f"its indices must be a vector, not a tensor of rank {indices.ndim}")
    return gather(data, indices, axis=axis)


@kernel("GatherGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def gather_grad(shape: np.ndarray, indices: np.ndarray, dY: np.ndarray, *, axis: int = 0) -> np.ndarray:
    """dX = zeros(shape) with each slice of dY added at its index"""
    dims = tuple(shape.tolist())
    axis = check_axis(axis, len(dims))
    flat = check_indices(indices, dims[axis]).reshape(-1)
    rest = dims[:axis] + dims[axis + 1 :]
    rows = np.moveaxis(dY.reshape((*dims[:axis], flat.size, *dims[axis + 1 :])), axis, 0)
    total = add_rows(dims[axis], flat, rows.reshape(flat.size, math.prod(rest)))
    return np.ascontiguousarray(np.moveaxis(total.reshape(dims[axis], *rest), 0, axis))


def _positions_memory(data: np.ndarray, indices: np.ndarray, **_: Any) -> None:
    """The flat positions of the indices, and one array of them on the way."""
    need(16 * indices.size)


@kernel("GatherElements", fresh=True, abstract=_positions_memory)
def gather_elements(data: np.ndarray, indices: np.ndarray, *, axis: int) -> np.ndarray:
    return np.asarray(data.reshape(-1)[_flat_elements(data.shape, indices, axis)])


@kernel("GatherElementsGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def gather_elements_grad(dY: np.ndarray, shape: np.ndarray, indices: np.ndarray, *, axis: int = 0) -> np.ndarray:
    """dX = zeros(shape) with each element of dY added where it was taken from"""
    dims = tuple(shape.tolist())
    check_shape("dY", dY.shape, indices.shape)
    return add_at(math.prod(dims), _flat_elements(dims, indices, axis), dY).reshape(dims)


@kernel("GatherND", fresh=True)
def gather_nd(data: np.ndarray, indices: np.ndarray, *, batch_dims: int = 0) -> np.ndarray:
    flat, length = _flat_tuples(data.shape, indices, batch_dims)
    rest = data.shape[batch_dims + indices.shape[-1] :]
    rows = data.reshape(math.prod(data.shape[: data.ndim - len(rest)]), length)
    return rows.take(flat, 0).reshape((*flat.shape, *rest))


@kernel("GatherNDGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def gather_nd_grad(shape: np.ndarray, indices: np.ndarray, dY: np.ndarray, *, batch_dims: int = 0) -> np.ndarray:
    """dX = zeros(shape) with each slice of dY added where its tuple of indices points"""
    dims = tuple(shape.tolist())
    flat, length = _flat_tuples(dims, indices, batch_dims)
    count = math.prod(dims[: batch_dims + indices.shape[-1]])
    return add_rows(count, flat.reshape(-1), dY.reshape(flat.size, length)).reshape(dims)


_COMBINE: dict[str, np.ufunc] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(target: np.ndarray, where: np.ndarray, updates: np.ndarray, reduction: str) -> None:
    """Combine `updates` (m,), or rows (m, length), into `target` (n,) or (n, length) at `where` (m,), duplicates included."""
    if reduction == "none":
        target[where] = updates
        return
    if reduction not in _COMBINE:
        raise ValueError(f"reduction={reduction!r} is not known; there are 'none', {', '.join(map(repr, _COMBINE))}")
    if target.ndim > 1:
        length = target.shape[1]
        where = np.add.outer(where * length, np.arange(length)).ravel()
    _COMBINE[reduction].at(target.reshape(-1), where, updates.reshape(-1))  # fast where both are vectors


def _own(data: np.ndarray, free: tuple[bool, ...]) -> np.ndarray:
    """An array of the elements of `data`, in order, that may be changed: `data` itself where nobody reads it afterwards."""
    into = reuse_first(data, _free=free)
    return into if into is not None and into.flags.c_contiguous else data.copy()


def _scatter_memory(
    data: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    *,
    axis: int | None = None,
    reduction: str = "none",
    _free: tuple[bool, ...] = (),
) -> np.ndarray:
    """The flat positions of the indices, twice while they are added up; and of all elements where rows are combined."""
    length = max(indices.shape[-1], 1) if axis is None and indices.ndim else 1  # ScatterND has no axis
    places = indices.size // length
    need(8 * places + 8 * (places if reduction == "none" else max(places, updates.size)))
    return _own(data, _free)


@kernel("ScatterElements", in_float32=True, fresh=True, abstract=_scatter_memory)
def scatter_elements(
    data: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    *,
    axis: int,
    reduction: str = "none",
    _free: tuple[bool, ...] = (),
) -> np.ndarray:
    check_shape("updates", updates.shape, indices.shape)
    target = _own(data, _free)
    if reduction == "add" and _is_same_for_slices(indices, data.shape, check_axis(axis, data.ndim)):
        _add_slices(target, indices, updates, check_axis(axis, data.ndim))
        return target
    _scatter(target.reshape(-1), _flat_elements(data.shape, indices, axis).reshape(-1), updates.reshape(-1), reduction)
    return target


def _is_same_for_slices(indices: np.ndarray, shape: tuple[int, ...], axis: int) -> bool:
    """True if the indices depend on the place along the axis alone, and slices are longer than a call takes."""
    if indices.ndim != len(shape) or not indices.size or indices.size < 64 * indices.shape[axis]:
        return False
    others = [place for place in range(len(shape)) if place != axis]
    return all(indices.shape[k] <= shape[k] and (indices.strides[k] == 0 or indices.shape[k] == 1) for k in others)


def _add_slices(target: np.ndarray, indices: np.ndarray, updates: np.ndarray, axis: int) -> None:
    """Add the slices of `updates` along the axis where `indices`, which depend on the place along it alone, say."""
    row = check_indices(np.moveaxis(indices, axis, -1)[(0,) * (indices.ndim - 1)], target.shape[axis])
    part = target[tuple(slice(None) if at == axis else slice(n) for at, n in enumerate(indices.shape))]
    into = np.moveaxis(part, axis, 0)
    for place, slice_of in zip(row.tolist(), np.moveaxis(updates, axis, 0), strict=True):
        into[place] += slice_of


@kernel("Scatter", fresh=True)
def scatter(data: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, axis: int) -> np.ndarray:
    return scatter_elements(data, indices, updates, axis=axis)


@kernel("ScatterND", in_float32=True, fresh=True, abstract=_scatter_memory)
def scatter_nd(
    data: np.ndarray,
    indices: np.ndarray,
    updates: np.ndarray,
    *,
    reduction: str = "none",
    _free: tuple[bool, ...] = (),
) -> np.ndarray:
    flat, length = _flat_tuples(data.shape, indices)
    check_shape("updates", updates.shape, indices.shape[:-1] + data.shape[indices.shape[-1] :])
    target = _own(data, _free)
    if length == 1:
        _scatter(target.reshape(-1), flat.reshape(-1), updates.reshape(-1), reduction)
    else:
        rows = target.reshape(math.prod(data.shape[: indices.shape[-1]]), length)
        _scatter(rows, flat.reshape(-1), updates.reshape(flat.size, length), reduction)
    return target


def _slices(shape: tuple[int, ...], starts: Any, ends: Any, axes: Any, steps: Any) -> tuple[slice, ...]:
    """The slices. A start before the first element is the first one, with a negative step too; Python would take nothing."""
    over = range(len(starts)) if axes is None else axes.tolist()
    by = [1] * len(starts) if steps is None else steps.tolist()
    if not starts.ndim == ends.ndim == 1 or not len(starts) == len(ends) == len(over) == len(by):
        lengths = f"{list(starts.shape)}, {list(ends.shape)}, {len(over)} and {len(by)}"
        raise ValueError(f"starts, ends, axes and steps have the lengths {lengths}; they must have the same length")
    return _slices_of(shape, tuple(starts.tolist()), tuple(ends.tolist()), tuple(over), tuple(by))


@lru_cache(maxsize=256)
def _slices_of(
    shape: tuple[int, ...], starts: tuple[int, ...], ends: tuple[int, ...], axes: tuple[int, ...], by: tuple[int, ...]
) -> tuple[slice, ...]:
    over = check_axes(axes, len(shape))
    if 0 in by:
        raise ValueError(f"the steps {list(by)} contain 0; a step must be positive or negative")
    slices = [slice(None)] * len(shape)
    for axis, start, end, step in zip(over, starts, ends, by, strict=True):
        slices[axis] = slice(max(start, -shape[axis]), end, step)
    return tuple(slices)


@kernel("Slice", since=10, view=True)
def slice_(
    data: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray:
    return data[_slices(data.shape, starts, ends, axes, steps)]


@kernel("Slice", view=True)
def slice_1(data: np.ndarray, *, starts: list[int], ends: list[int], axes: list[int] | None = None) -> np.ndarray:
    over = None if axes is None else np.array(axes)
    return data[_slices(data.shape, np.array(starts), np.array(ends), over, None)]


@kernel("SliceGrad", domain=MICROSOFT, fresh=True)
def slice_grad(
    dY: np.ndarray,
    shape: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray:
    """dX = zeros(shape) with dY where it was taken from"""
    dX = np.zeros(tuple(shape.tolist()), dY.dtype)
    part = _slices(dX.shape, starts, ends, axes, steps)
    check_shape("dY", dY.shape, dX[part].shape)
    dX[part] = dY
    return dX


@kernel("OneHot", fresh=True)
def one_hot(indices: np.ndarray, depth: np.ndarray, values: np.ndarray, *, axis: int) -> np.ndarray:
    """values[1] where the index is the position on the new axis, else values[0]; an index out of range marks nothing"""
    if depth.size != 1 or values.shape != (2,):
        given = f"depth has the shape {list(depth.shape)} and values {list(values.shape)}"
        raise ValueError(f"{given}; expected one number, and the two values off and on")
    n = int(depth.item())
    if n < 0:
        raise ValueError(f"depth is {n}; it must not be negative")
    axis = check_axis(axis, indices.ndim + 1)
    at = indices.astype(np.int64)
    hot = np.expand_dims(np.where(at < 0, at + n, at), axis)
    positions = np.arange(n).reshape(-1, *[1] * (indices.ndim - axis))
    return np.asarray(np.where(hot == positions, values[1:], values[:1]))


@kernel("Compress", fresh=True)
def compress(data: np.ndarray, condition: np.ndarray, *, axis: int | None = None) -> np.ndarray:
    """The slices along `axis`, or elements, whose condition is true; those beyond the conditions are left out"""
    size = data.size if axis is None else data.shape[check_axis(axis, data.ndim)]
    if condition.ndim != 1 or len(condition) > size:
        raise ValueError(f"the condition has the shape {list(condition.shape)}; expected a list of at most {size}")
    return np.take(data, np.flatnonzero(condition), axis)


@kernel("NonZero", fresh=True)
def non_zero(X: np.ndarray) -> np.ndarray:
    """Indices (rank, N); of a scalar (0, N)"""
    if not X.ndim:
        return np.zeros((0, int(bool(X.item()))), np.int64)
    need(2 * X.ndim * int(np.count_nonzero(X)) * 8)
    return np.array(np.nonzero(X), np.int64)


_PAIRS = 4096  # of boxes: so few are compared all at once


@kernel("NonMaxSuppression", fresh=True)
def non_max_suppression(
    boxes: np.ndarray,
    scores: np.ndarray,
    max_output_boxes_per_class: np.ndarray | None = None,
    iou_threshold: np.ndarray | None = None,
    score_threshold: np.ndarray | None = None,
    *,
    center_point_box: int,
) -> np.ndarray:
    """Rows (batch, class, box): per batch and class the best boxes, none of which covers much of a better one.

    Every class of every batch picks its best box at once, then drops what the pick covers; `group` numbers those pairs.
    """
    batches, classes, count = scores.shape
    check_shape("boxes", boxes.shape, (batches, count, 4))
    most = 0 if max_output_boxes_per_class is None else int(max_output_boxes_per_class.item())
    limit = 0.0 if iou_threshold is None else iou_threshold.item()
    corners = boxes.reshape(-1, 4)
    one, other = corners[:, :2], corners[:, 2:]
    if center_point_box:
        low, high = one - other / 2, one + other / 2
    else:
        low, high = np.minimum(one, other), np.maximum(one, other)
    size = high - low
    area = size[:, 0] * size[:, 1]
    box = (-scores).argsort(-1, kind="stable")
    least = None if score_threshold is None else score_threshold.item()
    if 0 < scores.size * count <= _PAIRS:
        box = box.reshape(-1, count)
        first = np.arange(batches * classes)[:, np.newaxis]
        alive = np.ones(box.shape, bool) if least is None else scores.reshape(-1)[first * count + box] >= least
        at = box + first // classes * count
        sides = low.take(at, 0), high.take(at, 0), area.take(at)
        group, place = _picked(*sides, alive, limit, min(most, count)).nonzero()
        return _rows_of_picks(group, box[group, place], classes)
    group, box = np.repeat(np.arange(batches * classes), count), box.reshape(-1)
    if least is not None:
        kept = scores.reshape(-1)[group * count + box] >= least
        group, box = group[kept], box[kept]
    picks: list[np.ndarray] = [np.zeros((2, 0), np.int64)]
    while group.size and len(picks) <= most:
        leads = np.ones(group.size, bool)
        np.not_equal(group[1:], group[:-1], out=leads[1:])
        first = leads.nonzero()[0]
        picks.append(np.array((group[first], box[first])))
        offset = group // classes * count
        best, at = box[first][leads.cumsum() - 1] + offset, box + offset
        sides = np.maximum(np.minimum(high[at], high[best]) - np.maximum(low[at], low[best]), 0)
        overlap = sides[:, 0] * sides[:, 1]
        leads |= overlap / (area[at] + area[best] - overlap) > limit
        kept = (~leads).nonzero()[0]
        group, box = group[kept], box[kept]
    groups, chosen = np.concatenate(picks, 1)
    rows = groups.argsort(kind="stable")
    return _rows_of_picks(groups[rows], chosen[rows], classes)


def _rows_of_picks(group: np.ndarray, box: np.ndarray, classes: int) -> np.ndarray:
    rows = np.empty((group.size, 3), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = group // classes, group % classes, box
    return rows


def _picked(
    low: np.ndarray, high: np.ndarray, area: np.ndarray, alive: np.ndarray, limit: float, most: int
) -> np.ndarray:
    """A mask (groups, boxes) of the boxes, best first, that are picked. For few boxes: it computes all overlaps beforehand."""
    sides = np.minimum(high[:, :, None], high[:, None]) - np.maximum(low[:, :, None], low[:, None])
    sides = np.maximum(sides, 0)
    overlap = sides[..., 0] * sides[..., 1]
    apart = ~(overlap / (area[:, :, None] + area[:, None] - overlap) > limit)
    every, picked = np.arange(len(area)), np.zeros(alive.shape, bool)
    for _ in range(most):
        best = alive.argmax(1)
        found = alive[every, best]
        if not np.count_nonzero(found):
            break
        picked[every, best] |= found
        alive &= apart[every, best]
        alive[every, best] = False
    return picked


@kernel("TopK", since=10, fresh=True)
def top_k(
    X: np.ndarray, K: np.ndarray, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The K largest or smallest in order; of equal ones the first comes first. NaN counts as the largest."""
    axis = check_axis(axis, X.ndim)
    if K.size != 1 or not 0 <= K.item() <= X.shape[axis]:
        raise ValueError(f"K is {K.tolist()}; it must be one number from 0 to {X.shape[axis]}, the size of axis {axis}")
    count = int(K.item())
    if X.shape[axis] >= _WIDE and 4 * count <= X.shape[axis] and X.dtype in _PARTITIONED and not np.isnan(X).any():
        first = _first_of_many(X, axis, count, bool(largest))
    else:
        first = np.take(_order(X, axis, bool(largest)), np.arange(count), axis)
    return np.take_along_axis(X, first, axis), first.astype(np.int64)


_WIDE = 1024  # elements, of which the first few are found faster by their bound than in order
_PARTITIONED = frozenset(map(np.dtype, (np.float32, np.float64, np.int32, np.int64)))


def _first_of_many(X: np.ndarray, axis: int, count: int, largest: bool) -> np.ndarray:
    """The places of the first `count` elements in order. Only elements that are not beyond the last of these are sorted."""
    rows = np.moveaxis(X, axis, -1)
    first = np.empty((*rows.shape[:-1], count), np.int64)
    for at in np.ndindex(rows.shape[:-1]) if count else ():
        row = rows[at]
        place = row.size - count if largest else count - 1
        bound = np.partition(row, place)[place]
        among = np.flatnonzero(row >= bound if largest else row <= bound)
        first[at] = among[_order(row[among], 0, largest)[:count]]
    return np.moveaxis(first, -1, axis)


def _order(X: np.ndarray, axis: int, largest: bool) -> np.ndarray:
    """The positions along the axis in the order of their elements"""
    # argsort is stable and puts NaN last; reversed input and output turn it round without negating the values.
    if largest:
        return np.flip(X.shape[axis] - 1 - np.argsort(np.flip(X, axis), axis, kind="stable"), axis)
    return np.argsort(X, axis, kind="stable")


@kernel("TopK", fresh=True)
def top_k_1(X: np.ndarray, *, k: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    return top_k(X, np.array(k), axis=axis)


@kernel("Unique", fresh=True)
def unique(
    X: np.ndarray, *, axis: int | None = None, sorted: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The different elements, or slices along `axis`, in order or as they occur; where first, which of them, how often"""
    Y, first, inverse, counts = np.unique(X, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        Y, first, counts = np.take(Y, order, axis or 0), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return Y, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


@kernel("FlattenAndUnpad", domain=MICROSOFT, fresh=True)
def flatten_and_unpad(x: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows `indices` of x with its first two axes flattened, and the lengths of those axes"""
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])[indices], np.array(x.shape[:2], np.int64)


@kernel("PadAndUnflatten", domain=MICROSOFT, fresh=True)
def pad_and_unflatten(x: np.ndarray, indices: np.ndarray, unflatten_dims: np.ndarray) -> np.ndarray:
    """Zeros (unflatten_dims, ...) with row i of x at position indices[i] of the flattened first two axes"""
    padded = np.zeros((int(np.prod(unflatten_dims)), *x.shape[1:]), x.dtype)
    padded[indices] = x
    return padded.reshape((*unflatten_dims.tolist(), *x.shape[1:]))
