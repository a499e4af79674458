"""The gradients of poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import add_at
from refgrad.formulas.pooling import over_windows
from refgrad.formulas.windows import SymbolicWindows, make_windows, ones, pad_at_run_time, spatial, typed
from refgrad.tables.registry import lowering

_MOST_WINDOWS = 2**22
Ints = Sequence[int] | None


@lowering("MaxPoolGrad")
def max_pool_grad(
    op: Emitter,
    dY: str,
    X: str,
    Indices: str,
    auto_pad: str | None,
    ceil_mode: int,
    dilations: Ints,
    kernel_shape: Sequence[int],
    pads: Ints,
    strides: Ints,
    storage_order: int,
) -> str:
    """The indices count the elements of the whole tensor; with storage_order the spatial axes in reversed order."""
    size = op.static(X)
    elements = op.const([math.prod(size)]) if size is not None else op.Reshape(op.Size(X), [1])
    flat = add_at(op, op.Reshape(dY, [-1]), elements, op.Reshape(Indices, [-1]), axis=0)
    if not storage_order:
        return op.reshape_like(flat, X)
    axes = [0, 1, *reversed(range(2, 2 + len(kernel_shape)))]
    shape = op.const([size[axis] for axis in axes]) if size is not None else op.Gather(op.Shape(X), axes)
    return op.Transpose(op.Reshape(flat, shape, allowzero=1), perm=axes)


@lowering("AveragePoolGrad")
def average_pool_grad(
    op: Emitter,
    dY: str,
    X: str,
    auto_pad: str | None,
    ceil_mode: int,
    dilations: Ints,
    kernel_shape: Sequence[int],
    pads: Ints,
    strides: Ints,
    count_include_pad: int,
) -> str:
    """Divide dY by the size of its window, then lay it over the elements of the window."""
    rank = len(kernel_shape)
    ceil_mode = 0 if auto_pad in ("SAME_UPPER", "SAME_LOWER") else ceil_mode  # every window lies within those pads
    windows = make_windows(op, X, dY, kernel_shape, strides, dilations, pads, auto_pad, rank, ceil_mode)
    size, count = spatial(op, X), windows.count
    whole = not ceil_mode and (
        count_include_pad or (windows.pads == [0] * (2 * rank) and isinstance(windows.begin, list))
    )
    if whole:
        dY = op.Div(dY, float(math.prod(kernel_shape)))
    elif size is not None and count is not None and _is_small(count, kernel_shape):
        dY = op.Div(dY, typed(op, _counts(windows, size, count, kernel_shape, count_include_pad), like=dY))
    else:
        dY = op.Div(dY, _counts_at_run_time(op, X, dY, windows, kernel_shape, count_include_pad))
    return over_windows(op, dY, X, kernel_shape, windows)


def _is_small(count: Sequence[int], kernel: Sequence[int]) -> bool:
    """True if the numbers of elements in windows are few enough for a constant of the gradient."""
    return math.prod(count) <= _MOST_WINDOWS and all(o * k <= _MOST_WINDOWS for o, k in zip(count, kernel, strict=True))


def _counts(
    windows: SymbolicWindows, size: Sequence[int], count: Sequence[int], kernel: Sequence[int], count_include_pad: int
) -> np.ndarray:
    """How many elements each window averages, shape (O...): ceil_mode may let a window reach beyond the pads."""
    per_axis = []
    for axis, (n, o, k) in enumerate(zip(size, count, kernel, strict=True)):
        begin, end = windows.pads[axis], windows.pads[axis + windows.rank]
        low, high = (-begin, n + end) if count_include_pad else (0, n)
        starts = np.arange(o) * windows.strides[axis] - begin
        met = starts[:, None] + np.arange(k) * windows.dilations[axis]
        per_axis.append(((met >= low) & (met < high)).sum(1))
    return reduce(np.multiply.outer, per_axis)


def _counts_at_run_time(
    op: Emitter, X: str, dY: str, windows: SymbolicWindows, kernel: Sequence[int], count_include_pad: int
) -> str:
    """The windows over ones, added up: a Conv over as much padding as a window of ceil_mode may need."""
    rank = windows.rank
    inside = op.full(op.Concat([1, 1], op.Shape(X, start=2), axis=0), 1.0, like=dY)
    pads, beyond = windows.pads, [s - 1 for s in windows.strides]
    if count_include_pad and any(pads):
        inside = op.Pad(inside, [0, 0, *pads[:rank], 0, 0, *pads[rank:]], op.const(1.0, like=dY))
        pads = [0] * (2 * rank)
    inside = pad_at_run_time(op, inside, windows)
    counts = op.Conv(
        inside,
        ones(op, kernel, like=dY),
        strides=windows.strides,
        dilations=windows.dilations,
        pads=pads[:rank] + [e + b for e, b in zip(pads[rank:], beyond, strict=True)],
    )
    return op.Slice(counts, [0] * rank, op.Shape(dY, start=2), list(range(2, rank + 2)))


@lowering("GlobalAveragePoolGrad")
def global_average_pool_grad(op: Emitter, dY: str, X: str, Y: str) -> str:
    """By a factor: the number of elements may be beyond float16."""
    size = spatial(op, X)
    factor = op.share(X, dY, like=dY) if size is None else 1 / max(math.prod(size), 1)
    return op.Expand(op.Mul(dY, factor), op.shape_of(X))
