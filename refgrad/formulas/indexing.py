"""Shapes and positions: parts of a shape tensor, padding, and adding elements back where they were taken from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import helper

from refgrad.builder.op import Emitter
from refgrad.builder.values import Padded
from refgrad.formulas.types import wide_type

WRITTEN_OUT = 2**16  # numbers that are a constant of the gradient; more are counted where it runs
MOST_AXES = 256  # of which a table is written out
END = 2**63 - 1  # of a slice that goes as far as the axis


def add_at(op: Emitter, dY: str, shape: str, indices: str, axis: int) -> str:
    """Zeros of `shape` to which dY is added at the indices along `axis`; 16-bit floats are added in float32."""
    if 0 in (op.dims(shape) or ()):
        return op.full(shape, 0.0, like=dY)
    terms = op.as_type(dY, wide_type(op, dY))
    added = op.ScatterElements(op.full(shape, 0.0, like=terms), indices, terms, axis=axis, reduction="add")
    return op.as_type(added, op.type(dY))


def put_back(op: Emitter, dY: str, shape: str, move: Callable[[str], str]) -> str:
    """The gradient of an operator that only moves elements: number the elements of x, move the numbers, add dY there."""
    size = product(op, shape)
    numbers = op.Reshape(op.Range(0, op.Squeeze(size, [0]), 1), shape, allowzero=1)
    taken = op.Reshape(move(numbers), [-1])
    return op.Reshape(add_at(op, op.Reshape(dY, [-1]), size, taken, axis=0), shape, allowzero=1)


def distances(op: Emitter, sizes: str, rank: int | None = None) -> str:
    """How many elements lie between neighbours along each axis: the product of the sizes after it."""
    known = op.constant(sizes)
    if known is not None:
        return op.const([math.prod(known[axis + 1 :].tolist()) for axis in range(len(known))])
    if rank is None or rank > MOST_AXES:
        axes = op.Range(0, op.length(sizes), 1)
        later = op.Less(op.Unsqueeze(axes, [1]), op.Unsqueeze(axes, [0]))
    else:
        later = op.const(np.triu(np.ones((rank, rank), bool), 1))
    return op.Squeeze(op.reduce("ReduceProd", op.Where(later, sizes, 1), op.const([1])), [1])


def pad(op: Emitter, value: str, rank: int, around: Mapping[int, tuple[int, int]]) -> str:
    """`value` with (before, after) zeros along the given axes; fewer than none take elements away."""
    pads = {axis: sides for axis, sides in around.items() if sides != (0, 0)}
    if not pads:
        return value
    padded = op.Pad(value, [around.get(axis, (0, 0))[side] for side in (0, 1) for axis in range(rank)])
    if len(pads) == 1:
        [(axis, (before, behind))] = pads.items()
        if before >= 0 and behind >= 0:
            op.values.sparse.padded[padded] = Padded(axis, before, behind, value)
    return padded


def copies_added(
    op: Emitter, dY: str, dims: Sequence[int | str | None], around: Mapping[int, tuple[int, int]], mode: str
) -> str | None:
    """The gradient of Pad (modes reflect, edge and wrap): the padding is cut off and added where it was copied from.

    None where a size is not known, elements are taken away, or both sides of an axis copied the same elements.

    :param around: (before, after) by axis.
    """
    plans = {}
    for axis, (before, after) in around.items():
        size = dims[axis]
        if not isinstance(size, int) or min(before, after) < 0:
            return None
        pairs = zip(_copied(mode, size, before, after), ((0, before), (before + size, after)), strict=True)
        plan = sorted((taken.start, taken.stop, *part) for taken, part in pairs if taken)
        plans[axis] = before, size, plan
        ends = [0, *(end for start, stop, *_ in plan for end in (start, stop)), size]
        if ends != sorted(ends):
            return None
    total = op.as_type(dY, wide_type(op, dY))
    for axis, (before, size, plan) in plans.items():
        parts, reached = [], 0
        for start, stop, place, count in plan:
            if reached < start:
                parts.append(op.Slice(total, [before + reached], [before + start], [axis]))
            if mode == "reflect":
                copy = op.Slice(total, [place + count - 1], [place - 1 if place else -END], [axis], [-1])
            else:
                copy = op.Slice(total, [place], [place + count], [axis])
            if count > stop - start:
                copy = op.ReduceSum(copy, [axis], keepdims=1)
            parts.append(op.Add(op.Slice(total, [before + start], [before + stop], [axis]), copy))
            reached = stop
        if reached < size or not parts:
            parts.append(op.Slice(total, [before + reached], [before + size], [axis]))
        total = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)
    return op.as_type(total, op.type(dY))


def _copied(mode: str, size: int, before: int, after: int) -> tuple[range, range]:
    """The elements of an axis that a Pad copies before and behind it; out of range where it copies some of them again."""
    if mode == "reflect":
        return range(1, before + 1), range(size - 1 - after, size - 1)
    if mode == "wrap":
        return range(size - before, size), range(after)
    return range(min(before, 1)), range(size - min(after, 1), size)


def along(op: Emitter, vector: str, value: str, axis: int | str) -> str:
    """`vector` with an axis of size 1 for each that `value` has behind `axis`, so that it broadcasts along that."""
    known, rank = axis if isinstance(axis, int) else op.constant(axis), op.rank(value)
    if known is not None and (known < 0 or rank is not None):
        behind = -int(known) - 1 if known < 0 else (rank or 0) - int(known) - 1
        return op.Reshape(vector, [-1] + [1] * behind) if behind else vector
    count = op.Shape(op.Shape(value))
    place = op.Mod(op.Reshape(axis, [1]), count) if isinstance(axis, str) else op.const([axis])
    ones = op.full(op.Sub(op.Sub(count, place), [1]), 1, like=count)
    return op.Reshape(vector, op.Concat([-1], ones, axis=0))


def up_to(op: Emitter, size: int) -> str:
    """0, 1, ... up to `size`."""
    return op.const(np.arange(size)) if size <= WRITTEN_OUT else op.Range(op.const(np.array(0)), size, 1)


def counted(op: Emitter, size: int, like: str) -> str:
    """0, 1, ... up to `size`, of the type of `like`."""
    if size > WRITTEN_OUT:
        return op.Cast(up_to(op, size), to=op.type(like))
    return op.const(np.arange(size).astype(helper.tensor_dtype_to_np_dtype(op.type(like))))


def positions(op: Emitter, value: str, axis: int) -> str:
    """0, 1, ... up to the size of `value` along `axis`."""
    shape = op.shape(value)
    size = None if shape is None else shape[axis]
    if isinstance(size, int):
        return up_to(op, size)
    return op.Range(0, op.Gather(op.Shape(value), axis, axis=0), 1)


def part(op: Emitter, shape: str, start: int, end: int | None) -> str:
    """Some of the dimensions in a shape tensor."""
    dims = op.dims(shape)
    known = [d for d in dims[start:end] if isinstance(d, int)] if dims is not None else []
    if dims is not None and len(known) == len(dims[start:end]):
        return op.const(known)
    return op.Slice(shape, [start], [END if end is None else end], [0])


def product(op: Emitter, shape: str) -> str:
    """The number of elements of a shape, on one axis of size 1."""
    known = op.constant(shape)
    return op.ReduceProd(shape) if known is None else op.const([int(np.prod(known))])


def join(op: Emitter, *parts: str | None) -> str:
    """Shape tensors one after the other, a constant where all of them are."""
    present: Sequence[str] = [part for part in parts if part is not None]
    known = [op.constant(part) for part in present]
    arrays = [array for array in known if array is not None]
    if len(arrays) == len(present):
        return op.const(np.concatenate(arrays))
    kept = [name for name, array in zip(present, known, strict=True) if array is None or array.size]
    return kept[0] if len(kept) == 1 else op.Concat(*kept, axis=0)
