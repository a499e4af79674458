"""The primitives that ONNX Runtime has a kernel for, each with the condition under which that kernel is right.

A lowering that returns None leaves the case to the ai.onnx one.
"""

from __future__ import annotations

from onnx import TensorProto

from refgrad.emit import Emitter
from refgrad.graph import UNNAMED, Dim
from refgrad.registry import lowering

_WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)
_GATHERED = (*_WIDE, TensorProto.FLOAT16)  # the types of the three kernels that undo a gathering


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
def slice_grad(
    op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None, steps: str | None
) -> str | None:
    """The kernel fails on a negative step along the last axis, and has no 16-bit floats."""
    by = op.constant(steps)
    if op.type(dY) not in _WIDE or (steps is not None and (by is None or any(by < 0))):
        return None
    return str(op.com_microsoft("SliceGrad", dY, shape, starts, ends, axes, steps))


@lowering("GatherGrad", dialect="ort")
def gather_grad(op: Emitter, shape: str, indices: str, dY: str, axis: int) -> str | None:
    if op.type(dY) not in _GATHERED:
        return None
    return str(op.com_microsoft("GatherGrad", shape, indices, dY, axis=axis))


@lowering("GatherElementsGrad", dialect="ort")
def gather_elements_grad(op: Emitter, dY: str, shape: str, indices: str, axis: int) -> str | None:
    if op.type(dY) not in _GATHERED:
        return None
    return str(op.com_microsoft("GatherElementsGrad", dY, shape, indices, axis=axis))


@lowering("GatherNDGrad", dialect="ort")
def gather_nd_grad(op: Emitter, shape: str, indices: str, dY: str, batch_dims: int) -> str | None:
    if op.type(dY) not in _GATHERED:
        return None
    return str(op.com_microsoft("GatherNDGrad", shape, indices, dY, batch_dims=batch_dims))
