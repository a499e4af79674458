"""The gradients of Conv."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refgrad.builder.op import Emitter
from refgrad.formulas.convolution import spatial_rank
from refgrad.formulas.indexing import END
from refgrad.formulas.windows import SymbolicWindows, lay, make_windows, pad_at_run_time, spatial, typed
from refgrad.tables.registry import lowering

Ints = Sequence[int] | None
_FEW_WINDOWS = 64
_LARGE_IMAGE = 2048  # windows of an image from which a product for each is faster than one over all
_LARGE_KERNEL = 25  # elements from which a Conv with the kernel turned round is faster than ConvTranspose
_MOST_UNITS = 2**22  # elements of the unit kernels, which are a constant of the gradient


@lowering("ConvGrad")
def conv_grad(
    op: Emitter,
    dY: str,
    X: str,
    W: str,
    auto_pad: str | None,
    dilations: Ints,
    group: int,
    kernel_shape: Ints,
    pads: Ints,
    strides: Ints,
) -> tuple[str, str, str]:
    """dX is dY laid back through W, dW one product over all windows of X, dB = Σ dY.

    Which products and convolutions say so was chosen by their time on ONNX Runtime's CPU.
    """
    rank = spatial_rank(op, (X, W, dY), kernel_shape, strides, dilations, pads)
    shape = op.static(W)
    kernel = kernel_shape or spatial(op, W) or W
    windows = make_windows(op, X, dY, kernel, strides, dilations, pads, auto_pad, rank)
    d_B = op.ReduceSum(dY, [0, *range(2, rank + 2)], keepdims=0)
    if 0 in (windows.count or ()):  # the window is larger than the image
        return op.zeros_like(X), op.zeros_like(W), d_B
    if shape is None:
        return lay(op, dY, W, X, windows, group), _correlation(op, dY, X, W, kernel, windows, group), d_B
    dX = _turned(op, dY, W, shape, windows, group)
    dW = (
        _products_by_image(op, dY, X, shape, windows, group)
        if _has_large_images(op, X, dY, shape, windows, group)
        else None
    )
    M, _, *k = shape
    rows = op.Transpose(dY, perm=_swap(rank))
    if dX is None:
        dX = _laid_at_once(op, rows, W, X, dY, windows, group) or lay(op, dY, W, X, windows, group)
    if math.prod(k) ** 2 > _MOST_UNITS:
        dW = _correlation(op, dY, X, W, kernel, windows, group)
    elif dW is None:
        rows = op.Reshape(rows, [M, -1] if group == 1 else [group, M // group, -1])
        dW = _product(op, rows, X, shape, windows, group)
    return dX, dW, d_B


def _turned(op: Emitter, dY: str, W: str, shape: tuple[int, ...], windows: SymbolicWindows, group: int) -> str | None:
    """dX as a Conv of dY with W turned round, its channels and maps exchanged, where neighbouring windows are one apart.

    It is faster than ConvTranspose in groups, for one element and for many, and None elsewhere: what is gained for 3×3 is
    lost by turning W.
    """
    M, C, *k = shape
    size = math.prod(k)
    reach = [d * (n - 1) for d, n in zip(windows.dilations, k, strict=True)] * 2
    pads = [r - p for r, p in zip(reach, windows.pads, strict=True)]
    is_faster = group > 1 or size == 1 or size >= _LARGE_KERNEL
    if not is_faster or isinstance(windows.begin, str) or any(s > 1 for s in windows.strides) or min(pads) < 0:
        return None
    if size > 1:
        back, axes = [-1] * len(k), list(range(2, len(k) + 2))
        W = op.Slice(W, back, [-END] * len(k), axes, back)
    if group == M and C == 1:
        pass
    elif group == 1:
        W = op.Transpose(W, perm=_swap(len(k)))
    else:
        W = op.Transpose(op.Reshape(W, [group, M // group, C, *k]), perm=[0, 2, 1, *range(3, len(k) + 3)])
        W = op.Reshape(W, [group * C, M // group, *k])
    return op.Conv(dY, W, group=group if group != 1 else None, dilations=windows.dilations, pads=pads)


def _has_large_images(
    op: Emitter, X: str, dY: str, shape: tuple[int, ...], windows: SymbolicWindows, group: int
) -> bool:
    """True if the weight's gradient is summed image by image faster than as one product over all of them."""
    M, C, *k = shape
    count, size = spatial(op, dY), spatial(op, X)
    if count is None or size is None or 0 in (*count, *size) or isinstance(windows.begin, str):
        return False
    if math.prod(k) == 1 or math.prod(k) ** 2 > _MOST_UNITS:
        return False
    return (group == M and C == 1) or (group == 1 and (len(k) > 2 or math.prod(count) >= _LARGE_IMAGE))


