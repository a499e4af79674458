"""ONNX Runtime's convolutions: with an activation, in another layout, with pads that are an input."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.convolution import conv, conv_transpose
from refgrad.backends.numpy.kernels.microsoft.activation import activated, plus
from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.kernels.windows import make_windows
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Ints = list[int] | None


@kernel("FusedConv", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_conv(
    X: Array,
    W: Array,
    B: Array | None = None,
    Z: Array | None = None,
    *,
    activation: str | None = None,
    activation_params: list[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Array:
    """An activation of Conv + Z"""
    window: dict[str, Any] = {"kernel_shape": kernel_shape, "pads": pads, "strides": strides, "dilations": dilations}
    y = plus(conv(X, W, B, auto_pad=auto_pad, group=group, **window), Z)
    return activated(y, activation, activation_params or ()).astype(X.dtype, copy=False)


@kernel("NhwcFusedConv", domain=MICROSOFT, in_float32=True, fresh=True)
def nhwc_fused_conv(
    X: Array,
    W: Array,
    B: Array | None = None,
    Z: Array | None = None,
    *,
    activation: str | None = None,
    activation_params: list[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    """An activation of Σ X·W + B + Z, where X (N, spatial..., C) and W (M, C/group, spatial...) meet element by element"""
    if X.ndim < 3 or W.ndim != X.ndim:
        raise ValueError(f"X has rank {X.ndim} and W {W.ndim}; both need a batch, channels and spatial axes")
    if kernel_shape is not None:
        check_shape("W", W.shape, (*W.shape[:2], *kernel_shape))
    if group < 1 or X.shape[-1] != group * W.shape[1] or W.shape[0] % group:
        raise ValueError(
            f"X {list(X.shape)} and W {list(W.shape)} do not fit {group} groups: the last axis of X has channels for each "
            "group of what W reads, and the groups divide what W makes"
        )
    if B is not None:
        check_shape("B", B.shape, W.shape[:1])
    windows = make_windows(X.shape[1:-1], W.shape[2:], strides, dilations, pads, auto_pad)
    shape = (len(X), *windows.count, W.shape[0])
    if Z is not None:
        check_shape("Z", Z.shape, shape)
    padded = np.pad(X, [(0, 0), *zip(windows.begin, windows.end, strict=True), (0, 0)])
    padded = padded.reshape(*padded.shape[:-1], group, W.shape[1])
    Y = np.zeros((*shape[:-1], group, W.shape[0] // group), X.dtype)
    for tap in np.ndindex(W.shape[2:]):
        axes = zip(tap, windows.dilations, windows.strides, windows.count, strict=True)
        seen = padded[(slice(None), *(slice(t * d, t * d + o * s, s) for t, d, s, o in axes))]
        Y += np.einsum("n...gc,gmc->n...gm", seen, W[(..., *tap)].reshape(group, -1, W.shape[1]))
    y = plus(plus(Y.reshape(shape), B), Z)
    return activated(y, activation, activation_params or ()).astype(X.dtype, copy=False)


@kernel("NhwcConv", domain=MICROSOFT, in_float32=True, fresh=True)
def nhwc_conv(
    X: Array,
    W: Array,
    B: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Array:
    """Conv with the channels last, of the filters too"""
    W = np.moveaxis(W, -1, 1)
    window: dict[str, Any] = {"kernel_shape": kernel_shape, "pads": pads, "strides": strides, "dilations": dilations}
    return nhwc_fused_conv(X, W, B, auto_pad=auto_pad, group=group, **window)


@kernel("ConvTransposeWithDynamicPads", domain=MICROSOFT, in_float32=True, fresh=True)
def conv_transpose_with_dynamic_pads(
    X: Array,
    W: Array,
    Pads: Array | None = None,
    B: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,
    output_padding: Ints = None,
    strides: Ints = None,
) -> Array:
    """ConvTranspose with Pads as its attribute pads; auto_pad="VALID" leaves them"""
    if Pads is not None:
        check_shape("Pads", Pads.shape, (2 * (X.ndim - 2),))
        if Pads.size and Pads.min() < 0:
            raise ValueError(f"Pads are {Pads.tolist()}; a pad is not negative")
    sizes: dict[str, Any] = {"dilations": dilations, "kernel_shape": kernel_shape, "output_padding": output_padding}
    pads = None if Pads is None else Pads.tolist()
    how = "NOTSET" if auto_pad == "VALID" else auto_pad
    return conv_transpose(X, W, B, auto_pad=how, group=group, pads=pads, strides=strides, **sizes)
