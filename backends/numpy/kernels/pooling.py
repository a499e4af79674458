"""Poolings and their gradients. A loop goes over the elements of the kernel, never over those of the input."""

from __future__ import annotations

import math
from functools import reduce
from typing import Literal

import numpy as np

from refgrad.backends.numpy.kernels.windows import Windows, make_windows
from refgrad.backends.numpy.registry import kernel

Ints = list[int] | None


@kernel("MaxPool")
def max_pool(
    X: np.ndarray,
    *,
    auto_pad: str,
    ceil_mode: int = 0,
    dilations: Ints = None,
    kernel_shape: list[int],
    pads: Ints = None,
    storage_order: int = 0,
    strides: Ints = None,
    _wanted: tuple[bool, ...],
) -> tuple[np.ndarray, ...]:
    """Maximum of each window, and the flat index of its first occurrence. NaN is greater than any number."""
    windows = make_windows(X.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    padded = windows.pad(X, _lowest(X.dtype))
    if not any(_wanted[1:]):
        return (reduce(np.maximum, (padded[where] for _, where in windows.taps())),)
    Y = np.full((*X.shape[:2], *windows.count), _lowest(X.dtype), X.dtype)
    first = np.full(Y.shape, -1, np.int64)
    order: Literal["F", "C"] = "F" if storage_order else "C"
    for tap, where in windows.taps():
        axes = windows.positions(tap)
        met = reduce(np.logical_and.outer, [(p >= 0) & (p < n) for p, n in zip(axes, windows.size, strict=True)])
        clipped = np.ix_(*(p.clip(0, n - 1) for p, n in zip(axes, windows.size, strict=True)))
        flat = np.ravel_multi_index(clipped, windows.size, order=order)
        x = padded[where]
        better = met & ((first < 0) | (x > Y) | ((x != x) & (Y == Y)))
        np.copyto(Y, x, where=better)
        np.copyto(first, flat, where=better)
    n, c = X.shape[:2]
    image = math.prod(windows.size)
    return Y, first + (np.arange(n * c) * image).reshape(n, c, *[1] * len(windows.size))


@kernel("MaxPoolGrad")
def max_pool_grad(
    dY: np.ndarray,
    indices: np.ndarray,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = None,
    kernel_shape: list[int],
    pads: Ints = None,
    storage_order: int = 0,
    strides: Ints = None,
    _output_shapes: tuple[tuple[int, ...], ...],
) -> np.ndarray:
    """DX is dY added up where the indices of MaxPool point"""
    (shape,) = _output_shapes
    flat = indices.reshape(-1)
    if storage_order:
        image, inside = np.divmod(flat, math.prod(shape[2:]))
        axes = np.unravel_index(inside, shape[2:], order="F")
        flat = image * math.prod(shape[2:]) + np.ravel_multi_index(axes, shape[2:])
    return np.bincount(flat, dY.reshape(-1), math.prod(shape)).astype(dY.dtype).reshape(shape)


@kernel("MaxUnpool")
def max_unpool(
    X: np.ndarray,
    I: np.ndarray,  # noqa: E741
    output_shape: np.ndarray | None = None,
    *,
    kernel_shape: list[int],
    pads: Ints = None,
    strides: Ints = None,
) -> np.ndarray:
    """Zeros with the elements of X at their indices, the last of those with one index; `output_shape` adds zeros behind."""
    rank = len(kernel_shape)
    axes = zip(X.shape[2:], strides or [1] * rank, kernel_shape, strict=True)
    around = np.reshape(pads or [0] * (2 * rank), (2, rank)).sum(0)
    shape = (*X.shape[:2], *((n - 1) * s + k - p for (n, s, k), p in zip(axes, around.tolist(), strict=True)))
    flat = np.zeros(math.prod(shape), X.dtype)
    flat[I.reshape(-1)] = X.reshape(-1)
    inner = flat.reshape(shape)
    if output_shape is None:
        return inner
    return np.pad(inner, [(0, int(m) - n) for m, n in zip(output_shape, shape, strict=True)])


@kernel("AveragePool", in_float32=True)
def average_pool(
    X: np.ndarray,
    *,
    auto_pad: str,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = None,
    kernel_shape: list[int],
    pads: Ints = None,
    strides: Ints = None,
) -> np.ndarray:
    """Mean of each window over its elements inside the input, or inside the pads too with count_include_pad."""
    windows = make_windows(X.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    padded = windows.pad(X)
    Y = np.zeros((*X.shape[:2], *windows.count), X.dtype)
    for _, where in windows.taps():
        Y += padded[where]
    Y /= _counts(windows, count_include_pad).astype(X.dtype)
    return Y


@kernel("AveragePoolGrad", in_float32=True)
def average_pool_grad(
    dY: np.ndarray,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints = None,
    kernel_shape: list[int],
    pads: Ints = None,
    strides: Ints = None,
    _output_shapes: tuple[tuple[int, ...], ...],
) -> np.ndarray:
    """dX: each dY divided by its window's count and added to every element of the window"""
    (shape,) = _output_shapes
    windows = make_windows(shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    share = dY / _counts(windows, count_include_pad).astype(dY.dtype)
    padded = np.zeros((*shape[:2], *windows.padded), dY.dtype)
    for _, where in windows.taps():
        padded[where] += share
    return windows.crop(padded)


@kernel("LpPool", in_float32=True)
def lp_pool(
    X: np.ndarray,
    *,
    auto_pad: str,
    ceil_mode: int = 0,
    dilations: Ints = None,
    kernel_shape: list[int],
    p: float,
    pads: Ints = None,
    strides: Ints = None,
) -> np.ndarray:
    """(Σ|x|ᵖ)^(1/p) of each window"""
    windows = make_windows(X.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    padded = windows.pad(np.abs(X) ** p)
    Y = np.zeros((*X.shape[:2], *windows.count), X.dtype)
    for _, where in windows.taps():
        Y += padded[where]
    return np.asarray(Y ** (1 / p))


@kernel("GlobalAveragePool", in_float32=True)
def global_average_pool(X: np.ndarray) -> np.ndarray:
    return np.asarray(X.mean(tuple(range(2, X.ndim)), keepdims=True))


@kernel("GlobalMaxPool")
def global_max_pool(X: np.ndarray) -> np.ndarray:
    return np.asarray(X.max(tuple(range(2, X.ndim)), keepdims=True))


@kernel("GlobalLpPool", in_float32=True)
def global_lp_pool(X: np.ndarray, *, p: int = 2) -> np.ndarray:
    """(Σ|x|^p)^(1/p) over the spatial axes."""
    powers = np.abs(X) ** p
    return np.asarray(powers.sum(tuple(range(2, X.ndim)), keepdims=True) ** (1 / p))


def _counts(windows: Windows, count_include_pad: int) -> np.ndarray:
    """How many elements each window averages over, shape `windows.count`."""
    per_axis = []
    for axis, (n, o) in enumerate(zip(windows.size, windows.count, strict=True)):
        low, high = (-windows.begin[axis], n + windows.end[axis]) if count_include_pad else (0, n)
        starts = np.arange(o) * windows.strides[axis] - windows.begin[axis]
        met = starts[:, None] + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        per_axis.append(((met >= low) & (met < high)).sum(1))
    return reduce(np.multiply.outer, per_axis)


def _lowest(dtype: np.dtype) -> float:
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf
