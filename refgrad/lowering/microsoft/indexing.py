"""ONNX Runtime's training operators for indexing, in ai.onnx operators."""

from __future__ import annotations

from refgrad.lowering.microsoft.forms import form
from refgrad.reverse.emit import Emitter


@form("SliceGrad", results="shape:dY")
def slice_grad(
    op: Emitter, dY: str, shape: str, starts: str, ends: str, axes: str | None = None, steps: str | None = None
) -> str:
    return str(op.grad.SliceGrad(dY, shape, starts, ends, axes, steps))


@form("GatherGrad", results="shape:dY")
def gather_grad(op: Emitter, shape: str, indices: str, dY: str, *, axis: int = 0) -> str:
    return str(op.grad.GatherGrad(shape, indices, dY, axis=axis))


@form("GatherElementsGrad", results="shape:dY")
def gather_elements_grad(op: Emitter, dY: str, shape: str, indices: str, *, axis: int = 0) -> str:
    return str(op.grad.GatherElementsGrad(dY, shape, indices, axis=axis))


@form("GatherNDGrad", results="shape:dY")
def gather_nd_grad(op: Emitter, shape: str, indices: str, dY: str, *, batch_dims: int = 0) -> str:
    return str(op.grad.GatherNDGrad(shape, indices, dY, batch_dims=batch_dims))
