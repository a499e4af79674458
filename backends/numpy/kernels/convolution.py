"""Convolutions and their gradients: windows laid out as columns, block by block, and matrix products.

Symbols: N batch, G groups, C input and M output channels of a group, K elements of the kernel, I and O spatial elements in
and out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from refgrad.backends.numpy.abstract import without_data
from refgrad.backends.numpy.kernels.operands import check_shape, summed
from refgrad.backends.numpy.kernels.windows import WORKSPACE, Windows, make_windows
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Ints = list[int] | None


def _block_memory(X: Any, rows: int, windows: Windows) -> int:
    """The bytes of the columns of a block, and of its padded part of X (N, G, C, spatial...) or its rows of the result."""
    block = windows.first_block(X, rows)
    elements = math.prod(windows.kernel)
    if block is None or (elements == 1 and not block.merged and all(s == 1 for s in windows.strides)):
        return 0  # the windows see a view of X
    n, group, channels = (part.stop - part.start for part in (block.images, block.groups, block.channels))
    count = math.prod(block.count)
    padded = n * group * channels * math.prod(block.reach) if elements > 1 else 0
    product = n * count * rows * group if block.merged else 0
    return int((n * count * elements * channels * group + max(product, padded)) * X.itemsize)


def conv_memory(
    X: Any,
    W: Any,
    *_: Any,
    group: int,
    strides: Ints = None,
    dilations: Ints = None,
    pads: Ints = None,
    auto_pad: str = "NOTSET",
    **__: Any,
) -> tuple[int, int]:
    """The bytes that a convolution takes beside its result, and the elements of its result."""
    windows = make_windows(X.shape[2:], W.shape[2:], strides, dilations, pads, auto_pad)
    taken = _block_memory(_in_groups(X, group), W.shape[0] // group, windows)
    return taken, X.shape[0] * W.shape[0] * math.prod(windows.count)


@kernel("Conv", in_float32=True, fresh=True, abstract=lambda *x, **window: need(conv_memory(*x, **window)[0]))
def conv(
    X: np.ndarray,
    W: np.ndarray,
    B: np.ndarray | None = None,
    *,
    auto_pad: str,
    dilations: Ints = None,
    group: int,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> np.ndarray:
    """Y = W (G, M, C·K) · columns of X (N, G, C·K, O) + B"""
    _check(X, W, kernel_shape)
    if group < 1 or X.shape[1] != group * W.shape[1] or W.shape[0] % group:
        raise ValueError(f"X {list(X.shape)} and W {list(W.shape)} do not fit {group} groups: {_CHANNELS}")
    if B is not None:
        check_shape("B", B.shape, W.shape[:1])
    windows = make_windows(X.shape[2:], W.shape[2:], strides, dilations, pads, auto_pad)
    return _with_bias(_correlated(_in_groups(X, group), _per_group(W, group), windows), B)


_CHANNELS = "X has channels for each group of what W reads, and the groups divide what W makes"
_TRANSPOSED_CHANNELS = "X has the channels that W reads, and the groups divide them"


def _check(X: np.ndarray, W: np.ndarray, kernel_shape: Ints) -> None:
    if X.ndim < 3 or W.ndim != X.ndim:
        raise ValueError(f"X has rank {X.ndim} and W {W.ndim}; both need a batch, channels and spatial axes")
    if kernel_shape is not None:
        check_shape("W", W.shape, (*W.shape[:2], *kernel_shape))


@kernel("ConvGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def conv_grad(
    dY: np.ndarray,
    X: np.ndarray,
    W: np.ndarray,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
    _wanted: tuple[bool, ...],
) -> tuple[np.ndarray | None, ...]:
    """dX = fold(Wᵀ·dY), dW = Σ_N dY·columnsᵀ, dB = Σ_{N,O} dY"""
    windows = make_windows(X.shape[2:], W.shape[2:], strides, dilations, pads, auto_pad)
    rows = _in_groups(dY, group)
    want_dX, want_dW, want_dB = (*_wanted, False, False)[:3]
    dX = _laid_back(rows, _per_group(W, group), windows) if want_dX else None
    dW = _weight_grad(rows, _in_groups(X, group), windows).reshape(W.shape) if want_dW else None
    return dX, dW, _bias_grad(dY) if want_dB else None


def _conv_transpose_memory(
    X: np.ndarray,
    W: np.ndarray,
    *_: Any,
    group: int,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
    **__: Any,
) -> None:
    windows = _transposed(X, W, auto_pad, dilations, output_padding, output_shape, pads, strides)
    seen, kernels = _in_groups(X, group), _per_group(W, group)
    if _is_turned(seen, kernels, windows):
        need(W.nbytes + _block_memory(seen, W.shape[1], _turned(windows)))
    else:
        Y = without_data((X.shape[0], group, W.shape[1], *windows.size), X.dtype)
        need(_block_memory(Y, seen.shape[2], windows))


@kernel("ConvTranspose", in_float32=True, fresh=True, abstract=_conv_transpose_memory)
def conv_transpose(
    X: np.ndarray,
    W: np.ndarray,
    B: np.ndarray | None = None,
    *,
    auto_pad: str,
    dilations: Ints = None,
    group: int,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> np.ndarray:
    """Y = fold(Wᵀ·X) + B with W (G·C, M, k...): the adjoint of Conv with respect to its input."""
    _check(X, W, kernel_shape)
    if group < 1 or X.shape[1] != W.shape[0] or W.shape[0] % group:
        raise ValueError(f"X {list(X.shape)} and W {list(W.shape)} do not fit {group} groups: {_TRANSPOSED_CHANNELS}")
    if B is not None:
        check_shape("B", B.shape, (group * W.shape[1],))
    windows = _transposed(X, W, auto_pad, dilations, output_padding, output_shape, pads, strides)
    return _with_bias(_laid_back(_in_groups(X, group), _per_group(W, group), windows), B)


@kernel("ConvTransposeGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def conv_transpose_grad(
    dY: np.ndarray,
    X: np.ndarray,
    W: np.ndarray,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    output_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
    _wanted: tuple[bool, ...],
) -> tuple[np.ndarray | None, ...]:
    """dX = W·columns of dY, dW = Σ_N X·columnsᵀ, dB = Σ_{N,O} dY"""
    windows = _transposed(X, W, auto_pad, dilations, output_padding, output_shape, pads, strides)
    seen = _in_groups(dY, group)
    want_dX, want_dW, want_dB = (*_wanted, False, False)[:3]
    dX = _correlated(seen, _per_group(W, group), windows) if want_dX else None
    dW = _weight_grad(_in_groups(X, group), seen, windows).reshape(W.shape) if want_dW else None
    return dX, dW, _bias_grad(dY) if want_dB else None


@kernel("Col2Im", in_float32=True, fresh=True)
def col2im(
    input: np.ndarray,
    image_shape: np.ndarray,
    block_shape: np.ndarray,
    *,
    dilations: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> np.ndarray:
    """(N, C·K, O) to (N, C, image_shape...), overlapping blocks summed."""
    if input.ndim != 3:
        raise ValueError(f"the input has rank {input.ndim}; its axes are the batch, channels·block and blocks")
    windows = make_windows(image_shape.tolist(), block_shape.tolist(), strides, dilations, pads)
    elements = math.prod(windows.kernel)
    n, channels = input.shape[0], input.shape[1] // elements
    columns = input.reshape(n, channels, elements, *windows.count)
    image = np.zeros((n, channels, 1, *windows.size), input.dtype)
    for block in windows.blocks(image, elements):
        block.fold(block.rows(columns), image)
    return image.reshape(n, channels, *windows.size)


def _transposed(
    X: np.ndarray,
    W: np.ndarray,
    auto_pad: str,
    dilations: Ints,
    output_padding: Ints,
    output_shape: Ints,
    pads: Ints,
    strides: Ints,
) -> Windows:
    """Lay the windows over the output, one per input element: o = s·(i − 1) + output_padding + extent − pads."""
    size = X.shape[2:]
    rank = len(size)
    steps, holes = strides or [1] * rank, dilations or [1] * rank
    extra = output_padding or [0] * rank
    axes = zip(size, W.shape[2:], steps, holes, extra, strict=True)
    full = [s * (i - 1) + p + (k - 1) * d + 1 for i, k, s, d, p in axes]
    if output_shape is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        output_shape = [i * s for i, s in zip(size, steps, strict=True)]
    if output_shape is not None:
        target = output_shape[-rank:]
        total = [max(f - o, 0) for f, o in zip(full, target, strict=True)]
        begin = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total]
        end = [f - o - b for f, o, b in zip(full, target, begin, strict=True)]
    else:
        begin, end = (pads[:rank], pads[rank:]) if pads and auto_pad != "VALID" else ([0] * rank, [0] * rank)
        target = [f - b - e for f, b, e in zip(full, begin, end, strict=True)]
    fields = (target, W.shape[2:], steps, holes, begin, end, size)
    return Windows(*(tuple(map(int, field)) for field in fields))


def _correlated(X: np.ndarray, W: np.ndarray, windows: Windows) -> np.ndarray:
    """X (N, G, C, spatial...) and W (G, M, C·K) to Y (N, G·M, windows...)"""
    shape = (X.shape[0], *W.shape[:2], *windows.count)
    chosen = _chosen(W) if X.shape[2] == 1 and W.size else None
    if chosen is not None and np.isfinite(X).all():  # 0·∞ would be NaN
        return _copied(X, chosen, windows).reshape(shape[0], shape[1] * shape[2], *windows.count)
    Y = (np.empty if W.size else np.zeros)(shape, X.dtype)
    for block in windows.blocks(X, W.shape[1]):
        block.put(Y, W[block.groups, :, block.elements], block.columns(X))
    return Y.reshape(shape[0], shape[1] * shape[2], *windows.count)


def _chosen(W: np.ndarray) -> list[int] | None:
    """For each row of W (1, M, K) its only element that is not 0, where that is 1: the kernel of what a gradient unfolds."""
    rows = W.shape[1]
    if len(W) > 1 or np.count_nonzero(W) != rows:
        return None
    taps = W[0].argmax(1)
    return [int(tap) for tap in taps] if (W[0, np.arange(rows), taps] == 1).all() else None


def _copied(X: np.ndarray, taps: list[int], windows: Windows) -> np.ndarray:
    """X (N, 1, 1, spatial...) to (N, 1, M, windows...): what the elements `taps` of each window see, 0 outside X"""
    Y = np.zeros((X.shape[0], 1, len(taps), *windows.count), X.dtype)
    for row, tap in enumerate(taps):
        inside: list[slice] = []
        seen: list[slice] = []
        coordinates = windows.positions([int(t) for t in np.unravel_index(tap, windows.kernel)])
        for size, stride, at in zip(windows.size, windows.strides, coordinates, strict=True):
            first, last = np.searchsorted(at, (0, size)).tolist()
            inside.append(slice(first, last))
            seen.append(slice(at[first], at[last - 1] + 1, stride) if first < last else slice(0, 0))
        Y[:, 0, row][(slice(None), *inside)] = X[:, 0, 0][(slice(None), *seen)]
    return Y


def _laid_back(Y: np.ndarray, W: np.ndarray, windows: Windows) -> np.ndarray:
    """Y (N, G, M, windows...) and W (G, M, C·K) to X (N, G·C, spatial...): fold(Wᵀ·Y), the adjoint of `_correlated`.

    With strides of 1 it is a correlation with the kernel turned round, which copies columns instead of adding them up.
    That is faster where there are not many more columns and turning the kernel round costs little time and memory.
    """
    elements = math.prod(windows.kernel)
    n, (group, rows) = Y.shape[0], W.shape[:2]
    channels = W.shape[2] // elements
    if _is_turned(Y, W, windows):
        turned = W.reshape(group, rows, channels, elements)[..., ::-1].swapaxes(1, 2)
        kernels = np.ascontiguousarray(turned).reshape(group, channels, rows * elements)
        return _correlated(Y, kernels, _turned(windows))
    X = np.zeros((n, group, channels, *windows.size), Y.dtype)
    for block in windows.blocks(X, rows):
        block.fold(block.product(W[block.groups, :, block.elements].swapaxes(1, 2), block.rows(Y)), X)
    return X.reshape(n, group * channels, *windows.size)


def _is_turned(Y: np.ndarray, W: np.ndarray, windows: Windows) -> bool:
    """True if `_laid_back` turns the kernel round."""
    elements, (group, rows) = math.prod(windows.kernel), W.shape[:2]
    channels = W.shape[2] // elements
    many = Y.size > group * rows * rows and rows < 2 * channels and W.nbytes <= WORKSPACE
    return (many or elements == 1) and all(s == 1 for s in windows.strides)


def _turned(windows: Windows) -> Windows:
    """Return the windows of stride 1 over the windows, one per element of the array: those that see the element."""
    begin = tuple(x - 1 - b for x, b in zip(windows.extent, windows.begin, strict=True))
    end = tuple(n + b - o for n, b, o in zip(windows.size, windows.begin, windows.count, strict=True))
    return replace(windows, size=windows.count, begin=begin, end=end, count=windows.size)


def _weight_grad(Y: np.ndarray, X: np.ndarray, windows: Windows) -> np.ndarray:
    """Y (N, G, M, windows...) and X (N, G, C, spatial...) to W (G, M, C·K): Σ_N Y·columnsᵀ"""
    shape = (*Y.shape[1:3], X.shape[2] * math.prod(windows.kernel))
    W = (np.empty if Y.size else np.zeros)(shape, Y.dtype)
    for block in windows.blocks(X, Y.shape[2]):
        target, is_first = W[block.groups, :, block.elements], block.is_first
        for rows, columns in zip(block.rows(Y), block.columns(X).swapaxes(2, 3), strict=True):
            if is_first:
                np.matmul(rows, columns, out=target)
            else:
                target += np.matmul(rows, columns)
            is_first = False
        del rows, columns  # before the next block's
    return W


def _per_group(W: np.ndarray, group: int) -> np.ndarray:
    """(G·M, C, k...) to (G, M, C·K)"""
    return W.reshape(group, W.shape[0] // group, math.prod(W.shape[1:]))


def _in_groups(X: np.ndarray, group: int) -> np.ndarray:
    """(N, G·C, spatial...) to (N, G, C, spatial...)"""
    return X.reshape(X.shape[0], group, X.shape[1] // group, *X.shape[2:])


def _with_bias(Y: np.ndarray, B: np.ndarray | None) -> np.ndarray:
    if B is not None:
        Y += B.reshape(-1, *[1] * (Y.ndim - 2))
    return Y


def _bias_grad(dY: np.ndarray) -> np.ndarray:
    return summed(dY, (0, *range(2, dY.ndim)))
