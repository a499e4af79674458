"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refgrad.emit import Emitter
from refgrad.errors import RuleError
from refgrad.lowering.onnx.convolution import spatial_rank
from refgrad.lowering.onnx.windows import spatial, typed
from refgrad.registry import rule

Ints = Sequence[int] | None


@rule("Conv")
def conv(op: Emitter, d_Y: str, X: str, W: str, **attributes: Any) -> tuple[str, str, str]:
    """dX = dY convolved with W turned round, dW = the correlation of X and dY, dB = Σ dY"""
    return op.grad.ConvGrad(d_Y, X, W, **attributes)


@rule("Col2Im", wrt=["input"])
def col2im(
    op: Emitter,
    d_output: str,
    input: str,
    image_shape: str,
    block_shape: str,
    dilations: Ints,
    pads: Ints,
    strides: Ints,
) -> str:
    """dx = the blocks of dy, each a column: a Conv of each channel with the unit kernels"""
    block = op.constant(block_shape)
    if block is None:
        raise RuleError(f"The block_shape {block_shape!r} of Col2Im is known at run time only: make it a constant.")
    channels = op.Reshape(d_output, op.Concat([-1, 1], image_shape, axis=0))
    units = typed(op, np.eye(int(block.prod())).reshape(-1, 1, *block), d_output)
    d_input: str = op.Conv(channels, units, dilations=dilations, pads=pads, strides=strides)
    return op.reshape_like(d_input, input)


@rule("ConvTranspose")
def conv_transpose(
    op: Emitter,
    d_Y: str,
    X: str,
    W: str,
    auto_pad: str,
    dilations: Ints,
    group: int,
    kernel_shape: Ints,
    output_padding: Ints,
    output_shape: Ints,
    pads: Ints,
    strides: Ints,
) -> tuple[str, str, str]:
    """dX = Conv(dY, W), dW = that of this Conv of dY for the cotangent X, dB = Σ dY"""
    rank = spatial_rank(op, (X, W, d_Y), kernel_shape, strides, dilations, pads)
    s, extra = list(strides or [1] * rank), list(output_padding or [0] * rank)
    d_B = op.ReduceSum(d_Y, [0, *range(2, rank + 2)], keepdims=0)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER") or output_shape is not None:
        pads = _pads_by_shape(op, X, W, kernel_shape, s, list(dilations or [1] * rank), extra, output_shape, auto_pad)
    elif auto_pad == "VALID":
        pads = None
    window = {"dilations": dilations, "group": group, "kernel_shape": kernel_shape, "pads": pads, "strides": strides}
    d_X = op.Conv(d_Y, W, **window)
    if any(e >= t for e, t in zip(extra, s, strict=True)):  # so much padding that more windows fit
        d_X = op.Slice(d_X, [0] * rank, op.Shape(X, start=2), list(range(2, rank + 2)))
        d_Y = op.Slice(d_Y, [0] * rank, op.Sub(op.Shape(d_Y, start=2), extra), list(range(2, rank + 2)))
    _, d_W, _ = op.grad.ConvGrad(X, d_Y, W, auto_pad="NOTSET", **window)
    return d_X, d_W, d_B


def _pads_by_shape(
    op: Emitter,
    X: str,
    W: str,
    kernel_shape: Ints,
    strides: list[int],
    dilations: list[int],
    output_padding: list[int],
    output_shape: Ints,
    auto_pad: str,
) -> list[int]:
    """total = s·(I − 1) + output_padding + (k − 1)·d + 1 − O, and O = s·I for SAME; the odd element where auto_pad says."""
    kernel, size = kernel_shape or spatial(op, W), spatial(op, X)
    if kernel is None or (output_shape is not None and size is None):
        raise RuleError(
            f"The pads of ConvTranspose depend on the spatial sizes of {X!r} and {W!r}: give their shapes in value_info."
        )
    if output_shape is None or size is None:
        room = [-s for s in strides]
    else:
        room = [s * (n - 1) - o for s, n, o in zip(strides, size, output_shape[-len(strides) :], strict=True)]
    axes = zip(room, output_padding, kernel, dilations, strict=True)
    total = [max(r + p + (k - 1) * d + 1, 0) for r, p, k, d in axes]
    small = [t // 2 for t in total]
    large = [t - h for t, h in zip(total, small, strict=True)]
    return small + large if auto_pad == "SAME_UPPER" else large + small
