"""ONNX Runtime's convolutions: with an activation, in another layout, with pads that are an input."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.backends.numpy.kernels.convolution import conv, conv_transpose
from refgrad.backends.numpy.kernels.operands import check_shape
from refgrad.backends.numpy.kernels.windows import make_windows
from refgrad.extend import Arguments, kernel_of_body
from refgrad.microsoft.kernels.activation import activated, plus
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
Ints = list[int] | None


def _window(args: Arguments) -> dict[str, Any]:
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    return {name: getattr(args, name) for name in names}


@kernel_of_body("FusedConv", domain=MICROSOFT, in_float32=True, fresh=True)
def fused_conv(args: Arguments) -> Array:
    """An activation of Conv + Z"""
    y = plus(conv(args.X, args.W, args.B, **_window(args)), args.Z)
    return activated(y, args.activation, args.activation_params or ()).astype(args.X.dtype, copy=False)


@kernel_of_body("NhwcFusedConv", domain=MICROSOFT, in_float32=True, fresh=True)
def nhwc_fused_conv(args: Arguments) -> Array:
    """An activation of Σ X·W + B + Z, where X (N, spatial..., C) and W (M, C/group, spatial...) meet element by element"""
    if args.X.ndim < 3 or args.W.ndim != args.X.ndim:
        raise ValueError(f"X has rank {args.X.ndim} and W {args.W.ndim}; both need a batch, channels and spatial axes")
    if args.kernel_shape is not None:
        check_shape("W", args.W.shape, (*args.W.shape[:2], *args.kernel_shape))
    if args.group < 1 or args.X.shape[-1] != args.group * args.W.shape[1] or args.W.shape[0] % args.group:
        raise ValueError(
            f"X {list(args.X.shape)} and W {list(args.W.shape)} do not fit {args.group} groups: "
            f"the last axis of X has channels for each "
            "group of what W reads, and the groups divide what W makes"
        )
    if args.B is not None:
        check_shape("B", args.B.shape, args.W.shape[:1])
    windows = make_windows(args.X.shape[1:-1], args.W.shape[2:], args.strides, args.dilations, args.pads, args.auto_pad)
    shape = (len(args.X), *windows.count, args.W.shape[0])
    if args.Z is not None:
        check_shape("Z", args.Z.shape, shape)
    padded = np.pad(args.X, [(0, 0), *zip(windows.begin, windows.end, strict=True), (0, 0)])
    padded = padded.reshape(*padded.shape[:-1], args.group, args.W.shape[1])
    Y = np.zeros((*shape[:-1], args.group, args.W.shape[0] // args.group), args.X.dtype)
    for tap in np.ndindex(args.W.shape[2:]):
        axes = zip(tap, windows.dilations, windows.strides, windows.count, strict=True)
        seen = padded[(slice(None), *(slice(t * d, t * d + o * s, s) for t, d, s, o in axes))]
        Y += np.einsum("n...gc,gmc->n...gm", seen, args.W[(..., *tap)].reshape(args.group, -1, args.W.shape[1]))
    y = plus(plus(Y.reshape(shape), args.B), args.Z)
    return activated(y, args.activation, args.activation_params or ()).astype(args.X.dtype, copy=False)


@kernel_of_body("NhwcConv", domain=MICROSOFT, in_float32=True, fresh=True)
def nhwc_conv(args: Arguments) -> Array:
    """Conv with the channels last, of the filters too"""
    W = np.moveaxis(args.W, -1, 1)
    return np.asarray(nhwc_fused_conv(args.X, W, args.B, **_window(args)))


@kernel_of_body("ConvTransposeWithDynamicPads", domain=MICROSOFT, in_float32=True, fresh=True)
def conv_transpose_with_dynamic_pads(args: Arguments) -> Array:
    """ConvTranspose with Pads as its attribute pads; auto_pad="VALID" leaves them"""
    if args.Pads is not None:
        check_shape("Pads", args.Pads.shape, (2 * (args.X.ndim - 2),))
        if args.Pads.size and args.Pads.min() < 0:
            raise ValueError(f"Pads are {args.Pads.tolist()}; a pad is not negative")
    sizes: dict[str, Any] = {
        "dilations": args.dilations,
        "kernel_shape": args.kernel_shape,
        "output_padding": args.output_padding,
    }
    pads = None if args.Pads is None else args.Pads.tolist()
    how = "NOTSET" if args.auto_pad == "VALID" else args.auto_pad
    return conv_transpose(
        args.X, args.W, args.B, auto_pad=how, group=args.group, pads=pads, strides=args.strides, **sizes
    )
