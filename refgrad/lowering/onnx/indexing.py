"""Adjoints of taking: what was taken is added back where it came from.

Where the places are known, or lie side by side, this is a Pad with zeros. Elsewhere it is a ScatterElements: ONNX Runtime's
ScatterND adds in parallel and loses some of what goes to the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import TensorProto

from refgrad.protos.types import SIXTEEN_BIT, Shape
from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import lowering

END = 2**63 - 1  # of a slice that goes as far as the axis
_FAR = int(np.iinfo(np.int32).max)  # no axis is longer: the end of a slice that has none


def add_at(op: Emitter, dY: str, shape: str, indices: str, axis: int) -> str:
    """Zeros of `shape` to which dY is added at the indices along `axis`; 16-bit floats are added in float32."""
    if 0 in (op.dims(shape) or ()):
        return op.full(shape, 0.0, like=dY)
    kind = op.type(dY)
    narrow = kind in SIXTEEN_BIT
    terms = op.Cast(dY, to=TensorProto.FLOAT) if narrow else dY
    added: str = op.ScatterElements(op.full(shape, 0.0, like=terms), indices, terms, axis=axis, reduction="add")
    return op.Cast(added, to=kind) if narrow else added


def put_back(op: Emitter, dY: str, shape: str, move: Callable[[str], str]) -> str:
    """The adjoint of an operator that only moves elements: number those of x, move the numbers, add dY at its numbers."""
    size = product(op, shape)
    numbers = op.Reshape(op.Range(0, op.Squeeze(size, [0]), 1), shape, allowzero=1)
    taken = op.Reshape(move(numbers), [-1])
    return str(op.Reshape(add_at(op, op.Reshape(dY, [-1]), size, taken, axis=0), shape, allowzero=1))


def pad(op: Emitter, value: str, rank: int, around: Mapping[int, tuple[int, int]]) -> str:
    """`value` with (before, after) zeros along the given axes; fewer than none take elements away."""
    if all(pads == (0, 0) for pads in around.values()):
        return value
    return str(op.Pad(value, [around.get(axis, (0, 0))[side] for side in (0, 1) for axis in range(rank)]))


def along(op: Emitter, vector: str, value: str, axis: int | str) -> str:
    """`vector` with an axis of size 1 for each that `value` has behind `axis`, so that it broadcasts along that."""
    known, rank = axis if isinstance(axis, int) else op.constant(axis), op.rank(value)
    if known is not None and (known < 0 or rank is not None):
        behind = -int(known) - 1 if known < 0 else (rank or 0) - int(known) - 1
        return str(op.Reshape(vector, [-1] + [1] * behind)) if behind else vector
    count = op.Shape(op.Shape(value))
    place = op.Mod(op.Reshape(axis, [1]), count) if isinstance(axis, str) else op.const([axis])
    ones = op.full(op.Sub(op.Sub(count, place), [1]), 1, like=count)
    return str(op.Reshape(vector, op.Concat([-1], ones, axis=0)))


def positions(op: Emitter, value: str, axis: int) -> str:
    """0, 1, ... up to the size of `value` along `axis`."""
    shape = op.shape(value)
    size = None if shape is None else shape[axis]
    if isinstance(size, int):
        return op.const(np.arange(size))
    return str(op.Range(0, op.Gather(op.Shape(value), axis, axis=0), 1))


@lowering("SliceGrad")
def slice_grad(op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None, steps: str | None) -> str:
    """dY between zeros, spread where the step is larger than 1, reversed where it is negative."""
    by, dims = op.constant(steps), op.dims(shape)
    if steps is None or by is not None:
        ranges = None if dims is None else _ranges(op, dY, dims, starts, ends, axes, by)
        if dims is not None and ranges is not None:
            inserted = _insert(op, dY, shape, dims, ranges)
            if inserted is not None:
                return inserted
        elif by is None or all(by == 1):
            return _pad_at_run_time(op, dY, shape, starts, ends, axes)
    return put_back(op, dY, shape, lambda numbers: op.Slice(numbers, starts, ends, axes, steps))


def _ranges(
    op: Emitter, dY: str, dims: Shape, starts: str, ends: str, axes: str | None, by: np.ndarray | None
) -> dict[int, tuple[int, range]] | None:
    """The size of each sliced axis and what was taken from it; None where only the run tells."""
    first, last = op.constant(starts), op.constant(ends)
    along = op.constant(axes) if axes is not None or first is None else np.arange(first.size)
    if first is None or along is None:
        return None
    taken = op.shape(dY) or (None,) * len(dims)
    ranges = {}
    for k, axis in enumerate(int(a) % len(dims) for a in along):
        size, step, count = dims[axis], 1 if by is None else int(by[k]), taken[axis]
        if not isinstance(size, int):
            return None
        begin = max(int(first[k]), -size)  # the first element, with a negative step too, where Python takes none
        if last is not None:
            ranges[axis] = size, range(*slice(begin, int(last[k]), step).indices(size))
        elif isinstance(count, int):
            start = slice(begin, None, step).indices(size)[0]
            ranges[axis] = size, range(start, start + count * step, step)
        else:
            return None
    return ranges


def _insert(op: Emitter, dY: str, shape: str, dims: Shape, ranges: Mapping[int, tuple[int, range]]) -> str | None:
    """dY where the ranges say, zeros elsewhere; None where spreading it needs a dimension that is not known."""
    if any(len(taken) == 0 for _, taken in ranges.values()):
        return op.full(shape, 0.0, like=dY)
    moved = {axis: taken for axis, (_, taken) in sorted(ranges.items()) if len(taken) > 1}
    steps = {axis: abs(taken.step) for axis, taken in moved.items() if abs(taken.step) > 1}
    sizes = [d for d in dims if isinstance(d, int)]
    if steps and len(sizes) < len(dims) - min(steps):
        return None
    backwards = [axis for axis, taken in moved.items() if taken.step < 0]
    if backwards:
        ones = [-1] * len(backwards)
        dY = op.Slice(dY, ones, [-END] * len(backwards), backwards, ones)
    length = {axis: len(taken) for axis, (_, taken) in ranges.items()}
    if steps:
        # [n] becomes [n, 1], padded to [n, step], read as [n·step].
        gaps = {axis + 1 + k: (0, step - 1) for k, (axis, step) in enumerate(steps.items())}
        dY = pad(op, op.Unsqueeze(dY, list(gaps)), len(dims) + len(gaps), gaps)
        length |= {axis: length[axis] * step for axis, step in steps.items()}
        dY = op.Reshape(dY, [length.get(axis, d) if axis >= min(steps) else 0 for axis, d in enumerate(dims)])
    around = {}
    for axis, (size, taken) in ranges.items():
        before = min(taken[0], taken[-1])
        around[axis] = before, size - before - length[axis]
    return pad(op, dY, len(dims), around)


def _pad_at_run_time(op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None) -> str:
    """Zeros before: the starts, held within the axis; after: what is missing."""
    dims, first, last = op.dims(shape), op.constant(starts), op.constant(ends)
    none = op.full(op.Shape(shape), 0, like=shape) if dims is None else op.const([0] * len(dims))
    missing = op.Sub(shape, op.Shape(dY))
    if first is not None and not first.any():
        return str(op.Pad(dY, op.Concat(none, missing, axis=0)))
    if last is not None and all(last >= _FAR):
        return str(op.Pad(dY, op.Concat(missing, none, axis=0)))
    start = op.Cast(starts, to=TensorProto.INT64) if first is None else op.const(first.astype(np.int64))
    axes = op.Range(0, op.Squeeze(op.Shape(starts), [0]), 1) if axes is None else axes
    size = op.Gather(shape, axes, axis=0)
    if first is None or any(first < 0):
        start = op.Max(op.Where(op.Less(start, 0), op.Add(start, size), start), [0])
    before = op.ScatterElements(none, axes, op.Min(start, size), axis=0)
    return str(op.Pad(dY, op.Concat(before, op.Sub(missing, before), axis=0)))


@lowering("GatherGrad")
def gather_grad(op: Emitter, shape: str, indices: str, dY: str, axis: int) -> str:
    """dY between zeros where the index, or a run of them, is known; else added at the indices, made one axis."""
    dims, places, count = op.dims(shape), op.constant(indices), op.rank(indices)
    rank = None if dims is None else len(dims)
    if rank is not None:
        axis %= rank
    if dims is not None and places is not None:
        padded = _pad_run(op, dY, shape, dims, places, axis)
        if padded is not None:
            return padded
    if axis == 0:
        return _rows_added(op, dY, shape, indices)
    if count == 0:
        dY = op.Unsqueeze(dY, [axis])
    if count in (0, 1):
        full = op.Shape(dY)
    else:
        static = op.static(indices)
        size = op.Reshape(op.Size(indices), [1]) if static is None else op.const([int(np.prod(static))])
        full = join(op, part(op, shape, 0, axis), size, part(op, shape, axis + 1, None) if axis != -1 else None)
        dY = op.Reshape(dY, full, allowzero=1)
    # The indices are a column: behind their axis, one of size 1 for each that x has there.
    if rank is not None or axis < 0:
        column = op.const([-1] + [1] * ((rank or 0) - axis - 1))
    else:
        column = op.Concat([-1], op.full(op.Sub(op.Shape(shape), [axis + 1]), 1, like=shape), axis=0)
    return add_at(op, dY, shape, op.Expand(op.Reshape(indices, column), full), axis)


def _rows_added(op: Emitter, dY: str, shape: str, indices: str) -> str:
    """Along the first axis all elements lie in one row: ONNX Runtime scatters to one axis twice as fast as to two.

    A negative index stays one: −1 is the last element as it was the last slice.
    """
    width = product(op, part(op, shape, 1, None))
    first = op.Mul(op.Reshape(op.as_type(indices, TensorProto.INT64), [-1, 1]), width)
    places = op.Reshape(op.Add(first, op.Range(0, op.Squeeze(width, [0]), 1)), [-1])
    added = add_at(op, op.Reshape(dY, [-1]), product(op, shape), places, axis=0)
    return str(op.Reshape(added, shape, allowzero=1))


def _pad_run(op: Emitter, dY: str, shape: str, dims: Shape, indices: np.ndarray, axis: int) -> str | None:
    """dY between zeros along `axis`, where the indices are one number or consecutive ones."""
    if indices.ndim > 1 or indices.size == 0 or any(np.diff(indices.ravel()) != 1):
        return None
    first, last = int(indices.ravel()[0]), int(indices.ravel()[-1])
    if first < 0 <= last:
        return None
    if indices.ndim == 0:
        dY = op.Unsqueeze(dY, [axis])
    size, others = dims[axis], len(dims) - 1
    if isinstance(size, int):
        return pad(op, dY, len(dims), {axis: (first % size, size - 1 - last % size)})
    length = op.Slice(shape, [axis], [axis + 1], [0])
    before = op.Add(length, [first]) if first < 0 else op.const([first])
    after = op.const([-1 - last]) if first < 0 else op.Sub(length, [last + 1])
    zeros = [op.const([0] * count) for count in (axis, others, others - axis)]
    return str(op.Pad(dY, join(op, zeros[0], before, zeros[1], after, zeros[2])))


@lowering("GatherElementsGrad")
def gather_elements_grad(op: Emitter, dY: str, shape: str, indices: str, axis: int) -> str:
    return add_at(op, dY, shape, indices, axis)


@lowering("GatherNDGrad")
def gather_nd_grad(op: Emitter, shape: str, indices: str, dY: str, batch_dims: int) -> str:
    """Number the rows that an index tuple can take, take the numbers likewise, and add the rows of dY there."""
    if 0 in (op.dims(shape) or ()):
        return op.full(shape, 0.0, like=dY)
    width = (op.shape(indices) or (None,))[-1]
    if not isinstance(width, int):
        return put_back(op, dY, shape, lambda numbers: op.GatherND(numbers, indices, batch_dims=batch_dims))
    outer, inner = part(op, shape, 0, batch_dims + width), part(op, shape, batch_dims + width, None)
    if width == 0:  # each tuple took all that is left, which ONNX does not allow and ONNX Runtime's training does
        return str(op.ReduceSum(op.Reshape(dY, join(op, outer, op.const([-1]), inner)), [batch_dims], keepdims=0))
    count, row = product(op, outer), product(op, inner)
    numbers = op.Reshape(op.Range(0, op.Squeeze(count, [0]), 1), outer, allowzero=1)
    taken = op.Reshape(op.GatherND(numbers, indices, batch_dims=batch_dims), [-1, 1])
    rows = join(op, op.Shape(taken, start=0, end=1), row)
    added = add_at(op, op.Reshape(dY, rows, allowzero=1), join(op, count, row), op.Expand(taken, rows), axis=0)
    return str(op.Reshape(added, shape, allowzero=1))


def part(op: Emitter, shape: str, start: int, end: int | None) -> str:
    """Some of the dimensions in a shape tensor."""
    dims = op.dims(shape)
    known = [d for d in dims[start:end] if isinstance(d, int)] if dims is not None else []
    if dims is not None and len(known) == len(dims[start:end]):
        return op.const(known)
    return str(op.Slice(shape, [start], [END if end is None else end], [0]))


def product(op: Emitter, shape: str) -> str:
    """The number of elements of a shape, on one axis of size 1."""
    known = op.constant(shape)
    return str(op.ReduceProd(shape)) if known is None else op.const([int(np.prod(known))])


def join(op: Emitter, *parts: str | None) -> str:
    """Shape tensors one after the other, a constant where all of them are."""
    present: Sequence[str] = [part for part in parts if part is not None]
    known = [op.constant(part) for part in present]
    arrays = [array for array in known if array is not None]
    if len(arrays) == len(present):
        return op.const(np.concatenate(arrays))
    kept = [name for name, array in zip(present, known, strict=True) if array is None or array.size]
    return kept[0] if len(kept) == 1 else str(op.Concat(*kept, axis=0))
