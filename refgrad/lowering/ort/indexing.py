"""ONNX Runtime's kernels for indexing, each with the condition under which it is right."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.lowering.ort.kernels import WIDE
from refgrad.tables.registry import lowering

_GATHERED = (*WIDE, TensorProto.FLOAT16)  # the types of the three kernels that undo a gathering


@lowering("SliceGrad", dialect="ort")
def slice_grad(
    op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None, steps: str | None
) -> str | None:
    """The kernel fails on a negative step along the last axis, and has no 16-bit floats."""
    if op.type(dY) not in WIDE or (steps is not None and _may_end_backwards(op, dY, axes, steps)):
        return None
    return op.com_microsoft("SliceGrad", dY, shape, starts, ends, axes, steps)


def _may_end_backwards(op: Emitter, dY: str, axes: str | None, steps: str) -> bool:
    """True if a step along the last axis may be negative."""
    by, rank = op.constant(steps), op.rank(dY)
    along = op.constant(axes) if axes is not None or by is None else np.arange(by.size)
    if by is None or along is None:
        return by is None or any(by < 0)
    return any(step < 0 and (rank is None or axis in (-1, rank - 1)) for step, axis in zip(by, along, strict=True))


@lowering("GatherGrad", dialect="ort")
def gather_grad(op: Emitter, shape: str, indices: str, dY: str, axis: int) -> str | None:
    if op.type(dY) not in _GATHERED:
        return None
    return op.com_microsoft("GatherGrad", shape, indices, dY, axis=axis)


@lowering("GatherElementsGrad", dialect="ort")
def gather_elements_grad(op: Emitter, dY: str, shape: str, indices: str, axis: int) -> str | None:
    if op.type(dY) not in _GATHERED:
        return None
    return op.com_microsoft("GatherElementsGrad", dY, shape, indices, axis=axis)


@lowering("GatherNDGrad", dialect="ort")
def gather_nd_grad(op: Emitter, shape: str, indices: str, dY: str, batch_dims: int) -> str | None:
    """If the batch is empty, the process ends."""
    if op.type(dY) not in _GATHERED or (batch_dims and 0 in (op.shape(indices) or ())):
        return None
    return op.com_microsoft("GatherNDGrad", shape, indices, dY, batch_dims=batch_dims)
