"""ONNX Runtime's poolings."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.kernels.windows import make_windows
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Ints = list[int] | None


@kernel_of_body("NhwcMaxPool", domain=MICROSOFT, fresh=True)
def nhwc_max_pool(args: Arguments) -> Array:
    """The maximum over the elements of the kernel, of what each meets in all windows"""
    windows = make_windows(
        args.x.shape[1:-1], args.kernel_shape, args.strides, args.dilations, args.pads, args.auto_pad, args.ceil_mode
    )
    lowest = np.iinfo(args.x.dtype).min
    y = np.full((len(args.x), *windows.count, args.x.shape[-1]), lowest, args.x.dtype)
    for tap in np.ndindex(*args.kernel_shape):
        places = windows.positions(tap)
        met = [np.flatnonzero((at >= 0) & (at < n)) for at, n in zip(places, windows.size, strict=True)]
        images = np.arange(len(args.x))
        of, there = np.ix_(images, *met), np.ix_(images, *(at[k] for at, k in zip(places, met, strict=True)))
        y[of] = np.maximum(y[of], args.x[there])
    return y


@kernel_of_body("MaxpoolWithMask", domain=MICROSOFT, fresh=True)
def maxpool_with_mask(args: Arguments) -> Array:
    """The maximum of each window; a row of it ends before the first element where M is 0, which the first of all is not"""
    windows = make_windows(args.X.shape[2:], args.kernel_shape, args.strides, None, args.pads, args.auto_pad)
    check_shape("M", args.M.shape, (1, 1, *args.X.shape[2:]))
    ends = args.M[0, 0] == 0
    if args.X.ndim > 3 and ends.size:
        ends[(0,) * ends.ndim] = False
    Y = np.full((*args.X.shape[:2], *windows.count), np.finfo(np.float32).min, args.X.dtype)
    for window in np.ndindex(*windows.count):
        axes = zip(window, windows.strides, windows.begin, windows.kernel, windows.size, strict=True)
        best = Y[(slice(None), slice(None), *window)]
        *others, last = (range(max(o * s - b, 0), min(o * s - b + k, n)) for o, s, b, k, n in axes)
        for row in product(*others):
            for place in last:
                if ends[(*row, place)]:
                    break
                at: tuple[Any, ...] = (..., *row, place)
                best[...] = np.maximum(best, args.X[at])
    return Y
