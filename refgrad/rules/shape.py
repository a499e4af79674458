"""Operators that move elements without changing them: the adjoint moves them back."""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.registry import rule


@rule("Reshape", wrt=["data"])
def reshape(op: Emitter, d_reshaped: str, data: str) -> str:
    """Dx = dy in the shape of x"""
    return op.reshape_like(d_reshaped, data)


@rule("Squeeze", wrt=["data"])
def squeeze(op: Emitter, d_squeezed: str, data: str, axes: str | None) -> str:
    """Dx = dy with the axes put back"""
    if axes is None:
        return op.reshape_like(d_squeezed, data)
    return op.Unsqueeze(d_squeezed, axes)


@rule("Slice", wrt=["data"])
def slice_(op: Emitter, d_output: str, data: str, starts: str, ends: str, axes: str | None, steps: str | None) -> str:
    """Dx = dy put back where it was taken from, 0 elsewhere"""
    return op.grad.SliceGrad(d_output, op.shape_of(data), starts, ends, axes, steps)
