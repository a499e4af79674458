"""Regions of interest cut into bins, and the gradients of pooling them.

Symbols: R regions, in each O bins along an axis (H of them along the height, W along the width), in each of these T
pixels, from which its samples are read. The samples of a bin are all pairs of those along both axes, and so are their
weights: neither the mean nor its cotangents need to list them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import END, WRITTEN_OUT, counted, join, part, product
from refgrad.formulas.windows import typed
from refgrad.lowering.onnx.points import from_rows, largest_pixel_adjoint, make_image, shaped


@dataclass(frozen=True)
class Taps:
    """The pixels along one axis that every bin is read from: `index`, `weight` and `valid`, each (R, O, T).

    Those that are not valid fill up the bins with fewer pixels than T; None where there are none.
    """

    index: str
    weight: str
    valid: str | None
    bins: int


@dataclass(frozen=True)
class Samples:
    """n samples in each bin along one axis. The first n of their taps are the pixels before them, the others the pixels after.

    A sample lies at start + size·`unit`/O, `unit` (R, O, n). `slope` (R, O, n) is the derivative of the weight of the pixel
    after the sample by the sample's position; for the pixel before it, the derivative is −`slope`.
    """

    taps: Taps
    unit: str
    slope: str

    def adjoint(self, op: Emitter, d_weight: str) -> tuple[str, str]:
        """The cotangents of start and size (R, 1), from the cotangents of the weights."""
        count = op.Shape(self.slope, start=2)
        before, after = op.Slice(d_weight, [0], count, [2]), op.Slice(d_weight, count, [END], [2])
        d_place = op.Mul(self.slope, op.Sub(after, before))
        d_start = op.ReduceSum(d_place, [1, 2], keepdims=0)
        d_size = op.Div(op.ReduceSum(op.Mul(d_place, self.unit), [1, 2], keepdims=0), self.taps.bins)
        return op.Unsqueeze(d_start, [1]), op.Unsqueeze(d_size, [1])


def make_samples(
    op: Emitter, start: str, size: str, length: str, bins: int, sampling_ratio: int, mean: bool
) -> Samples:
    """RoiAlign's samples along an axis of `length` pixels in regions from `start` on of `size` (R, 1), in pixels.

    There are `sampling_ratio` in a bin, or, where that is 0, as many as its size rounded up: then n is the number in the
    largest bin. A sample that lies more than a pixel outside has no weight, others outside are moved to the border.
    """
    first, extent = op.Unsqueeze(start, [2]), op.Div(op.Unsqueeze(size, [2]), bins)
    number = _numbers(op, bins, like=start)
    valid = None
    if sampling_ratio > 0:
        within = _middles(op, sampling_ratio, like=start)
        share = op.const(1 / sampling_ratio if mean else 1.0, like=start)
    else:
        count = op.Ceil(extent)
        order = _order(op, count)
        some = op.Max(count, 1)
        within = op.Div(op.Add(order, 0.5), some)
        valid = op.And(op.Less(order, count), _all(op, bins))
        share = op.Where(valid, op.Div(1, some) if mean else op.const(1.0, like=count), 0)
    unit = op.Add(number, within)
    at = op.Add(op.Add(first, op.Mul(number, extent)), op.Mul(within, extent))
    end = op.Cast(length, to=op.type(start))
    last = op.Sub(end, 1)
    met = op.And(op.GreaterOrEqual(at, -1), op.LessOrEqual(at, end))
    moved = op.Min(op.Max(at, 0), last)
    before = op.Floor(moved)
    after = op.Min(op.Add(before, 1), last)
    t = op.Sub(moved, before)
    weight = op.Where(met, share, 0)
    taps = Taps(
        op.Cast(op.Concat(before, after, axis=2), to=TensorProto.INT64),
        op.Concat(op.Mul(weight, op.Sub(1, t)), op.Mul(weight, t), axis=2),
        None if valid is None else op.Concat(valid, valid, axis=2),
        bins,
    )
    return Samples(taps, unit, op.Where(op.Equal(moved, at), weight, 0))


def _all(op: Emitter, bins: int) -> str:
    """True for each bin in a row of its own."""
    if bins > WRITTEN_OUT:
        return op.Expand(op.const(np.ones((1, 1), bool)), [bins, 1])
    return op.const(np.ones((bins, 1), bool))


def _numbers(op: Emitter, bins: int, like: str) -> str:
    """0, 1, ... for each bin in a row of its own."""
    if bins > WRITTEN_OUT:
        return op.Unsqueeze(counted(op, bins, like), [1])
    return typed(op, np.arange(bins).reshape(-1, 1), like)


def _middles(op: Emitter, count: int, like: str) -> str:
    """The middles of `count` equal parts of 1."""
    if count > WRITTEN_OUT:
        return op.Div(op.Add(counted(op, count, like), 0.5), float(count))
    return typed(op, (np.arange(count) + 0.5) / count, like)


def _order(op: Emitter, count: str) -> str:
    """0, 1, ... up to the largest count; 0 alone where nothing is counted."""
    counts = op.Concat(op.Reshape(count, [-1]), typed(op, np.ones(1), like=count), axis=0)
    return op.Range(0, op.ReduceMax(counts, keepdims=0), 1)


def make_pixels(op: Emitter, start: str, size: str, length: str, bins: int) -> Taps:
    """MaxRoiPool's pixels along an axis: from start + ⌊o·size/O⌋ to start + ⌈(o + 1)·size/O⌉ − 1, as far as they are inside."""
    first, extent = op.Unsqueeze(start, [2]), op.Div(op.Unsqueeze(size, [2]), bins)
    number = _numbers(op, bins, like=start)
    length = op.Cast(length, to=op.type(start))
    begin = op.Add(first, op.Floor(op.Mul(number, extent)))
    end = op.Add(first, op.Ceil(op.Mul(op.Add(number, 1), extent)))
    begin, end = (op.Min(op.Max(edge, 0), length) for edge in (begin, end))
    count = op.Sub(end, begin)
    order = _order(op, count)
    index = op.Min(op.Add(begin, order), op.Sub(length, 1))
    valid = op.Less(order, count)
    return Taps(op.Cast(index, to=TensorProto.INT64), op.Cast(valid, to=op.type(start)), valid, bins)


