"""The primitives that ONNX Runtime has a kernel for, each with the condition under which that kernel is right.

A lowering that returns None leaves the case to the ai.onnx one.
"""

from __future__ import annotations

from refgrad.emit import Emitter
from refgrad.graph import UNNAMED, Dim
from refgrad.registry import lowering


@lowering("BroadcastGradient", dialect="ort")
def broadcast_gradient(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str | None:
    """BroadcastGradientArgs takes two shapes; ONNX Runtime's builder uses it where a dimension is unknown."""
    shapes = [op.shape(name) for name in operands]
    if len(operands) != 2 or operands[0] == operands[1]:
        return None
    if all(shape is not None and not any(_is_unknown(dim) for dim in shape) for shape in shapes):
        return None
    pair = op.com_microsoft("BroadcastGradientArgs", *(op.Shape(name) for name in operands), outputs=2)
    axes = pair[operands.index(X)]
    return op.Reshape(op.ReduceSum(dY, axes, keepdims=1, noop_with_empty_axes=1), op.Shape(X), allowzero=1)


def _is_unknown(dim: Dim) -> bool:
    return dim is None or (isinstance(dim, str) and dim.startswith(UNNAMED))


@lowering("SliceGrad", dialect="ort")
def slice_grad(op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None, steps: str | None) -> str:
    return op.com_microsoft("SliceGrad", dY, shape, starts, ends, axes, steps)
