"""ONNX Runtime's arithmetic, and the axes along which operands were broadcast."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from refgrad.formulas.types import as_scalar
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.forms import form
from refgrad.microsoft.results import elements, like
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import operator


@operator("ScaledSum", "output")
def scaled_sum(
    op: FunctionEmitter,
    input_0: str,
    input_1: str,
    input_2: str | None = None,
    *,
    scale_0: float,
    scale_1: float,
    scale_2: float | None = None,
) -> str:
    """Σ scaleₖ·inputₖ"""
    total = op.Add(op.Mul(input_0, scale_0), op.Mul(input_1, scale_1))
    return str(total if input_2 is None else op.Add(total, op.Mul(input_2, 1.0 if scale_2 is None else scale_2)))


@form("BroadcastGradientArgs", results=[elements(TensorProto.INT64), elements(TensorProto.INT64)])
def broadcast_gradient_args(op: Emitter, a_shape: str, b_shape: str) -> tuple[str, str]:
    """The axes along which each of two operands was broadcast, the last first"""
    a, b = op.dims(a_shape), op.dims(b_shape)
    if a is not None and b is not None and all(isinstance(dim, int) for dim in (*a, *b)):
        rank = max(len(a), len(b))
        padded = [(1,) * (rank - len(shape)) + shape for shape in (a, b)]
        first, second = (
            [k for k in range(rank) if k < rank - len(shape) or (own[k] == 1 and other[k] != 1)]
            for shape, own, other in ((a, *padded), (b, *reversed(padded)))
        )
        return op.const(np.array(first[::-1], np.int64)), op.const(np.array(second[::-1], np.int64))
    sizes = [op.Shape(shape) for shape in (a_shape, b_shape)]
    larger = op.Max(*sizes)
    missing = [op.Sub(larger, size) for size in sizes]
    own, other = (
        op.Concat(op.full(count, 1, like=shape), shape, axis=0)
        for count, shape in zip(missing, (a_shape, b_shape), strict=True)
    )
    last = op.Sub(op.Squeeze(larger, [0]), 1)
    places = op.Range(last, op.const(np.array(-1)), op.const(np.array(-1)))

    def axes(count: str, mine: str, facing: str) -> str:
        stretched = op.And(op.Equal(mine, 1), op.Not(op.Equal(facing, 1)))
        broadcast = op.Or(op.Less(places, count), op.Gather(stretched, places))
        return op.Compress(places, broadcast, axis=0)

    return axes(missing[0], own, other), axes(missing[1], other, own)


@form("DivGrad", results=[like("A"), like("B")])
def div_grad(op: Emitter, dY: str, A: str, B: str) -> tuple[str, str]:
    return op.grad.DivGrad(dY, A, B, None)


@form("Scale", results=[like("X")])
def scale(op: Emitter, X: str, scale: str, *, scale_down: int = 0) -> str:
    """X·scale, or X/scale with scale_down; the scale is one number of any type"""
    number = as_scalar(op, scale, op.type(X))
    return op.Div(X, number) if scale_down else op.Mul(X, number)


@form("BatchScale", results=[like("X"), like("X"), like("X")])
def batch_scale(
    op: Emitter, X: str, *, scale_0: float, scale_1: float, scale_2: float | None = None
) -> tuple[str, ...]:
    """X·scale for each scale"""
    return tuple(op.Mul(X, factor) for factor in (scale_0, scale_1, scale_2) if factor is not None)


@form("ZeroGradient", results=[like("X")])
def zero_gradient(op: Emitter, X: str, like: str | None = None) -> str:
    return op.zeros_like(X)
