"""The windows that convolutions and poolings slide over the spatial axes, and how they are laid back.

Symbols, per spatial axis: I elements in, O windows, k elements of a window, s stride, d dilation, extent (k − 1)·d + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import helper

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import WRITTEN_OUT

Ints = list[int]


@dataclass(frozen=True)
class SymbolicWindows:
    """A list holds a number per spatial axis.

    `begin` and `end`, the pads, are names where only the run tells them. `count` is O, where it is known. `rest` is what
    the last window leaves of the padded input, I + begin + end − extent − s·(O − 1): from 0 to s − 1, below 0 where
    ceil_mode added a window; None where only the run tells it.
    """

    strides: Ints
    dilations: Ints
    begin: Ints | str
    end: Ints | str
    count: Ints | None
    rest: Ints | None

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.strides)

    @property
    def pads(self) -> Ints:
        """The pads as operators take them; zeros where only the run tells them."""
        if isinstance(self.begin, str) or isinstance(self.end, str):
            return [0] * (2 * self.rank)
        return self.begin + self.end


def make_windows(
    op: Emitter,
    X: str,
    Y: str,
    kernel: Sequence[int] | str,
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    auto_pad: str | None,
    rank: int,
    ceil_mode: int = 0,
) -> SymbolicWindows:
    """The windows over `X` that gave `Y`. `kernel` is the size of a window, or the run-time weight whose shape has it."""
    s, d = list(strides or [1] * rank), list(dilations or [1] * rank)
    size, count = spatial(op, X), spatial(op, Y)
    extent = None if isinstance(kernel, str) else [(k - 1) * h + 1 for k, h in zip(kernel, d, strict=True)]
    begin: Ints | str = [0] * rank
    end: Ints | str = [0] * rank
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        if extent is not None and s == [1] * rank:
            begin, end = _halves([x - 1 for x in extent], auto_pad)
        elif extent is not None and size is not None:
            count = [-(-n // t) for n, t in zip(size, s, strict=True)]
            total = [max((o - 1) * t + x - n, 0) for o, t, x, n in zip(count, s, extent, size, strict=True)]
            begin, end = _halves(total, auto_pad)
        else:
            begin, end = _same_at_run_time(op, X, Y, kernel, s, d, auto_pad)
    elif auto_pad != "VALID" and pads:
        begin, end = list(pads[:rank]), list(pads[rank:])
    if ceil_mode and size is not None and extent is not None and isinstance(begin, list) and isinstance(end, list):
        count = _rounded_up(size, begin, end, extent, s)
    rest = None
    if isinstance(begin, list) and isinstance(end, list) and extent is not None:
        if size is not None and count is not None:
            axes = zip(size, begin, end, extent, s, count, strict=True)
            rest = [n + b + e - x - t * (o - 1) for n, b, e, x, t, o in axes]
        elif s == [1] * rank and not ceil_mode:
            rest = [0] * rank
    return SymbolicWindows(s, d, begin, end, count, rest)


def _rounded_up(size: Ints, begin: Ints, end: Ints, extent: Ints, strides: Ints) -> Ints:
    """O with ceil_mode: no window starts in the pads at the end. (onnx infers this from opset 22 on only.)"""
    axes = zip(size, begin, end, extent, strides, strict=True)
    count = [-(-(n + b + e - x) // s) + 1 for n, b, e, x, s in axes]
    return [o - (s * (o - 1) >= n + b) for o, s, n, b in zip(count, strides, size, begin, strict=True)]


def spatial(op: Emitter, value: str) -> Ints | None:
    """The sizes of the axes after batch and channel where all of them are known."""
    shape = op.shape(value)
    if shape is None or not all(isinstance(n, int) for n in shape[2:]):
        return None
    return [n for n in shape[2:] if isinstance(n, int)]


def lay(op: Emitter, dY: str, W: str, X: str, windows: SymbolicWindows, group: int = 1) -> str:
    """Every window's element of `dY` times the kernel `W`, added where the window lies, in the spatial sizes of `X`."""
    rest, pads = windows.rest, windows.pads
    extra = [s - 1 for s in windows.strides]
    if rest is not None:
        extra = [max(r, 0) for r in rest]
        beyond = [0] * windows.rank + [max(-r, 0) for r in rest]
        pads = [p + b for p, b in zip(pads, beyond, strict=True)]
    elif not isinstance(windows.begin, str):
        pads = windows.begin + [0] * windows.rank
    laid = op.ConvTranspose(
        dY,
        W,
        group=group if group != 1 else None,
        strides=windows.strides,
        dilations=windows.dilations,
        pads=pads,
        output_padding=extra if any(extra) else None,
    )
    if rest is not None:
        return laid
    axes = list(range(2, 2 + windows.rank))
    size = op.Shape(X, start=2)
    if isinstance(windows.begin, str):
        return op.Slice(laid, windows.begin, op.Add(windows.begin, size), axes)
    return op.Slice(laid, [0] * windows.rank, size, axes)


def pad_at_run_time(op: Emitter, X: str, windows: SymbolicWindows) -> str:
    """`X` with the pads that no attribute can hold, because only the run tells them."""
    if not isinstance(windows.begin, str):
        return X
    return op.Pad(X, op.Concat([0, 0], windows.begin, [0, 0], windows.end, axis=0))


def _halves(total: Ints, auto_pad: str) -> tuple[Ints, Ints]:
    """SAME_UPPER puts the odd element at the end, SAME_LOWER at the beginning."""
    half = [t // 2 for t in total]
    other = [t - h for t, h in zip(total, half, strict=True)]
    return (half, other) if auto_pad == "SAME_UPPER" else (other, half)


def _same_at_run_time(
    op: Emitter, X: str, Y: str, kernel: Sequence[int] | str, strides: Ints, dilations: Ints, auto_pad: str
) -> tuple[str, str]:
    """total = max(s·(O − 1) + extent − I, 0)"""
    if isinstance(kernel, str):
        extent = op.Add(op.Mul(op.Sub(op.Shape(kernel, start=2), [1]), dilations), [1])
    else:
        extent = op.const([(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)])
    reach = op.Add(op.Mul(op.Sub(op.Shape(Y, start=2), [1]), strides), extent)
    total = op.Max(op.Sub(reach, op.Shape(X, start=2)), [0])
    half = op.Div(total, [2])
    other = op.Sub(total, half)
    return (half, other) if auto_pad == "SAME_UPPER" else (other, half)


def ones(op: Emitter, kernel: Sequence[int], like: str) -> str:
    """A kernel of one channel that adds up its window."""
    if math.prod(kernel) > WRITTEN_OUT:
        return op.full([1, 1, *kernel], 1.0, like=like)
    return typed(op, np.ones((1, 1, *kernel)), like)


def typed(op: Emitter, array: np.ndarray, like: str) -> str:
    """A constant array of the type of `like`."""
    return op.const(array.astype(helper.tensor_dtype_to_np_dtype(op.type(like))))