def mean_adjoint(op: Emitter, dY: str, X: str, batch: str, height: Taps, width: Taps) -> tuple[str, str, str]:
    """The cotangents of X and of the weights along both axes, where Y is the weighted sum.

    For A (R·H, rows of all images) and B (R, W, columns), the weights as matrices, Y = A·X·Bᵀ: all of this is products. That A
    reaches over all images costs a factor of their number in one product, and spares a copy of its image for every region.
    """
    kind = op.type(dY)
    shape = op.shape_of(X)
    images, channels, rows, columns = (part(op, shape, k, k + 1) for k in range(4))
    regions = op.Shape(batch)
    every = product(op, join(op, images, rows))
    lines = product(op, join(op, regions, op.const([height.bins])))
    row = op.Add(height.index, op.Mul(op.Unsqueeze(batch, [1, 2]), rows))

    def matrix(weight: str, index: str, bins: int, size: str) -> str:
        return op.grad.GatherElementsGrad(weight, join(op, regions, op.const([bins]), size), index, axis=2)

    along_y = shaped(op, matrix(height.weight, row, height.bins, every), lines, every)
    along_x = matrix(width.weight, width.index, width.bins, columns)
    flat = product(op, join(op, channels, columns))
    pixels = shaped(op, op.Transpose(op.as_type(X, kind), perm=[0, 2, 1, 3]), every, flat)

    spread = op.Transpose(op.MatMul(dY, op.Unsqueeze(along_x, [1])), perm=[0, 2, 1, 3])
    spread = shaped(op, spread, lines, flat)
    d_pixels = op.MatMul(op.Transpose(along_y, perm=[1, 0]), spread)
    d_pixels = shaped(op, d_pixels, images, rows, channels, columns)
    d_X = op.as_type(op.Transpose(d_pixels, perm=[0, 2, 1, 3]), op.type(X))

    d_along_y = op.MatMul(spread, op.Transpose(pixels, perm=[1, 0]))
    d_along_y = shaped(op, d_along_y, regions, op.const([height.bins]), every)
    drawn = product(op, join(op, op.const([height.bins]), channels))
    read = shaped(op, op.MatMul(along_y, pixels), regions, drawn, columns)
    d_lines = shaped(op, op.Transpose(dY, perm=[0, 3, 2, 1]), regions, op.const([width.bins]), drawn)
    d_along_x = op.MatMul(d_lines, read)
    return d_X, op.GatherElements(d_along_y, row, axis=2), op.GatherElements(d_along_x, width.index, axis=2)


def largest_adjoint(op: Emitter, dY: str, X: str, batch: str, height: Taps, width: Taps) -> tuple[str, str, str]:
    """The cotangents of X and of the weights along both axes, where Y is the largest of the weighted pixels."""
    image = make_image(op, X, op.type(dY))
    shape = op.shape_of(X)
    rows, columns = part(op, shape, 2, 3), part(op, shape, 3, 4)
    regions, bins = op.Shape(batch), op.const([height.bins * width.bins])
    apart = join(
        op,
        regions,
        op.const([height.bins, width.bins]),
        op.Shape(height.index, start=2),
        op.Shape(width.index, start=2),
    )
    pairs = product(op, op.Slice(apart, [3], [5]))
    flat = join(op, regions, bins, pairs)

    def paired(operator: str, along_y: str, along_x: str) -> str:
        both = op.emit(operator, "", (op.Unsqueeze(along_y, [2, 4]), op.Unsqueeze(along_x, [1, 3])), 1, {})
        return shaped(op, both, flat)

    row = op.Add(height.index, op.Mul(op.Unsqueeze(batch, [1, 2]), rows))
    valid = None
    if height.valid is not None and width.valid is not None:
        valid = paired("And", height.valid, width.valid)
    d_values = op.Transpose(shaped(op, dY, regions, image.sizes[1], bins), perm=[0, 2, 1])
    d_rows, d_weight = largest_pixel_adjoint(
        op,
        d_values,
        image,
        paired("Add", op.Mul(row, columns), width.index),
        paired("Mul", height.weight, width.weight),
        valid,
    )
    d_weight = shaped(op, d_weight, apart)
    d_along_y = op.ReduceSum(op.Mul(d_weight, op.Unsqueeze(width.weight, [1, 3])), [2, 4], keepdims=0)
    d_along_x = op.ReduceSum(op.Mul(d_weight, op.Unsqueeze(height.weight, [2, 4])), [1, 3], keepdims=0)
    return from_rows(op, d_rows, image, X), d_along_y, d_along_x
