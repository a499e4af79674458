"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refgrad.builder.op import Emitter
from refgrad.errors import RuleError
from refgrad.formulas.convolution import conv_transpose_adjoints
from refgrad.formulas.indexing import MOST_AXES, WRITTEN_OUT, distances
from refgrad.tables.registry import rule

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
        return _blocks_of_any_rank(op, d_output, input, image_shape, block_shape)
    if rank > MOST_AXES:
        raise RuleError(
            f"Col2Im has {rank} spatial axes, and no runtime has tensors of as many. Export the model again."
        )
    around = list(pads or [0] * (2 * rank))
    blocks = op.Pad(d_output, [0, 0, *around[:rank], 0, 0, *around[rank:]]) if any(around) else d_output
    for axis in reversed(range(rank)):
        step, hole = (strides or [1] * rank)[axis], (dilations or [1] * rank)[axis]
        places = _block_places(op, image_shape, block_shape, axis, step, hole, around[axis] + around[axis + rank])
        blocks = op.Gather(blocks, places, axis=axis + 2)
    inside, positions = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    return op.reshape_like(op.Transpose(blocks, perm=[0, 1, *inside, *positions]), input)


def _blocks_of_any_rank(op: Emitter, d_output: str, input: str, image_shape: str, block_shape: str) -> str:
    """Without strides, pads and dilations, whose numbers would tell the rank: dy at block + position, the two as numbers."""
    positions = op.Sub(op.Add(image_shape, 1), block_shape)
    blocks, places = (
        op.Mod(op.Div(op.Unsqueeze(op.Range(0, op.ReduceProd(n, keepdims=0), 1), [1]), distances(op, n)), n)
        for n in (block_shape, positions)
    )
    taken = op.Add(op.Unsqueeze(blocks, [1]), op.Unsqueeze(places, [0]))  # (blocks, positions, axes)
    taken = op.reduce("ReduceSum", op.Mul(taken, distances(op, image_shape)), op.const([-1]))
    flat = op.Concat(op.Shape(d_output, end=2), op.ReduceProd(image_shape, keepdims=1), axis=0)
    return op.reshape_like(op.Gather(op.Reshape(d_output, flat, allowzero=1), op.Squeeze(taken, [-1]), axis=2), input)


def _block_places(op: Emitter, image_shape: str, block_shape: str, axis: int, step: int, hole: int, pads: int) -> str:
    """[block, positions]: where each element of each block lies along one spatial axis, pads included."""
    image, block = op.constant(image_shape), op.constant(block_shape)
    last = -1 if image is None or block is None else int(image[axis]) + pads - (int(block[axis]) - 1) * hole
    if image is not None and block is not None and int(block[axis]) * (max(last, 0) // step + 1) <= WRITTEN_OUT:
        inside = np.arange(int(block[axis])) * hole
        return op.const(inside[:, None] + np.arange(0, last, step))
    size, count = op.Gather(image_shape, axis, axis=0), op.Gather(block_shape, axis, axis=0)
    inside_ = op.Mul(op.Range(0, count, 1), hole)
    last_ = op.Sub(op.Add(size, pads), op.Mul(op.Sub(count, 1), hole))
    return op.Add(op.Unsqueeze(inside_, [1]), op.Range(0, last_, step))


@rule("ConvTranspose")
def conv_transpose(op: Emitter, d_Y: str, X: str, W: str, **attributes: Any) -> tuple[str, str, str]:
    """dX = Conv(dY, W), dW = the dW of this Conv of dY for the cotangent X, dB = Σ dY"""
    return conv_transpose_adjoints(op, d_Y, X, W, **attributes)
