"""Reductions. Their axes may be an attribute (before opset 18), a constant or computed at run time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.masks import mask_cotangent
from refgrad.formulas.products import of_others
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.registry import rule
from refgrad.tables.torch_functions import exported_function


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
    """dx = dy/k where x = y, else 0; k elements are equal to y, none where y is NaN: then dx is NaN"""
    if op.kinks == "torch" and (along := _of_an_index(op, data, axes, keepdims, noop_with_empty_axes)):
        return _at_the_first(op, d_reduced, data, along)
    d_y, y = _kept(op, d_reduced, reduced, axes, keepdims)
    attained = op.Equal(data, y)
    ties = op.ReduceSum(
        op.Cast(attained, to=op.type(data)), axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes
    )
    return mask_cotangent(op, attained, op.Div(d_y, ties), other=op.Div(0.0, ties))


def _of_an_index(op: Emitter, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int) -> Sequence[int]:
    """The reduced axes, if the node was exported from a torch function that selects one element by index; else empty."""
    shape, known = op.shape(data), op.constant(axes)
    if shape is None or (axes is not None and known is None):
        return ()
    rank = len(shape)
    every = () if noop_with_empty_axes else range(rank)
    along = sorted(int(axis) % rank for axis in (known if known is not None and known.size else every))
    if op.torch_function in ("max.dim", "min.dim") and len(along) == 1:
        return along
    if op.torch_function == "adaptive_max_pool" and along == list(range(rank - len(along), rank)):
        return along
    if op.torch_function or len(along) != 1:
        return ()
    asked = {"axis": along[0], "keepdims": keepdims, "select_last_index": 0}
    for reader in op.graph.readers(data):  # the TorchScript exporter writes the other result of max(dim) beside it
        if reader.key == ("", op.rule.replace("Reduce", "Arg")) and not exported_function(reader.proto):
            found = {"axis": 0, "keepdims": 1, "select_last_index": 0} | reader.attributes
            if {**found, "axis": found["axis"] % rank} == asked:
                return along
    return ()


def _at_the_first(op: Emitter, d_reduced: str, data: str, along: Sequence[int]) -> str:
    """The cotangent at the first of the elements that are the largest, or the smallest, along the axes, 0 elsewhere."""
    lead = [0] * along[0]
    rows = data if len(along) == 1 else op.Reshape(data, [*lead, -1])
    wide = op.as_type(rows, TensorProto.FLOAT) if op.type(rows) in SIXTEEN_BIT else rows
    first = (op.ArgMax if op.rule == "ReduceMax" else op.ArgMin)(wide, axis=along[0], keepdims=1)
    d_first = op.Reshape(d_reduced, op.shape_of(first))
    d_rows = op.grad.GatherElementsGrad(d_first, op.shape_of(rows), first, axis=along[0])
    return d_rows if rows == data else op.reshape_like(d_rows, data)


@rule("ReduceMin", wrt=["data"])
def reduce_min(
    op: Emitter, d_reduced: str, data: str, reduced: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy/k where x = y, else 0; k elements are equal to y, none where y is NaN: then dx is NaN"""
    return reduce_max(op, d_reduced, data, reduced, axes, keepdims, noop_with_empty_axes)


@rule("ReduceProd", wrt=["data"])
def reduce_prod(
    op: Emitter, d_reduced: str, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx_i = dy·Π_{j≠i} x_j"""

    def total(x: str) -> str:
        return op.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)

    def product(x: str) -> str:
        return op.reduce("ReduceProd", x, axes, noop_with_empty_axes)

    return of_others(op, op.keep_dims(d_reduced, axes, keepdims), data, total, product)


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
    op: Emitter, d_reduced: str, data: str, axes: str | None, keepdims: int, noop_with_empty_axes: int
) -> str:
    """dx = dy/Σx along every reduced axis; exp y would have lost as many digits of Σx as y has before the point"""
    total = op.ReduceSum(data, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)
    return reduce_sum(op, op.Div(d_reduced, total), data, axes, keepdims, noop_with_empty_axes)


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
