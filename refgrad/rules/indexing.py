"""Operators that take elements by index or put them there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.products import of_others
from refgrad.tables.registry import rule

Move = Callable[..., str]


@rule("Gather", wrt=["data"])
def gather(op: Emitter, d_output: str, data: str, indices: str, axis: int) -> str:
    """dx = Σ dy at the indices it was taken from"""
    return op.grad.GatherGrad(op.shape_of(data), indices, d_output, axis=axis)


@rule("GatherElements", wrt=["data"])
def gather_elements(op: Emitter, d_output: str, data: str, indices: str, axis: int) -> str:
    """dx = Σ dy at the indices it was taken from"""
    return op.grad.GatherElementsGrad(d_output, op.shape_of(data), indices, axis=axis)


@rule("GatherND", wrt=["data"])
def gather_nd(op: Emitter, d_output: str, data: str, indices: str, batch_dims: int) -> str:
    """dx = Σ dy at the index tuples it was taken from"""
    return op.grad.GatherNDGrad(op.shape_of(data), indices, d_output, batch_dims=batch_dims)


@rule("ScatterElements", wrt=["data", "updates"])
def scatter_elements(
    op: Emitter, d_output: str, data: str, indices: str, updates: str, output: str, axis: int, reduction: str
) -> tuple[str, str]:
    """dx = dy, 0 where it was overwritten; dupdates = dy at the indices. With a reduction: its derivative by each operand"""
    return _scatter(
        op,
        d_output,
        data,
        updates,
        output,
        reduction,
        put=lambda x, u, how: op.ScatterElements(x, indices, u, axis=axis, reduction=how),
        take=lambda x: op.GatherElements(x, indices, axis=axis),
    )


@rule("ScatterND", wrt=["data", "updates"])
def scatter_nd(
    op: Emitter, d_output: str, data: str, indices: str, updates: str, output: str, reduction: str
) -> tuple[str, str]:
    """dx = dy, 0 where it was overwritten; dupdates = dy at the indices. With a reduction: its derivative by each operand"""
    return _scatter(
        op,
        d_output,
        data,
        updates,
        output,
        reduction,
        put=lambda x, u, how: _put_rows(op, x, indices, u, how),
        take=lambda x: op.GatherND(x, indices),
    )


def _put_rows(op: Emitter, x: str, indices: str, updates: str, reduction: str | None) -> str:
    """ScatterND. With a reduction it becomes a ScatterElements: ONNX Runtime's ScatterND adds in parallel and loses terms."""
    if reduction is None:
        return op.ScatterND(x, indices, updates)
    size, shape = _elements(op, x), op.shape_of(x)
    numbers = op.Reshape(op.Range(0, op.Squeeze(size, [0]), 1), shape, allowzero=1)
    places, rows = op.Reshape(op.GatherND(numbers, indices), [-1]), op.Reshape(updates, [-1])
    put = op.ScatterElements(op.Reshape(x, [-1]), places, rows, axis=0, reduction=reduction)
    return op.Reshape(put, shape, allowzero=1)


def _scatter(
    op: Emitter, d_output: str, data: str, updates: str, output: str, reduction: str, put: Move, take: Move
) -> tuple[str, str]:
    """The cotangents of data and updates, where several updates may meet one element.

    none: they replace. add: dupdates = dy. mul: each factor gets the product of the others. max, min: the winners share
    dy; where the result is NaN there are none, and the gradient is NaN.
    """
    if reduction == "none":
        return put(d_output, op.zeros_like(updates), None), take(d_output)
    if reduction == "add":
        return d_output, take(d_output)
    if reduction == "mul":
        none, ones = op.zeros_like(data), op.full_like(data, 1.0)
        d_updates = of_others(
            op,
            op.Mul(take(d_output), take(data)),
            updates,
            lambda x: take(put(op.as_type(none, op.type(x)), x, "add")),
            lambda x: take(put(op.as_type(ones, op.type(x)), x, "mul")),
        )
        return op.Mul(d_output, put(ones, updates, "mul")), d_updates
    kept, won = op.Equal(data, output), op.Equal(updates, take(output))
    shares = put(op.Cast(kept, to=op.type(data)), op.Cast(won, to=op.type(data)), "add")
    share, none = op.Div(d_output, shares), op.Div(0.0, shares)
    return op.Where(kept, share, none), op.Where(won, take(share), take(none))


@rule("Compress", wrt=["input"])
def compress(op: Emitter, d_output: str, input: str, condition: str, axis: int | None) -> str:
    """dx = dy put back where the condition holds, 0 elsewhere"""
    if axis == 0:
        return op.ScatterND(op.zeros_like(input), op.Transpose(op.NonZero(condition), perm=[1, 0]), d_output)
    indices = op.Reshape(op.NonZero(condition), [-1])
    if axis is not None:
        return op.grad.GatherGrad(op.shape_of(input), indices, d_output, axis=axis)
    return op.reshape_like(op.grad.GatherGrad(_elements(op, input), indices, d_output, axis=0), input)


def _elements(op: Emitter, x: str) -> str:
    """The shape of `x` with all elements in one row."""
    static = op.static(x)
    return op.Reshape(op.Size(x), [1]) if static is None else op.const([int(np.prod(static))])


@rule("TopK", wrt=["X"])
def top_k(op: Emitter, d_Values: str, X: str, Indices: str, axis: int) -> str:
    """dx = dy put back where the values were taken from, 0 elsewhere"""
    return op.grad.GatherElementsGrad(d_Values, op.shape_of(X), Indices, axis=axis)


@rule("Unique", wrt=["X"])
def unique(op: Emitter, d_Y: str, X: str, indices: str, axis: int | None) -> str:
    """dX = dY put back where each element of Y occurs first, 0 elsewhere"""
    if axis is not None:
        return op.grad.GatherGrad(op.shape_of(X), indices, d_Y, axis=axis)
    return op.reshape_like(op.grad.GatherGrad(_elements(op, X), indices, d_Y, axis=0), X)


@rule("OneHot", wrt=["values"])
def one_hot(op: Emitter, d_output: str, indices: str, depth: str, values: str, axis: int) -> str:
    """dvalues = (Σ dy where the output is off, Σ dy where it is on)"""
    on = op.Cast(op.OneHot(indices, depth, op.const([0, 1], like=values), axis=axis), to=TensorProto.BOOL)
    off_sum = op.ReduceSum(op.Where(on, 0, d_output), keepdims=0)
    on_sum = op.ReduceSum(op.Where(on, d_output, 0), keepdims=0)
    return op.Concat(op.Unsqueeze(off_sum, [0]), op.Unsqueeze(on_sum, [0]), axis=0)
