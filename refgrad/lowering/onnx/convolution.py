"""The adjoints of Conv."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from refgrad.formulas.convolution import spatial_rank
from refgrad.formulas.windows import SymbolicWindows, lay, make_windows, pad_at_run_time, spatial, typed
from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import lowering

Ints = Sequence[int] | None
_FEW_WINDOWS = 64
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
    M, C, *k = shape
    rows = op.Transpose(dY, perm=_swap(rank))
    rows = op.Reshape(rows, [M, -1] if group == 1 else [group, M // group, -1])
    dX = _columns_laid(op, rows, dY, X, W, (M, C, *k), windows, group)
    if math.prod(k) ** 2 > _MOST_UNITS:
        dW = _correlation(op, dY, X, W, kernel, windows, group)
    else:
        dW = _product(op, rows, X, (M, C, *k), windows, group)
    return lay(op, dY, W, X, windows, group) if dX is None else dX, dW, d_B


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


def _columns_laid(
    op: Emitter, rows: str, dY: str, X: str, W: str, shape: tuple[int, ...], windows: SymbolicWindows, group: int
) -> str | None:
    """dX by one product for all windows and Col2Im: faster than ConvTranspose where an image has few of them.

    Two spatial axes only: ONNX Runtime's Col2Im is wrong for one and for three with dilations or pads.
    """
    size, count = spatial(op, X), spatial(op, dY)
    few = count is not None and math.prod(count) < _FEW_WINDOWS
    if not few or size is None or windows.rank != 2 or op.opset < 18 or isinstance(windows.begin, str):
        return None
    M, C, *k = shape
    columns = C * math.prod(k)
    if group == 1:
        laid = op.Gemm(op.Reshape(W, [M, columns]), rows, transA=1)
    else:
        laid = op.MatMul(op.Transpose(op.Reshape(W, [group, M // group, columns]), perm=[0, 2, 1]), rows)
    laid = op.Transpose(op.Reshape(laid, [group * columns, -1, math.prod(count or ())]), perm=[1, 0, 2])
    return op.Col2Im(laid, size, k, dilations=windows.dilations, pads=windows.pads, strides=windows.strides)


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
