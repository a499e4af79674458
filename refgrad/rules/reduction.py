"""Reductions. Their axes may be an attribute (before opset 18), a constant or computed at run time."""

from __future__ import annotations

import math

import numpy as np

from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import rule


@rule("ReduceSum", wrt=["data"])
def reduce_sum(
    op: Emitter, d_reduced: str, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy along every reduced axis"""
    d_reduced = op.keep_dims(d_reduced, axes, keepdims)
    return op.Expand(d_reduced, op.shape_of(data))


@rule("ReduceMean", wrt=["data"])
def reduce_mean(
    op: Emitter, d_reduced: str, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy/n along every reduced axis; n elements were averaged"""
    count = _count(op, data, axes, noop_with_empty_axes)
    averaged = op.grad.Averaged(op.keep_dims(d_reduced, axes, keepdims), d_reduced, data, count=count)
    return op.Expand(averaged, op.shape_of(data))


def _count(op: Emitter, data: str, axes: str | None, noop_with_empty_axes: int) -> int | None:
    """How many elements of `data` become one, if that is known."""
    shape, known = op.shape(data), op.constant(axes)
    if shape is None or (axes is not None and known is None):
        return None
    every = np.arange(0 if noop_with_empty_axes else len(shape))
    dims = [shape[axis] for axis in (every if known is None or not known.size else known)]
    return math.prod(d for d in dims if isinstance(d, int)) if all(isinstance(d, int) for d in dims) else None


@rule("ReduceMax", wrt=["data"])
def reduce_max(
    op: Emitter, d_reduced: str, data: str, reduced: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy/k where x = y, else 0; k elements are equal to y"""
    d_y, y = _kept(op, d_reduced, reduced, axes, keepdims)
    attained = op.Equal(data, y)
    ties = op.ReduceSum(
        op.Cast(attained, to=op.type(data)), axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes
    )
    return op.Where(attained, op.Div(d_y, ties), 0.0)


@rule("ReduceMin", wrt=["data"])
def reduce_min(
    op: Emitter, d_reduced: str, data: str, reduced: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy/k where x = y, else 0; k elements are equal to y"""
    return reduce_max(op, d_reduced, data, reduced, axes, keepdims, noop_with_empty_axes)


@rule("ReduceProd", wrt=["data"])
def reduce_prod(
    op: Emitter, d_reduced: str, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx_i = dy·Π_{j≠i} x_j = dy·(product of the nonzero others)·(1; s where one other is 0; p where two are; 0 where more are)

    s is the sum of the others that are 0, and p = (s² − Σ of their squares)/2 the product of two: they are 0 and have the
    derivatives of the product. (Derivatives of fourth order where four elements are 0 are lost.)
    """
    zero = op.Equal(data, 0.0)
    nonzero, zeros = op.Where(zero, 1.0, data), op.Where(zero, data, 0.0)
    product = op.reduce("ReduceProd", nonzero, axes, noop_with_empty_axes)

    def others(x: str) -> str:
        total = op.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)
        return op.Sub(total, x)

    count = others(op.Cast(zero, to=op.type(data)))
    one = others(zeros)
    two = op.Mul(op.Sub(op.Mul(one, one), others(op.Mul(zeros, zeros))), 0.5)
    factor = op.Where(op.Equal(count, 2.0), two, 0.0)
    factor = op.Where(op.Equal(count, 0.0), 1.0, op.Where(op.Equal(count, 1.0), one, factor))
    d_y = op.keep_dims(d_reduced, axes, keepdims)
    return op.Mul(op.Div(op.Mul(d_y, product), nonzero), factor)


@rule("ReduceL1", wrt=["data"])
def reduce_l1(
    op: Emitter, d_reduced: str, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy·sign x"""
    return op.Mul(op.keep_dims(d_reduced, axes, keepdims), op.Sign(data))


@rule("ReduceL2", wrt=["data"])
def reduce_l2(
    op: Emitter, d_reduced: str, data: str, reduced: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = x·dy/y, and 0 where y = 0"""
    return op.Mul(data, op.keep_dims(op.grad.OverNorm(d_reduced, reduced), axes, keepdims))


@rule("ReduceSumSquare", wrt=["data"])
def reduce_sum_square(
    op: Emitter, d_reduced: str, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = 2·dy·x"""
    d_y = op.keep_dims(d_reduced, axes, keepdims)
    return op.Mul(data, op.Mul(d_y, 2.0))


@rule("ReduceLogSum", wrt=["data"])
def reduce_log_sum(
    op: Emitter, d_reduced: str, data: str, reduced: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy/Σx along every reduced axis, and Σx = exp y"""
    d_sum = op.Div(d_reduced, op.Exp(reduced))
    return reduce_sum(op, d_sum, data, axes, keepdims, noop_with_empty_axes)


@rule("ReduceLogSumExp", wrt=["data"])
def reduce_log_sum_exp(
    op: Emitter, d_reduced: str, data: str, reduced: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy·exp(x − y), and 0 where y = −inf"""
    d_y, y = _kept(op, d_reduced, reduced, axes, keepdims)
    finite = op.Where(op.Equal(y, -math.inf), 0.0, y) if op.kinks == "refgrad" else y
    return op.Mul(d_y, op.Exp(op.Sub(data, finite)))


def _kept(op: Emitter, d_reduced: str, reduced: str, axes: str | None, keepdims: int) -> tuple[str, str]:
    """The cotangent and the result, both with the reduced axes put back as 1."""
    return op.keep_dims(d_reduced, axes, keepdims), op.keep_dims(reduced, axes, keepdims)
