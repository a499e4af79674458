"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refgrad.emit import Emitter
from refgrad.errors import RuleError
from refgrad.lowering.onnx.convolution import spatial_rank
from refgrad.lowering.onnx.windows import spatial
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
    """dx = the blocks of dy, each a column

    Along each spatial axis, dy between its pads is taken at block·dilation + stride·position: [N, C, b₁, o₁, b₂, o₂, ...].
    """
    known = [values for values in (strides, dilations, pads and pads[: len(pads) // 2]) if values]
    counted = [op.shape(image_shape), op.shape(block_shape)]
    rank = len(known[0]) if known else next((n[0] for n in counted if n and isinstance(n[0], int)), None)
    if rank is None and (shape := op.shape(d_output)) is not None:
        rank = len(shape) - 2
    if not isinstance(rank, int):
        raise RuleError(
            f"How many spatial axes Col2Im has is known at run time only: give the shape of {image_shape!r} or of "
            f"{block_shape!r} in value_info."
        )
    around = list(pads or [0] * (2 * rank))
    blocks = op.Pad(d_output, [0, 0, *around[:rank], 0, 0, *around[rank:]]) if any(around) else d_output
    for axis in reversed(range(rank)):
        step, hole = (strides or [1] * rank)[axis], (dilations or [1] * rank)[axis]
        places = _block_places(op, image_shape, block_shape, axis, step, hole, around[axis] + around[axis + rank])
        blocks = op.Gather(blocks, places, axis=axis + 2)
    inside, positions = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    return op.reshape_like(op.Transpose(blocks, perm=[0, 1, *inside, *positions]), input)


def _block_places(op: Emitter, image_shape: str, block_shape: str, axis: int, step: int, hole: int, pads: int) -> str:
    """[block, positions]: where each element of each block lies along one spatial axis between its pads."""
    image, block = op.constant(image_shape), op.constant(block_shape)
    if image is not None and block is not None:
        inside = np.arange(int(block[axis])) * hole
        last = int(image[axis]) + pads - (int(block[axis]) - 1) * hole
        return op.const(inside[:, None] + np.arange(0, last, step))
    size, count = op.Gather(image_shape, axis, axis=0), op.Gather(block_shape, axis, axis=0)
    inside_ = op.Mul(op.Range(0, count, 1), hole)
    last_ = op.Sub(op.Add(size, pads), op.Mul(op.Sub(count, 1), hole))
    return str(op.Add(op.Unsqueeze(inside_, [1]), op.Range(0, last_, step)))


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
