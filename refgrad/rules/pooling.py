"""Poolings: each window's cotangent goes back to the element that won it, or is divided among its elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refgrad.builder.op import Emitter
from refgrad.formulas.norms import over_norm_power
from refgrad.formulas.pooling import over_windows
from refgrad.formulas.windows import make_windows
from refgrad.tables.registry import rule

Ints = Sequence[int] | None


@rule("MaxPool")
def max_pool(op: Emitter, d_Y: str, X: str, Indices: str, **attributes: Any) -> str:
    """dX = dY added at the element of X that won each window"""
    return op.grad.MaxPoolGrad(d_Y, X, Indices, **attributes)


@rule("AveragePool")
def average_pool(op: Emitter, d_Y: str, X: str, **attributes: Any) -> str:
    """dX = each dY divided by the number of elements it averages, added to each of them"""
    return op.grad.AveragePoolGrad(d_Y, X, **attributes)


@rule("GlobalAveragePool")
def global_average_pool(op: Emitter, d_Y: str, X: str, Y: str) -> str:
    """dX = dY / (the number of spatial elements)"""
    d_X: str = op.grad.GlobalAveragePoolGrad(d_Y, X, Y)
    return d_X


@rule("GlobalMaxPool")
def global_max_pool(op: Emitter, d_Y: str, X: str) -> str:
    """dX = dY at the first largest element of each channel, 0 elsewhere"""
    rows = op.Flatten(X, axis=2)
    first = op.ArgMax(rows, axis=1, keepdims=1)
    d_rows = op.ScatterElements(op.zeros_like(rows), first, op.Flatten(d_Y, axis=2), axis=1)
    return op.reshape_like(d_rows, X)


@rule("MaxUnpool", wrt=["X"])
def max_unpool(
    op: Emitter,
    d_output: str,
    X: str,
    I: str,  # noqa: E741
    output_shape: str | None,
    kernel_shape: Sequence[int],
    pads: Ints,
    strides: Ints,
) -> str:
    """dX = dY where the element was put, 0 where a later one was put there too

    The indices count the elements of the shape that the attributes give; a larger output_shape adds zeros behind it.
    """
    rank = len(kernel_shape)
    steps, around = list(strides or [1] * rank), list(pads or [0] * (2 * rank))
    if output_shape is not None:
        extent = [k - s - b - e for k, s, b, e in zip(kernel_shape, steps, around[:rank], around[rank:], strict=True)]
        size = op.Add(op.Mul(op.Shape(X, start=2), steps), extent)
        d_output = op.Slice(d_output, [0] * rank, size, list(range(2, rank + 2)))
    places = op.Reshape(I, [-1])
    taken = op.Gather(op.Reshape(d_output, [-1]), places, axis=0)
    known = op.constant(I)
    if known is None or np.unique(known).size < known.size:
        numbers = op.Range(0, op.Size(I), 1)
        nobody = op.full(op.Reshape(op.Size(d_output), [1]), 0, like=numbers)
        how = "max" if op.opset >= 18 else None
        last = op.Gather(op.ScatterElements(nobody, places, numbers, axis=0, reduction=how), places, axis=0)
        taken = op.Where(op.Equal(last, numbers), taken, 0)
    return op.reshape_like(taken, X)


@rule("LpPool")
def lp_pool(
    op: Emitter,
    d_Y: str,
    X: str,
    Y: str,
    auto_pad: str,
    ceil_mode: int,
    dilations: Ints,
    kernel_shape: Sequence[int],
    p: int,
    pads: Ints,
    strides: Ints,
) -> str:
    """dX = sign(X)·|X|^(p−1)·(dY/Y^(p−1) added to each element of its window)"""
    rank = len(kernel_shape)
    windows = make_windows(op, X, d_Y, kernel_shape, strides, dilations, pads, auto_pad, rank, ceil_mode)
    return op.Mul(_power(op, X, p), over_windows(op, _share(op, d_Y, Y, p), X, kernel_shape, windows))


@rule("GlobalLpPool")
def global_lp_pool(op: Emitter, d_Y: str, X: str, Y: str, p: int) -> str:
    """dX = sign(X)·|X|^(p−1)·dY/Y^(p−1)"""
    return op.Mul(_power(op, X, p), _share(op, d_Y, Y, p))


def _power(op: Emitter, X: str, p: int) -> str:
    """sign(X)·|X|^(p−1)"""
    if p == 1:
        return op.Sign(X)
    return X if p == 2 else op.Mul(X, op.Pow(op.Abs(X), p - 2))


def _share(op: Emitter, d_Y: str, Y: str, p: int) -> str:
    """dY/Y^(p−1), 0 where the whole window is 0."""
    return d_Y if p == 1 else over_norm_power(op, d_Y, Y, p - 1)
