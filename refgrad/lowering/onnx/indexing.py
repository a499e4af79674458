"""Adjoints of taking: what was taken is added back where it came from."""

from __future__ import annotations

from collections.abc import Callable

from refgrad.emit import Emitter
from refgrad.registry import lowering


def put_back(op: Emitter, dY: str, shape: str, move: Callable[[str], str]) -> str:
    """The adjoint of an operator that only moves elements: number those of x, move the numbers, add dY at its numbers."""
    size = op.ReduceProd(shape, keepdims=0)
    numbers = op.Reshape(op.Range(0, size, 1), shape, allowzero=1)
    taken = op.Reshape(move(numbers), [-1])
    zeros = op.full(op.Reshape(size, [1]), 0.0, like=dY)
    flat = op.ScatterElements(zeros, taken, op.Reshape(dY, [-1]), axis=0, reduction="add")
    return op.Reshape(flat, shape, allowzero=1)


@lowering("SliceGrad")
def slice_grad(op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None, steps: str | None) -> str:
    """Number the elements of x, slice the numbers as x was sliced, and add dY there: right for every start and step."""
    return put_back(op, dY, shape, lambda numbers: op.Slice(numbers, starts, ends, axes, steps))


@lowering("GatherGrad")
def gather_grad(op: Emitter, shape: str, indices: str, dY: str, axis: int) -> str:
    """The slices that Gather took are rows of x in the shape [before, axis, after]: add those of dY at their numbers."""
    return put_back(op, dY, shape, lambda numbers: op.Gather(numbers, indices, axis=axis))


@lowering("GatherElementsGrad")
def gather_elements_grad(op: Emitter, dY: str, shape: str, indices: str, axis: int) -> str:
    return op.ScatterElements(op.full(shape, 0.0, like=dY), indices, dY, axis=axis, reduction="add")


@lowering("GatherNDGrad")
def gather_nd_grad(op: Emitter, shape: str, indices: str, dY: str, batch_dims: int) -> str:
    if batch_dims:
        return put_back(op, dY, shape, lambda numbers: op.GatherND(numbers, indices, batch_dims=batch_dims))
    return op.ScatterND(op.full(shape, 0.0, like=dY), indices, dY, reduction="add")
