"""Arithmetic and broadcasting."""

from __future__ import annotations

from functools import lru_cache

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.protos.types import Dim, Shape
from refgrad.tables.registry import lowering


@lowering("DivGrad")
def div_grad(op: Emitter, dC: str, A: str, B: str, C: str | None) -> tuple[str, str]:
    dA = op.Div(dC, B)
    dB = op.Neg(op.Mul(dA, C or op.Div(A, B)))
    return op.grad.BroadcastGradient(dA, A, (A, B)), op.grad.BroadcastGradient(dB, B, (A, B))


@lowering("BroadcastGradient")
def broadcast_gradient(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str:
    """Sum over the axes of dY that X does not have, and over those along which X has size 1 and dY has not.

    Nothing is emitted where the static shapes prove that X was not broadcast; the axes are constants where the shapes
    tell them, and computed from the shapes at run time where they do not.
    """
    shape, others = op.shape(X), tuple([op.shape(name) for name in operands if name != X])
    if not others:
        return dY
    axes = summed_axes(shape, *others)
    if axes is None:
        return _at_run_time(op, dY, X, operands)
    leading, inner = axes
    if not leading and not inner:
        return dY
    if not leading:
        return op.ReduceSum(dY, inner, keepdims=1)
    if inner:
        return op.Squeeze(op.ReduceSum(dY, leading + inner, keepdims=1), leading)
    rows = _rows(shape, others) if shape is not None else 0
    if rows > 1 and op.type(dY) in (TensorProto.FLOAT, TensorProto.DOUBLE):
        # A product with ones: ONNX Runtime's CPU takes a third of ReduceSum's time for it.
        flat = len(leading) == 1 and op.rank(X) == 1
        sums = op.MatMul(op.full([rows], 1.0, like=dY), dY if flat else op.Reshape(dY, [rows, -1]))
        return sums if op.rank(X) == 1 else op.Reshape(sums, op.shape_of(X), allowzero=1)
    return op.ReduceSum(dY, leading, keepdims=0)


@lru_cache(maxsize=4096)
def summed_axes(shape: Shape | None, *others: Shape | None) -> tuple[list[int], list[int]] | None:
    """The axes along which `shape` was broadcast against the others: the axes that it lacks, and its axes of size 1.

    None where only the run tells.
    """
    if shape is None or None in others:
        return None
    known = [other for other in others if other is not None]
    rank = max([len(shape), *map(len, known)])
    missing = rank - len(shape)
    inner = []
    for axis, dim in enumerate(shape, missing):
        facing = {_dim(other, axis - rank) for other in known}
        if dim == 1:
            if facing - {1}:
                inner.append(axis)
        elif not isinstance(dim, int) and not all(d == 1 or (d == dim and d is not None) for d in facing):
            return None
    return list(range(missing)), inner


@lru_cache(maxsize=4096)
def _rows(shape: Shape, others: tuple[Shape | None, ...]) -> int:
    """How many rows are summed where the axes in front are, 0 where a size is unknown."""
    known = [other for other in others if other is not None]
    rank = max([len(shape), *map(len, known)])
    rows = int(all(isinstance(dim, int) for dim in shape))
    for axis in range(rank - len(shape)):
        sizes = {_dim(other, axis - rank) for other in known} - {1}
        whole = [size for size in sizes if isinstance(size, int)]
        rows *= (whole[0] if whole else 0) if sizes else 1
    return rows


def _dim(shape: Shape, axis: int) -> Dim:
    """The dimension at a negative axis; 1 where the shape does not reach that far."""
    return shape[axis] if -axis <= len(shape) else 1


def _at_run_time(op: Emitter, dY: str, X: str, operands: tuple[str, ...]) -> str:
    """The axes are where the shape of X, with ones put in front, differs from the shape of dY."""
    shape, full = op.Shape(X), op.Shape(dY)
    ranks = [op.rank(name) for name in operands]
    rank = op.rank(X)
    if rank is None or None in ranks:
        lacking = op.Sub(op.Shape(full), op.Shape(shape))
        padded = op.Concat(op.full(lacking, 1, like=shape), shape, axis=0)
    else:
        missing = max(r for r in ranks if r is not None) - rank
        padded = op.Concat([1] * missing, shape, axis=0) if missing else shape
    axes = op.Reshape(op.NonZero(op.Not(op.Equal(padded, full))), [-1])
    return op.Reshape(op.ReduceSum(dY, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)
