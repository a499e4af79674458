"""Gradients of taking: what was taken is added back where it came from.

Where the places are known, or lie side by side, this is a Pad with zeros. Elsewhere it is a ScatterElements: ONNX Runtime's
ScatterND adds in parallel and loses some of what goes to the same place.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto, helper

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import END, add_at, join, pad, part, product, put_back
from refgrad.protos.types import Shape
from refgrad.tables.registry import lowering

_FEW_ROWS = 64  # up to which a product with a row of 0 and 1 for each is faster than scattering
# Elements from which ONNX Runtime scatters faster to rows than to all elements in one row; below, half as fast.
_IN_ROWS = 2**22
_FAR = int(np.iinfo(np.int32).max)  # no axis is longer: the end of a slice that has none


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
        whole = list(dims)
        for axis, size in length.items():
            whole[axis] = size
        dY = op.Reshape(dY, [d if isinstance(d, int) and axis >= min(steps) else 0 for axis, d in enumerate(whole)])
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
        return op.Pad(dY, op.Concat(none, missing, axis=0))
    if last is not None and all(last >= _FAR):
        return op.Pad(dY, op.Concat(missing, none, axis=0))
    start = op.Cast(starts, to=TensorProto.INT64) if first is None else op.const(first.astype(np.int64))
    axes = op.Range(0, op.Squeeze(op.Shape(starts), [0]), 1) if axes is None else axes
    size = op.Gather(shape, axes, axis=0)
    if first is None or any(first < 0):
        start = op.Max(op.Where(op.Less(start, 0), op.Add(start, size), start), [0])
    before = op.ScatterElements(none, axes, op.Min(start, size), axis=0)
    return op.Pad(dY, op.Concat(before, op.Sub(missing, before), axis=0))


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
        return rows_added(op, dY, shape, indices)
    if count == 0:
        dY = op.Unsqueeze(dY, [axis])
    if count in (0, 1):
        full = op.Shape(dY)
    else:
        static = op.static(indices)
        size = op.Shape(op.Reshape(indices, [-1])) if static is None else op.const([int(np.prod(static))])
        full = join(op, part(op, shape, 0, axis), size, part(op, shape, axis + 1, None) if axis != -1 else None)
        dY = op.Reshape(dY, full, allowzero=1)
    # The indices are a column: behind their axis, one of size 1 for each that x has there.
    if rank is not None or axis < 0:
        column = op.const([-1] + [1] * ((rank or 0) - axis - 1))
    else:
        column = op.Concat([-1], op.full(op.Sub(op.Shape(shape), [axis + 1]), 1, like=shape), axis=0)
    return add_at(op, dY, shape, op.Expand(op.Reshape(indices, column), full), axis)


def rows_added(op: Emitter, dY: str, shape: str, indices: str) -> str:
    """dY added at the indices along the first axis.

    A negative index stays one: −1 is the last element as it was the last slice.
    """
    dims, width = op.dims(shape), product(op, part(op, shape, 1, None))
    row, count = op.constant(width), None if dims is None else dims[0]
    if row is not None and isinstance(count, int) and row.item() and count:
        size = int(row.item())
        is_few = count <= _FEW_ROWS and op.preserves_finite and op.type(dY) in (TensorProto.FLOAT, TensorProto.DOUBLE)
        lengths = op.static(indices)
        is_few &= lengths is not None and 0 not in lengths  # ONNX Runtime 1.19 refuses a product of nothing
        if is_few or count * size >= _IN_ROWS:
            rows = op.Reshape(dY, [-1, size])
            if is_few:
                kind = helper.tensor_dtype_to_np_dtype(op.type(dY))
                chosen = op.Gather(op.const(np.eye(count, dtype=kind)), op.Reshape(indices, [-1]))
                added = op.Gemm(chosen, rows, transA=1, beta=0.0)
            else:
                places = op.Expand(op.Reshape(indices, [-1, 1]), op.Shape(rows))
                added = add_at(op, rows, op.const([count, size]), places, axis=0)
            return added if dims is not None and len(dims) == 2 else op.Reshape(added, shape)
    first = op.Mul(op.Reshape(op.as_type(indices, TensorProto.INT64), [-1, 1]), width)
    places = op.Reshape(op.Add(first, op.Range(0, op.Squeeze(width, [0]), 1)), [-1])
    added = add_at(op, op.Reshape(dY, [-1]), product(op, shape), places, axis=0)
    return op.Reshape(added, shape, allowzero=1)


def _pad_run(op: Emitter, dY: str, shape: str, dims: Shape, indices: np.ndarray, axis: int) -> str | None:
    """dY between zeros along `axis`, where the indices are one number or consecutive ones."""
    if indices.ndim > 1 or indices.size == 0 or any(np.diff(indices.ravel()) != 1):
        return None
    first, last = int(indices.ravel()[0]), int(indices.ravel()[-1])
    if first < 0 <= last:
        return None
    size, others = dims[axis], len(dims) - 1
    if isinstance(size, int) and not -size <= first <= last < size:
        return None  # the Gather fails, and so does what follows here
    if indices.ndim == 0:
        dY = op.Unsqueeze(dY, [axis])
    if isinstance(size, int):
        return pad(op, dY, len(dims), {axis: (first % size, size - 1 - last % size)})
    length = op.Slice(shape, [axis], [axis + 1], [0])
    before = op.Add(length, [first]) if first < 0 else op.const([first])
    after = op.const([-1 - last]) if first < 0 else op.Sub(length, [last + 1])
    zeros = [op.const([0] * count) for count in (axis, others, others - axis)]
    return op.Pad(dY, join(op, zeros[0], before, zeros[1], after, zeros[2]))


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
        return op.ReduceSum(op.Reshape(dY, join(op, outer, op.const([-1]), inner)), [batch_dims], keepdims=0)
    count, row = product(op, outer), product(op, inner)
    numbers = op.Reshape(op.Range(0, op.Squeeze(count, [0]), 1), outer, allowzero=1)
    taken = op.Reshape(op.GatherND(numbers, indices, batch_dims=batch_dims), [-1])
    return op.Reshape(rows_added(op, dY, join(op, count, row), taken), shape, allowzero=1)
