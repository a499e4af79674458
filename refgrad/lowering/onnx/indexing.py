"""Adjoints of taking: what was taken is added back where it came from."""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.registry import lowering


@lowering("SliceGrad")
def slice_grad(op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None, steps: str | None) -> str:
    """Number the elements of x, slice the numbers as x was sliced, and scatter dY there: right for every start and step."""
    size = op.ReduceProd(shape, keepdims=0)
    numbers = op.Reshape(op.Range(0, size, 1), shape, allowzero=1)
    taken = op.Reshape(op.Slice(numbers, starts, ends, axes, steps), [-1])
    zeros = op.full(op.Reshape(size, [1]), 0.0, like=dY)
    return op.Reshape(op.ScatterElements(zeros, taken, op.Reshape(dY, [-1]), axis=0), shape, allowzero=1)
