"""Poolings and their gradients, block by block: a maximum or sum over a window is taken along one axis after the other.

A loop goes over the elements of the kernel along one axis, never over the elements of the input. A block's arrays are
(n, C, 1, spatial...).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, reduce

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices, check_shape, mean
from refgrad.backends.numpy.kernels.windows import Block, Windows, make_windows
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel

Ints = list[int] | None


@kernel("MaxPool", fresh=True)
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
    if not any(_wanted[1:]):
        return (_pooled(np.maximum, X, windows, _lowest(X.dtype)),)
    Y = np.empty((*X.shape[:2], *windows.count), X.dtype)
    indices = np.empty(Y.shape, np.int64)
    size = windows.size
    steps = [math.prod(size[:axis] if storage_order else size[axis + 1 :]) for axis in range(len(size))]
    for block in windows.blocks(X[:, :, np.newaxis], 1):
        block.of(Y[:, :, np.newaxis])[...], within = _first_maxima(X, block, steps)
        planes = np.add.outer(np.arange(X.shape[0])[block.images] * X.shape[1], np.arange(X.shape[1])[block.groups])
        within += (planes * math.prod(size)).reshape(*planes.shape, *[1] * (1 + len(size)))
        block.of(indices[:, :, np.newaxis])[...] = within
    return Y, indices


@kernel("MaxPoolGrad", in_float32=True, fresh=True)
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
    _output_grids: tuple[tuple[int, ...], ...],
) -> np.ndarray:
    """DX is dY added up where the indices of MaxPool point"""
    shape = *dY.shape[:2], *_output_grids[0]
    flat = indices.reshape(-1)
    if storage_order:
        image, inside = np.divmod(flat, math.prod(shape[2:]))
        axes = np.unravel_index(inside, shape[2:], order="F")
        flat = image * math.prod(shape[2:]) + np.ravel_multi_index(axes, shape[2:])
    if flat.size and flat.min() < 0:
        raise ValueError(f"the index {flat.min()} in input 1 is not in the output of shape {list(shape)}")
    dX = np.zeros(math.prod(shape), dY.dtype)
    np.add.at(dX, flat, dY.reshape(-1))
    return dX.reshape(shape)


@kernel("MaxUnpool", fresh=True)
def max_unpool(
    X: np.ndarray,
    I: np.ndarray,  # noqa: E741
    output_shape: np.ndarray | None = None,
    *,
    kernel_shape: list[int],
    pads: Ints = None,
    strides: Ints = None,
) -> np.ndarray:
    """Zeros with the elements of X at their indices, of several at one index the last; `output_shape` adds zeros behind."""
    rank = len(kernel_shape)
    axes = zip(X.shape[2:], strides or [1] * rank, kernel_shape, strict=True)
    around = np.reshape(pads or [0] * (2 * rank), (2, rank)).sum(0)
    shape = (*X.shape[:2], *((n - 1) * s + k - p for (n, s, k), p in zip(axes, around.tolist(), strict=True)))
    if min(shape) < 0 or min(strides or (1,)) < 1:
        raise ValueError(f"kernel_shape {kernel_shape}, strides {strides} and pads {pads} give the shape {list(shape)}")
    check_shape("I", I.shape, X.shape)
    check_indices(I, math.prod(shape), "I", lowest=0)
    need((math.prod(shape) + math.prod([] if output_shape is None else output_shape.tolist())) * X.itemsize)
    flat = np.zeros(math.prod(shape), X.dtype)
    flat[I.reshape(-1)] = X.reshape(-1)
    inner = flat.reshape(shape)
    if output_shape is None:
        return inner
    whole = np.zeros(output_shape.tolist(), X.dtype)
    whole[tuple(map(slice, shape))] = inner
    return whole


@kernel("AveragePool", in_float32=True, fresh=True)
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
    Y = _pooled(np.add, X, windows)
    Y /= _counts(windows, count_include_pad, X.dtype)
    return Y


@kernel("AveragePoolGrad", in_float32=True, fresh=True)
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
    _output_grids: tuple[tuple[int, ...], ...],
) -> np.ndarray:
    """dX: each dY divided by its window's count and added to every element of the window"""
    shape = *dY.shape[:2], *_output_grids[0]
    windows = make_windows(shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    counts = _counts(windows, count_include_pad, dY.dtype)
    dX = np.zeros(shape, dY.dtype)
    for block in windows.blocks(dX[:, :, np.newaxis], 1):
        share = block.of(dY[:, :, np.newaxis]) / counts[tuple(map(slice, block.start, block.stop))]
        for axis in reversed(range(len(windows.size))):
            whole = (block.count[axis] - 1) * windows.strides[axis] + windows.extent[axis]
            spread = np.zeros((*share.shape[: 3 + axis], whole, *share.shape[4 + axis :]), dY.dtype)
            for part in _along(spread, block, axis):
                part += share
            share = spread
        block.lay(share, dX[:, :, np.newaxis])
    return dX


@kernel("LpPool", in_float32=True, fresh=True)
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
    Y = _pooled(np.add, X, windows, power=p)
    Y **= 1 / p
    return Y


@kernel("GlobalAveragePool", in_float32=True, fresh=True)
def global_average_pool(X: np.ndarray) -> np.ndarray:
    return mean(X, tuple(range(2, X.ndim)), keepdims=True)


@kernel("GlobalMaxPool", fresh=True)
def global_max_pool(X: np.ndarray) -> np.ndarray:
    return np.asarray(X.max(tuple(range(2, X.ndim)), keepdims=True))


@kernel("GlobalLpPool", in_float32=True, fresh=True)
def global_lp_pool(X: np.ndarray, *, p: int = 2) -> np.ndarray:
    """(Σ|x|^p)^(1/p) over the spatial axes."""
    return lp_pool(X, auto_pad="NOTSET", kernel_shape=list(X.shape[2:]), p=p)


def _pooled(
    merge: np.ufunc, X: np.ndarray, windows: Windows, outside: float = 0, power: float | None = None
) -> np.ndarray:
    """X (N, C, spatial...), or |X| to the power, merged over each window: (N, C, windows...)"""
    Y = np.empty((*X.shape[:2], *windows.count), X.dtype)
    for block in windows.blocks(X[:, :, np.newaxis], 1):
        x = block.seen(X[:, :, np.newaxis], outside)
        if power is not None:
            x = np.abs(x) ** power
        for axis in range(len(windows.size)):
            parts = _along(x, block, axis)
            x = next(parts)
            for number, part in enumerate(parts):
                x = merge(x, part, out=x if number else None)
        block.of(Y[:, :, np.newaxis])[...] = x
    return Y


def _first_maxima(X: np.ndarray, block: Block, steps: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the maximum of each window of `block`, and Σ coordinate·step of where it is first; −1 where no element is of X.

    It goes along the last axis first, so that the first of equal elements is the first in the order of the window.
    Arithmetic on all elements is faster than choosing some by a mask: their numbers are small.
    """
    windows = block.windows
    best = block.seen(X[:, :, np.newaxis], _lowest(X.dtype))
    chosen: list[np.ndarray] = []
    within: np.ndarray = np.zeros((1,) * best.ndim, np.int64)
    outside: np.ndarray = np.zeros((1,) * best.ndim, np.bool_)
    for axis in reversed(range(len(steps))):
        stride, hole, taps = windows.strides[axis], windows.dilations[axis], windows.kernel[axis]
        start = np.arange(block.start[axis], block.stop[axis]) * stride - windows.begin[axis]
        first = np.maximum(-(start // hole), 0)  # the first that is not in the padding
        along = (-1, *[1] * (len(steps) - 1 - axis))
        outside = outside | ((first >= taps) | (start + first * hole >= windows.size[axis])).reshape(along)
        within = within + start.reshape(along) * steps[axis]
        parts = list(_along(best, block, axis))
        earlier = [list(_along(tap, block, axis)) for tap in chosen]
        best, chosen = parts[0].copy(), [choices[0].copy() for choices in earlier]
        kind = np.min_scalar_type(taps)
        tap = np.empty(best.shape, kind)
        tap[...] = first.clip(0, taps - 1).reshape(along)
        for number, part in enumerate(parts[1:], 1):
            better = ~(part <= best)  # NaN is greater than any number,
            better &= best == best  # the first of several too
            np.maximum(best, part, out=best)
            np.maximum(tap, better.astype(kind) * kind.type(number), out=tap)
            for choice, choices in zip(chosen, earlier, strict=True):
                choice ^= (choice ^ choices[number]) * better.astype(choice.dtype)
        chosen.insert(0, tap)
    for axis, tap in enumerate(chosen):
        within = within + tap * np.int64(windows.dilations[axis] * steps[axis])
    return best, np.where(outside, -1, within) if outside.any() else within


def _along(x: np.ndarray, block: Block, axis: int) -> Iterator[np.ndarray]:
    """For each element of the kernel along a spatial axis, view what it meets there in all windows of `block`."""
    stride, hole, count = block.windows.strides[axis], block.windows.dilations[axis], block.count[axis]
    before = (slice(None),) * (3 + axis)
    for tap in range(block.windows.kernel[axis]):
        yield x[(*before, slice(tap * hole, tap * hole + (count - 1) * stride + 1, stride))]


@lru_cache(maxsize=64)
def _counts(windows: Windows, count_include_pad: int, dtype: np.dtype) -> np.ndarray:
    """How many elements each window averages over, shape `windows.count`."""
    per_axis = []
    for axis, (n, o) in enumerate(zip(windows.size, windows.count, strict=True)):
        low, high = (-windows.begin[axis], n + windows.end[axis]) if count_include_pad else (0, n)
        starts = np.arange(o) * windows.strides[axis] - windows.begin[axis]
        met = starts[:, None] + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        per_axis.append(((met >= low) & (met < high)).sum(1))
    counts = np.asarray(reduce(np.multiply.outer, per_axis), dtype)
    counts.flags.writeable = False
    return counts


def _lowest(dtype: np.dtype) -> float:
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf
