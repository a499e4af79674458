"""Operators that move elements without changing them: the cotangent moves them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import copies_added, join, put_back
from refgrad.tables.registry import rule


@rule("Reshape", wrt=["data"])
def reshape(op: Emitter, d_reshaped: str, data: str) -> str:
    """dx = dy in the shape of x"""
    return op.grad.ReshapeGrad(d_reshaped, data)


@rule("Flatten")
def flatten(op: Emitter, d_output: str, input: str) -> str:
    """dx = dy in the shape of x"""
    return op.reshape_like(d_output, input)


@rule("Squeeze", wrt=["data"])
def squeeze(op: Emitter, d_squeezed: str, data: str, axes: str | None) -> str:
    """dx = dy with the axes put back"""
    if _any(op, axes):
        return op.Unsqueeze(d_squeezed, axes)
    return op.reshape_like(d_squeezed, data)


@rule("Unsqueeze", wrt=["data"])
def unsqueeze(op: Emitter, d_expanded: str, data: str, axes: str) -> str:
    """dx = dy without the axes"""
    if _any(op, axes):
        return op.Squeeze(d_expanded, axes)
    return op.reshape_like(d_expanded, data)


def _any(op: Emitter, axes: str | None) -> bool:
    """True if at least one axis is known to be given: runtimes disagree on whether an empty list means every axis."""
    if axes is None:
        return False
    known = op.constant(axes)
    count = op.static(axes) if known is None else known.shape
    return bool(count) and count != (0,)


@rule("Transpose")
def transpose(op: Emitter, d_transposed: str, data: str, perm: Sequence[int] | None) -> str:
    """dx = dy transposed by the inverse permutation"""
    rank = op.rank(data)
    if perm is None and rank:
        perm = range(rank)[::-1]
    return op.Transpose(d_transposed, perm=None if perm is None else [int(axis) for axis in np.argsort(perm)])


@rule("Concat")
def concat(op: Emitter, d_concat_result: str, inputs: list[str], axis: int) -> list[str]:
    """dxᵢ = the part of dy that xᵢ became"""
    if len(inputs) == 1:
        return [d_concat_result]
    lengths = join(op, *(op.grad.Length(name, axis=axis) for name in inputs))
    return list(op.Split(d_concat_result, lengths, axis=axis, outputs=len(inputs)))


@rule("Split", wrt=["input"])
def split(op: Emitter, d_outputs: list[str | None], outputs: list[str], axis: int) -> str:
    """dx = the dyᵢ side by side, 0 for an output that nothing depends on"""
    if len(outputs) == 1:
        return d_outputs[0] or op.zeros_like(outputs[0])
    parts = [d or op.zeros_like(name) for d, name in zip(d_outputs, outputs, strict=True)]
    return op.Concat(*parts, axis=axis)


@rule("Expand", wrt=["input"])
def expand(op: Emitter, d_output: str, input: str, output: str) -> str:
    """dx = Σ dy over the axes along which x was repeated"""
    return op.grad.BroadcastGradient(d_output, input, (input, output))


@rule("Tile", wrt=["input"])
def tile(op: Emitter, d_output: str, input: str, repeats: str) -> str:
    """dx = Σ dy over the copies of x"""
    return op.grad.TileGrad(d_output, input, repeats)


@rule("Slice", wrt=["data"])
def slice_(op: Emitter, d_output: str, data: str, starts: str, ends: str, axes: str | None, steps: str | None) -> str:
    """dx = dy put back where it was taken from, 0 elsewhere"""
    return op.grad.SliceGrad(d_output, op.shape_of(data), starts, ends, axes, steps)


@rule("Pad", wrt=["data", "constant_value"])
def pad(
    op: Emitter, d_output: str, data: str, pads: str, constant_value: str | None, axes: str | None, mode: str
) -> tuple[str, str | None]:
    """dx = dy without the padding, what was copied into the padding added back; dvalue = Σ dy over the padding"""
    if mode != "constant":
        moved = _by_copies(op, d_output, data, pads, axes, mode)
        if moved is None:
            moved = put_back(
                op, d_output, op.shape_of(data), lambda numbers: op.Pad(numbers, pads, None, axes, mode=mode)
            )
        return moved, None
    d_data = op.grad.PadGrad(d_output, pads, axes)
    if constant_value is None:
        return d_data, None
    inside = op.Equal(op.zeros_like(data), 0)
    outside = op.Not(op.Pad(inside, pads, op.const(np.array(False)), axes))
    d_value = op.ReduceSum(op.Where(outside, d_output, 0), keepdims=0)
    return d_data, d_value if op.shape(constant_value) == () else op.reshape_like(d_value, constant_value)


def _by_copies(op: Emitter, d_output: str, data: str, pads: str, axes: str | None, mode: str) -> str | None:
    """The cotangent by copies, None where only the run tells sizes."""
    dims, known, along = op.shape(data), op.constant(pads), op.constant(axes)
    if dims is None or known is None or (axes is not None and along is None):
        return None
    places = range(len(dims)) if along is None else [int(axis) % len(dims) for axis in along]
    pairs = zip(places, known[: len(places)].tolist(), known[len(places) :].tolist(), strict=True)
    around = {axis: (before, after) for axis, before, after in pairs if before or after}
    return copies_added(op, d_output, dims, around, mode)


@rule("Trilu", wrt=["input"])
def trilu(op: Emitter, d_output: str, k: str | None, upper: int) -> str:
    """dx = the same triangle of dy"""
    return op.grad.TriluGrad(d_output, k, upper=upper)


@rule("ReverseSequence", wrt=["input"])
def reverse_sequence(op: Emitter, d_Y: str, sequence_lens: str, batch_axis: int, time_axis: int) -> str:
    """dx = dy reversed likewise"""
    return op.ReverseSequence(d_Y, sequence_lens, batch_axis=batch_axis, time_axis=time_axis)


@rule("SpaceToDepth")
def space_to_depth(op: Emitter, d_output: str, blocksize: int, mode: str) -> str:
    """dx = dy moved from depth back to space"""
    return op.DepthToSpace(d_output, blocksize=blocksize, mode=mode)


@rule("DepthToSpace")
def depth_to_space(op: Emitter, d_output: str, input: str, blocksize: int, mode: str) -> str:
    """dx = dy moved from space back to depth

    SpaceToDepth undoes it, but has the mode DCR only before opset 28. In CRD the channel is the outermost part of the depth:
    [N, C, H, b, W, b] becomes [N, C, b, b, H, W].
    """
    if op.opset >= 28:
        return op.SpaceToDepth(d_output, blocksize=blocksize, mode=mode)
    if mode == "DCR":
        return op.SpaceToDepth(d_output, blocksize=blocksize)
    shape = op.shape(input)
    if shape is not None and isinstance(shape[2], int) and isinstance(shape[3], int):
        blocks = op.Reshape(d_output, [0, 0, shape[2], blocksize, shape[3], blocksize])
    else:
        height, width = op.Shape(input, start=2, end=3), op.Shape(input, start=3, end=4)
        sizes = op.Concat(op.Shape(d_output, start=0, end=2), height, [blocksize], width, [blocksize], axis=0)
        blocks = op.Reshape(d_output, sizes, allowzero=1)
    return op.reshape_like(op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), input)


@rule("Range", wrt=["start", "delta"])
def range_(op: Emitter, d_output: str) -> tuple[str, str]:
    """dstart = Σ dyᵢ, ddelta = Σ i·dyᵢ"""
    steps = op.Cast(op.Range(0, op.Size(d_output), 1), to=op.type(d_output))
    return op.ReduceSum(d_output, keepdims=0), op.ReduceSum(op.Mul(d_output, steps), keepdims=0)


@rule("CenterCropPad", wrt=["input_data"])
def center_crop_pad(op: Emitter, d_output_data: str, input_data: str, axes: Sequence[int] | None) -> str:
    """dx = dy cropped where x was padded, padded where x was cropped"""
    shape = op.shape_of(input_data)
    sizes = shape if axes is None else op.Gather(shape, list(axes), axis=0)
    return op.CenterCropPad(d_output_data, sizes, axes=axes)
