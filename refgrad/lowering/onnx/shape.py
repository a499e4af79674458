"""Shapes, and tensors that are others in another shape or under another name."""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.registry import lowering


@lowering("Alias")
def alias(op: Emitter, X: str) -> str:
    return X


@lowering("ShapeOf")
def shape_of(op: Emitter, X: str) -> str:
    static = op.static(X)
    return op.measure(X) if static is None else op.const(list(static))


@lowering("ReshapeLike")
def reshape_like(op: Emitter, dY: str, X: str) -> str:
    """One dimension that is not known needs no Shape node."""
    dims = op.shape(X)
    if dims is None or 0 in dims or sum(not isinstance(dim, int) for dim in dims) != 1:
        return op.Reshape(dY, op.shape_of(X), allowzero=1)
    return op.Reshape(dY, [dim if isinstance(dim, int) else -1 for dim in dims])