def _products_by_image(
    op: Emitter, dY: str, X: str, shape: tuple[int, ...], windows: SymbolicWindows, group: int
) -> str:
    """dW as the sum of a product for each image, of one channel each where every channel is a group of its own.

    Along the first axes dY is taken apart and along the others X, which makes k + m values of one where windows of X alone
    would make k·m. With l·d − begin = s·a + r, 0 ≤ r < s, the element l of the kernel stood on row s·i + r of X for row
    i − a of dY:

    dW[l, m] = Σ_{i, o} dY[i − a, o] · X[s·i + r, s·o + m·d − begin]
    """
    M, C, *k = shape
    rank, channels = len(k), group * C
    axes = _axes_apart(op, dY, X, shape, windows, group)
    first, count = len(axes), spatial(op, dY) or []
    zeros, ones = [0] * (rank - first), [1] * (rank - first)
    shifts, phases = [len(axis.shifts) for axis in axes], windows.strides[:first]
    by_dY, by_X = math.prod(shifts), math.prod(phases + k[first:])
    common = math.prod([axis.count for axis in axes] + count[first:])
    # Turned, since row i − a lies the further in front the larger a is.
    begin, end = [axis.shifts[-1] for axis in axes], [axis.end for axis in axes]
    steps = [axis.shifts.step for axis in axes] + ones
    dY = _taken_apart(op, dY, shifts + ones, steps, [1] * rank, begin + zeros + end + zeros, turned=True)
    begin, end = [0] * first + windows.pads[first:rank], [axis.beyond for axis in axes] + windows.pads[rank + first :]
    X = _taken_apart(op, X, phases + k[first:], [1] * first + windows.dilations[first:], windows.strides, begin + end)
    if group > 1:  # rows of what X is taken apart into by columns of dY's
        lines = op.Reshape(X, [-1, 1, by_X, common])
        parts = op.Reshape(op.MatMul(lines, op.Reshape(dY, [-1, by_dY, common, 1])), [-1, channels * by_dY * by_X])
        dW = op.ReduceSum(parts, [0], keepdims=0)
    else:
        columns = op.Transpose(op.Reshape(X, [-1, channels * by_X, common]), perm=[0, 2, 1])
        dW = op.ReduceSum(op.MatMul(op.Reshape(dY, [-1, M * by_dY, common]), columns), [0], keepdims=0)
        if by_dY > 1:
            dW = op.Transpose(op.Reshape(dW, [M, by_dY, C, by_X]), perm=[0, 2, 1, 3])
    if any(s > 1 for s in phases):
        dW = op.Gather(op.Reshape(dW, [M, C, by_dY * by_X]), _places(axes, phases, k), axis=2)
    return op.Reshape(dW, [M, C, *k])


@dataclass(frozen=True)
class _Apart:
    """An axis along which dY is taken apart: the row i − a of dY goes with the rows s·i + r of X for every shift a.

    `count` are the rows i, which end `beyond` rows after X; `end` are those after the last one of dY for the smallest shift.
    `at` has the shift's number and r for each element of the kernel.
    """

    shifts: range
    count: int
    beyond: int
    end: int
    at: list[tuple[int, int]]


