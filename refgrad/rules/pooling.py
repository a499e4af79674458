"""Poolings: each window's adjoint goes back to the element that won it, or is divided among its elements."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.emit import Emitter
from refgrad.registry import rule

Ints = Sequence[int] | None


@rule("MaxPool")
def max_pool(
    op: Emitter,
    d_Y: str,
    X: str,
    Indices: str,
    auto_pad: str,
    ceil_mode: int,
    dilations: Ints,
    kernel_shape: Sequence[int],
    pads: Ints,
    storage_order: int,
    strides: Ints,
) -> str:
    """dX = dY added at the element of X that won each window"""
    d_X: str = op.grad.MaxPoolGrad(
        d_Y,
        X,
        Indices,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        storage_order=storage_order,
    )
    return d_X


@rule("AveragePool")
def average_pool(
    op: Emitter,
    d_Y: str,
    X: str,
    auto_pad: str,
    ceil_mode: int,
    count_include_pad: int,
    dilations: Ints,
    kernel_shape: Sequence[int],
    pads: Ints,
    strides: Ints,
) -> str:
    """dX = each dY divided by the number of elements it averages, added to each of them"""
    d_X: str = op.grad.AveragePoolGrad(
        d_Y,
        X,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        count_include_pad=count_include_pad,
    )
    return d_X


@rule("GlobalAveragePool")
def global_average_pool(op: Emitter, d_Y: str, X: str) -> str:
    """dX = dY / (the number of spatial elements)"""
    d_X: str = op.grad.GlobalAveragePoolGrad(d_Y, X)
    return d_X


@rule("GlobalMaxPool")
def global_max_pool(op: Emitter, d_Y: str, X: str) -> str:
    """dX = dY at the first largest element of each channel, 0 elsewhere"""
    rows = op.Flatten(X, axis=2)
    first = op.ArgMax(rows, axis=1, keepdims=1)
    d_rows = op.ScatterElements(op.zeros_like(rows), first, op.Flatten(d_Y, axis=2), axis=1)
    return op.reshape_like(d_rows, X)
