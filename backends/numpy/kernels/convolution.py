"""Convolutions and their gradients: strided windows laid out as columns, then one matrix product per group.

Symbols: N batch, G groups, C input and M output channels, K elements of the kernel, I and O spatial elements in and out.
"""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels.windows import Windows, make_windows
from refgrad.backends.numpy.registry import MICROSOFT, kernel

Ints = list[int] | None


@kernel("Conv", in_float32=True)
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
    """Y = W (G, M/G, C/G·K) · columns of X (N, G, C/G·K, O) + B"""
    windows = make_windows(X.shape[2:], W.shape[2:], strides, dilations, pads, auto_pad)
    columns = windows.columns(X, group)
    Y = (_per_group(W, group) @ columns).reshape(X.shape[0], W.shape[0], *windows.count)
    return Y if B is None else _add_bias(Y, B)


@kernel("ConvGrad", domain=MICROSOFT, in_float32=True)
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
    dX = dW = None
    if want_dX:
        dX = windows.fold(_per_group(W, group).swapaxes(1, 2) @ rows, X.shape[1])
    if want_dW:
        dW = (rows @ windows.columns(X, group).swapaxes(2, 3)).sum(0).reshape(W.shape)
    return dX, dW, _bias_grad(dY) if want_dB else None


@kernel("ConvTranspose", in_float32=True)
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
    """Y = fold(Wᵀ·X) + B with W (C, M/G, k...): the adjoint of Conv with respect to its input."""
    windows = _transposed(X, W, auto_pad, dilations, output_padding, output_shape, pads, strides)
    Y = windows.fold(_per_group(W, group).swapaxes(1, 2) @ _in_groups(X, group), W.shape[1] * group)
    return Y if B is None else _add_bias(Y, B)


@kernel("ConvTransposeGrad", domain=MICROSOFT, in_float32=True)
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
    columns = windows.columns(dY, group)
    want_dX, want_dW, want_dB = (*_wanted, False, False)[:3]
    dX = (_per_group(W, group) @ columns).reshape(X.shape) if want_dX else None
    dW = None
    if want_dW:
        dW = (_in_groups(X, group) @ columns.swapaxes(2, 3)).sum(0).reshape(W.shape)
    return dX, dW, _bias_grad(dY) if want_dB else None


@kernel("Col2Im", in_float32=True)
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
    windows = make_windows(image_shape.tolist(), block_shape.tolist(), strides, dilations, pads)
    channels = input.shape[1] // math.prod(windows.kernel)
    return windows.fold(input[:, np.newaxis], channels)


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


def _per_group(W: np.ndarray, group: int) -> np.ndarray:
    """(M, C/G, k...) to (G, M/G, C/G·K)"""
    return W.reshape(group, W.shape[0] // group, math.prod(W.shape[1:]))


def _in_groups(X: np.ndarray, group: int) -> np.ndarray:
    """(N, C, spatial...) to (N, G, C/G, elements)"""
    return X.reshape(X.shape[0], group, X.shape[1] // group, math.prod(X.shape[2:]))


def _add_bias(Y: np.ndarray, B: np.ndarray) -> np.ndarray:
    Y += B.reshape(-1, *[1] * (Y.ndim - 2))
    return Y


def _bias_grad(dY: np.ndarray) -> np.ndarray:
    return np.asarray(dY.sum((0, *range(2, dY.ndim))))