def _axes_apart(
    op: Emitter, dY: str, X: str, shape: tuple[int, ...], windows: SymbolicWindows, group: int
) -> list[_Apart]:
    """The first axes along which dY, not X, is taken apart so that it makes the fewest values.

    They end where a window of dY would need rows taken away, or where strides and dilations leave its shifts unevenly apart.
    """
    M, C, *k = shape
    size, count, strides = spatial(op, X) or [], spatial(op, dY) or [], windows.strides
    fewest, best, axes = group * C * math.prod(k) * math.prod(count), 0, list[_Apart]()
    for axis, (s, d) in enumerate(zip(strides[:-1], windows.dilations, strict=False)):
        places = [divmod(n * d - windows.pads[axis], s) for n in range(k[axis])]
        step = d if s == 1 else 1
        shifts = range(places[0][0], places[-1][0] + 1, step)
        lines = -(-size[axis] // s)
        end = lines - count[axis] - shifts[0]
        if shifts[-1] < 0 or end < 0 or (s > 1 and d > 1):
            break
        axes.append(_Apart(shifts, lines, lines * s - size[axis], end, [(shifts.index(a), r) for a, r in places]))
        of_dY = M * math.prod(len(one.shifts) for one in axes)
        of_X = group * C * math.prod(strides[: axis + 1] + k[axis + 1 :])
        values = (of_dY + of_X) * math.prod([one.count for one in axes] + count[axis + 1 :])
        if values < fewest:
            fewest, best = values, len(axes)
    return axes[:best]


def _places(axes: list[_Apart], phases: list[int], k: list[int]) -> np.ndarray:
    """The place of each element of the kernel among the products of shifts by phases and the elements of the other axes."""
    sizes = [*(len(axis.shifts) for axis in axes), *phases, *k[len(axes) :]]
    shifts, remainders = (np.ix_(*([pair[part] for pair in axis.at] for axis in axes)) for part in (0, 1))
    return np.ravel(np.arange(math.prod(sizes)).reshape(sizes)[(*shifts, *remainders)])


def _taken_apart(
    op: Emitter,
    X: str,
    kernel: list[int],
    dilations: list[int],
    strides: list[int],
    pads: list[int],
    turned: bool = False,
) -> str:
    """The windows of each map of X, (N, C, I…) to (N·C, k, [1,] O…), by a Conv with the unit kernels.

    Images have an axis of size 1 in front: it keeps ONNX Runtime from a layout in which nine maps are sixteen.
    """
    rank = len(kernel)
    if math.prod(kernel) == 1 and not any(pads) and strides == [1] * rank:
        return X
    more = 1 if rank == 2 else 0
    units = np.eye(math.prod(kernel))[:: -1 if turned else 1]
    return op.Conv(
        op.Reshape(X, [-1, 1, *[1] * more, *(spatial(op, X) or ())]),
        typed(op, units.reshape(-1, 1, *[1] * more, *kernel), X),
        dilations=[1] * more + list(dilations),
        kernel_shape=[1] * more + kernel,
        pads=[0] * more + pads[:rank] + [0] * more + pads[rank:],
        strides=[1] * more + strides,
    )


def _swap(rank: int) -> list[int]:
    return [1, 0, *range(2, rank + 2)]


def _product(op: Emitter, rows: str, X: str, shape: tuple[int, ...], windows: SymbolicWindows, group: int) -> str:
    """dW[m, (c, k)] = Σ_{n, o} dY[m, (n, o)] · X[(c, k), (n, o)], X taken apart into windows by a Conv with the unit kernels.

    The batch lies on a spatial axis of that Conv, so that all images are one product.
    """
    M, C, *k = shape
    X = op.Transpose(pad_at_run_time(op, X, windows), perm=_swap(windows.rank))
    if math.prod(k) > 1 or any(windows.pads) or any(s > 1 for s in windows.strides):
        units = np.eye(math.prod(k)).reshape(-1, 1, 1, *k)
        begin, end = windows.pads[: windows.rank], windows.pads[windows.rank :]
        X = op.Conv(
            op.Unsqueeze(X, [1]),
            typed(op, units, X),
            dilations=[1, *windows.dilations],
            kernel_shape=[1, *k],
            pads=[0, *begin, 0, *end],
            strides=[1, *windows.strides],
        )
    columns = C * math.prod(k)
    if group == 1:
        dW = op.Gemm(rows, op.Reshape(X, [columns, -1]), transB=1)
    else:
        dW = op.MatMul(rows, op.Transpose(op.Reshape(X, [group, columns, -1]), perm=[0, 2, 1]))
    return op.Reshape(dW, [M, C, *k])


def _laid_at_once(op: Emitter, rows: str, W: str, X: str, dY: str, windows: SymbolicWindows, group: int) -> str | None:
    """dX by one ConvTranspose for all images, which lie along a spatial axis: faster where an image has few windows.

    Each image alone would read all of W. Of four spatial axes ONNX Runtime has no such operator on a GPU.
    """
    count, images = spatial(op, dY), (op.shape(dY) or (None,))[0]
    if count is None or math.prod(count) >= _FEW_WINDOWS or images == 1 or windows.rank > 2 or windows.rest is None:
        return None
    begin, end = windows.pads[: windows.rank], windows.pads[windows.rank :]
    beside = SymbolicWindows(
        [1, *windows.strides], [1, *windows.dilations], [0, *begin], [0, *end], None, [0, *windows.rest]
    )
    laid = lay(op, op.Unsqueeze(rows, [0]), op.Unsqueeze(W, [2]), X, beside, group)
    return op.Transpose(op.Squeeze(laid, [0]), perm=_swap(windows.rank))


def _correlation(
    op: Emitter, dY: str, X: str, W: str, kernel: Sequence[int] | str, windows: SymbolicWindows, group: int
) -> str:
    """dW[m, c, k] = Σ_{n, o} dY[n, m, o] · X[n, c, s·o + d·k]: a Conv over (C/G, G·N, I) with the kernel (M, N, O).

    In it strides and dilations have changed places. The end of X that no window reached would give more than k elements.
    """
    swap = _swap(windows.rank)
    X = pad_at_run_time(op, X, windows)
    pads, rest = windows.pads, windows.rest
    if rest is None:
        beyond = [s - 1 for s in windows.strides]
    else:
        cut = [min(max(r, 0), e) for r, e in zip(rest, pads[windows.rank :], strict=True)]
        beyond = [r - c for r, c in zip(rest, cut, strict=True)]
        pads = [p - c for p, c in zip(pads, [0] * windows.rank + cut, strict=True)]
    dW = op.Conv(
        op.Transpose(X, perm=swap) if group == 1 else _folded(op, X, W, windows.rank, group),
        op.Transpose(dY, perm=swap),
        group=group if group != 1 else None,
        strides=windows.dilations,
        dilations=windows.strides,
        pads=pads,
    )
    if any(b >= d for b, d in zip(beyond, windows.dilations, strict=True)):
        ends = op.Shape(W, start=2) if isinstance(kernel, str) else list(kernel)
        dW = op.Slice(dW, [0] * windows.rank, ends, list(range(2, windows.rank + 2)))
    return op.Transpose(dW, perm=swap)


def _folded(op: Emitter, X: str, W: str, rank: int, group: int) -> str:
    """(N, G·C/G, I...) to (C/G, G·N, I...)"""
    shape, size = op.shape(W), spatial(op, X)
    channels = shape[1] if shape is not None else None
    if size is None or not isinstance(channels, int):
        images, per_group, tail = op.Shape(X, end=1), op.Shape(W, start=1, end=2), op.Shape(X, start=2)
        apart = op.Concat(images, [group], per_group, tail, axis=0)
        together = op.Concat(per_group, op.Mul(images, [group]), tail, axis=0)
        empty = 1  # a size of 0 is one, and not that of X
    else:
        apart, together, empty = op.const([0, group, channels, *size]), op.const([0, -1, *size]), None
    exchanged = op.Transpose(op.Reshape(X, apart, allowzero=empty), perm=[2, 1, 0, *range(3, rank + 3)])
    return op.Reshape(exchanged, together, allowzero=empty)
