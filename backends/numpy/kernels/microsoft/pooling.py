"""ONNX Runtime's poolings."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.kernels.windows import make_windows
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Ints = list[int] | None


@kernel("NhwcMaxPool", domain=MICROSOFT, fresh=True)
def nhwc_max_pool(
    x: Array,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints = None,
    kernel_shape: list[int],
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    """The maximum over the elements of the kernel, of what each meets in all windows"""
    windows = make_windows(x.shape[1:-1], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    lowest = np.iinfo(x.dtype).min
    y = np.full((len(x), *windows.count, x.shape[-1]), lowest, x.dtype)
    for tap in np.ndindex(*kernel_shape):
        places = windows.positions(tap)
        met = [np.flatnonzero((at >= 0) & (at < n)) for at, n in zip(places, windows.size, strict=True)]
        images = np.arange(len(x))
        of, there = np.ix_(images, *met), np.ix_(images, *(at[k] for at, k in zip(places, met, strict=True)))
        y[of] = np.maximum(y[of], x[there])
    return y


@kernel("MaxpoolWithMask", domain=MICROSOFT, fresh=True)
def maxpool_with_mask(
    X: Array,
    M: Array,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Ints = None,
    pads: Ints = None,
    storage_order: int = 0,
    strides: Ints = None,
) -> Array:
    """The maximum of each window; a row of it ends before the first element where M is 0, which the first of all is not"""
    if kernel_shape is None:
        raise ValueError("kernel_shape is needed")
    windows = make_windows(X.shape[2:], kernel_shape, strides, None, pads, auto_pad)
    check_shape("M", M.shape, (1, 1, *X.shape[2:]))
    ends = M[0, 0] == 0
    if X.ndim > 3 and ends.size:
        ends[(0,) * ends.ndim] = False
    Y = np.full((*X.shape[:2], *windows.count), np.finfo(np.float32).min, X.dtype)
    for window in np.ndindex(*windows.count):
        axes = zip(window, windows.strides, windows.begin, windows.kernel, windows.size, strict=True)
        best = Y[(slice(None), slice(None), *window)]
        *others, last = (range(max(o * s - b, 0), min(o * s - b + k, n)) for o, s, b, k, n in axes)
        for row in product(*others):
            for place in last:
                if ends[(*row, place)]:
                    break
                at: tuple[Any, ...] = (..., *row, place)
                best[...] = np.maximum(best, X[at])
    return Y
