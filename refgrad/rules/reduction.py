"""Reductions. Their axes may be an attribute (before opset 18), a constant or computed at run time."""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.registry import rule


@rule("ReduceSum", wrt=["data"])
def reduce_sum(
    op: Emitter, d_reduced: str, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """Dx = dy along every reduced axis"""
    d_reduced = op.keep_dims(d_reduced, data, axes, keepdims, noop_with_empty_axes)
    return op.Expand(d_reduced, op.shape_of(data))
