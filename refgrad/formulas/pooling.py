"""Gradients of poolings that go to every element of a window."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.builder.op import Emitter
from refgrad.formulas.windows import SymbolicWindows, lay, ones


def over_windows(op: Emitter, dY: str, X: str, kernel: Sequence[int], windows: SymbolicWindows) -> str:
    """Each element of `dY` added to every element of its window in `X`, every channel like a batch of one."""
    if windows.count is None:
        count = op.ReduceProd(op.Shape(dY, end=2), keepdims=1)
        images = op.Reshape(dY, op.Concat(count, [1], op.Shape(dY, start=2), axis=0), allowzero=1)
    elif 0 in windows.count:
        return op.zeros_like(X)
    else:
        images = op.Reshape(dY, [-1, 1, *windows.count])
    return op.reshape_like(lay(op, images, ones(op, kernel, like=dY), X, windows), X)
