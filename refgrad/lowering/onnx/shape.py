"""Shapes, and tensors that are others in another shape or under another name."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import WRITTEN_OUT
from refgrad.tables.registry import lowering


@lowering("Alias")
def alias(op: Emitter, X: str) -> str:
    return X


@lowering("ShapeOf")
def shape_of(op: Emitter, X: str) -> str:
    static = op.static(X)
    return op.measure(X) if static is None else op.const(list(static))


@lowering("Length")
def length(op: Emitter, X: str, axis: int) -> str:
    dims = op.shape(X)
    size = None if dims is None else dims[axis]
    return op.const([size]) if isinstance(size, int) else op.Shape(X, start=axis, end=axis + 1 or None)


@lowering("ReshapeLike")
def reshape_like(op: Emitter, dY: str, X: str) -> str:
    """Without a Shape node if each size is known or is the size of dY at the same place, or if all sizes but one are known."""
    dims, sizes = op.shape(X), same_or_known(op, dY, X)
    if sizes is None and dims is not None and 0 not in dims and sum(not isinstance(dim, int) for dim in dims) == 1:
        known, given = math.prod(dim for dim in dims if isinstance(dim, int)), op.static(dY)
        if given is None or math.prod(given) % known == 0:  # otherwise this branch never runs, and inference refuses it
            sizes = [dim if isinstance(dim, int) else -1 for dim in dims]
    return op.Reshape(dY, op.shape_of(X), allowzero=1) if sizes is None else op.Reshape(dY, sizes)


def same_or_known(op: Emitter, dY: str, X: str) -> list[int] | None:
    """The sizes of X as Reshape takes them, 0 for one that dY has in the same place; None where neither tells one."""
    dims, given = op.shape(X), op.shape(dY) or ()
    sizes = []
    for axis, dim in enumerate((None,) if dims is None else dims):
        if dim is not None and axis < len(given) and given[axis] == dim and not isinstance(dim, int):
            sizes.append(0)
        elif isinstance(dim, int) and dim:
            sizes.append(dim)
        else:
            return None
    return sizes


@lowering("ReshapeGrad")
def reshape_grad(op: Emitter, dY: str, X: str) -> str:
    return op.reshape_like(dY, X)


@lowering("TileGrad")
def tile_grad(op: Emitter, dY: str, X: str, repeats: str) -> str:
    """Each axis that was repeated becomes two, the number of copies and the size; the sum is over the first."""
    times, shape = op.constant(repeats), op.static(X)
    if times is None:
        return tile_grad_at_run_time(op, dY, X, repeats)
    repeated = [axis for axis, count in enumerate(times) if count != 1]
    if not repeated:
        return dY
    if shape is not None:
        sizes: str | list[int] = [
            n for axis, size in enumerate(shape) for n in ([int(times[axis]), size] if axis in repeated else [size])
        ]
    else:
        pieces: list[str | list[int]] = []
        start = 0
        for axis in repeated:
            if axis > start:
                pieces.append(op.Shape(X, start=start, end=axis))
            pieces.append([int(times[axis])])
            start = axis
        sizes = op.Concat(*pieces, op.Shape(X, start=start), axis=0)
    axes = [axis + before for before, axis in enumerate(repeated)]
    return op.ReduceSum(op.Reshape(dY, sizes, allowzero=1), axes, keepdims=0)


def tile_grad_at_run_time(
    op: Emitter, dY: str, X: str, repeats: str, length: Callable[[str], str] | None = None
) -> str:
    """Every axis becomes two. A scalar has none of them: the sum over no axes given is one over all, which it lacks.

    :param length: emits how many numbers there are in a row, by default `op.length`.
    """
    pairs = op.Reshape(op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.measure(X), [1]), axis=1), [-1])
    counts = op.static(repeats)
    rank = op.rank(X) if counts is None else counts[0]
    if rank is None or rank > WRITTEN_OUT:
        axes = op.Range(0, (length or op.length)(pairs), 2)
    else:
        axes = op.const(np.arange(0, 2 * rank, 2))
    return op.ReduceSum(op.Reshape(dY, pairs, allowzero=1), axes, keepdims=0)


@lowering("PadGrad")
def pad_grad(op: Emitter, dY: str, pads: str, axes: str | None) -> str:
    known = op.constant(pads)
    return op.Pad(dY, op.Neg(pads) if known is None else op.const(-known), None, axes)


@lowering("TriluGrad")
def trilu_grad(op: Emitter, dY: str, k: str | None, upper: int) -> str:
    return op.Trilu(dY, k, upper=upper)


@lowering("SplitTraining")
def split_training(op: Emitter, dY: str, lengths: str, axis: int, count: int) -> tuple[str, ...]:
    parts = op.Split(dY, lengths, axis=axis, outputs=count)
    return (parts,) if isinstance(parts, str) else parts
