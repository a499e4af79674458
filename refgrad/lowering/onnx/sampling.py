"""The gradients of reading an image between its pixels: GridSample, DeformConv, and the poolings of regions of interest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import join, part, product
from refgrad.formulas.windows import typed
from refgrad.lowering.onnx.points import (
    divided,
    from_rows,
    index_tuples,
    interpolate,
    interpolate_adjoint,
    make_image,
    make_neighbours,
    reverse,
    shaped,
    work_type,
)
from refgrad.lowering.onnx.rois import largest_adjoint, make_pixels, make_samples, mean_adjoint
from refgrad.tables.registry import lowering

Ints = Sequence[int] | None
_MODES = {"bilinear": "linear", "bicubic": "cubic"}  # as they were called before opset 20


@lowering("GridSampleGrad")
def grid_sample_grad(
    op: Emitter, dY: str, X: str, grid: str, align_corners: int, mode: str, padding_mode: str
) -> tuple[str, str]:
    """The points of the grid in pixels, and the gradients of reading X there."""
    kind = work_type(op, X, grid)
    image, shape = make_image(op, X, kind), op.shape_of(grid)
    batch, channels, _ = image.sizes
    points = product(op, part(op, shape, 1, -1))
    unit = shaped(op, op.as_type(grid, kind), batch, points, part(op, shape, -1, None))
    length = op.Cast(reverse(op, image.lengths), to=kind)
    if align_corners:
        span = op.Sub(length, 1)
        at = op.Mul(op.Div(op.Add(unit, 1), 2), span)
    else:
        span = length
        at = op.Div(op.Sub(op.Mul(op.Add(unit, 1), length), 1), 2)
    rank = _spatial_rank(op, X, grid)
    neighbours = make_neighbours(
        op,
        at,
        image,
        2 if op.opset < 20 else rank,
        _MODES.get(mode, mode),
        padding_mode,
        low=0.0 if align_corners else -0.5,
        innermost_first=True,
    )
    d_values = op.Transpose(shaped(op, op.as_type(dY, kind), batch, channels, points), perm=[0, 2, 1])
    d_rows, d_at = interpolate_adjoint(op, d_values, image, neighbours)
    d_X = from_rows(op, d_rows, image, X)
    if mode == "nearest":
        return d_X, op.zeros_like(grid)
    d_grid = shaped(op, op.Mul(d_at, op.Div(span, 2)), shape)
    return d_X, op.as_type(d_grid, op.type(grid))


def _spatial_rank(op: Emitter, *values: str) -> int | None:
    """The number of spatial axes; None where it is not known."""
    ranks = [rank for rank in (op.rank(value) for value in values) if rank is not None]
    return ranks[0] - 2 if ranks else None


@lowering("DeformConvGrad")
def deform_conv_grad(
    op: Emitter,
    dY: str,
    X: str,
    W: str,
    offset: str,
    mask: str | None,
    dilations: Ints,
    group: int,
    kernel_shape: Ints,
    offset_group: int,
    pads: Ints,
    strides: Ints,
) -> tuple[str, str, str, str, str | None]:
    """Y = W·(mask·V): V, the values read from X at the moved elements of the windows, has a column per window."""
    kind = work_type(op, X)
    image = make_image(op, X, kind, offset_group)
    batch, channels, _ = image.sizes
    kernel, out = part(op, op.shape_of(W), 2, None), part(op, op.shape_of(offset), 2, None)
    elements, points, axes = product(op, kernel), product(op, out), op.Shape(image.lengths)
    together = product(op, join(op, elements, points))

    inside, begin = index_tuples(op, kernel, kind), index_tuples(op, out, kind)
    if dilations:
        inside = op.Mul(inside, typed(op, np.array(dilations), like=inside))
    if strides:
        begin = op.Mul(begin, typed(op, np.array(strides), like=begin))
    if pads:
        begin = op.Sub(begin, typed(op, np.array(pads[: len(pads) // 2]), like=begin))
    moved = op.Transpose(shaped(op, op.as_type(offset, kind), batch, elements, axes, points), perm=[0, 1, 3, 2])
    at = shaped(op, op.Add(moved, op.Add(op.Unsqueeze(inside, [1]), begin)), batch, together, axes)
    neighbours = make_neighbours(op, at, image, _spatial_rank(op, X, W, offset))
    values = shaped(op, interpolate(op, image, neighbours), batch, elements, points, channels)
    masked, factor = values, None
    if mask is not None:
        factor = shaped(op, op.as_type(mask, kind), batch, elements, points, op.const([1]))
        masked = op.Mul(values, factor)

    images, groups = part(op, op.shape_of(X), 0, 1), op.const([group])
    outputs = divided(op, part(op, op.shape_of(W), 0, 1), group)
    rows = product(op, join(op, part(op, op.shape_of(W), 1, 2), elements))
    d_rows = shaped(op, op.as_type(dY, kind), images, groups, outputs, points)
    columns = shaped(op, op.Transpose(masked, perm=[0, 3, 1, 2]), images, groups, rows, points)
    d_W = op.ReduceSum(op.MatMul(d_rows, op.Transpose(columns, perm=[0, 1, 3, 2])), [0], keepdims=0)
    d_B = op.ReduceSum(d_rows, [0, 3], keepdims=0)
    weights = op.Transpose(shaped(op, op.as_type(W, kind), groups, outputs, rows), perm=[0, 2, 1])
    d_columns = shaped(op, op.MatMul(weights, d_rows), batch, channels, elements, points)
    d_values = op.Transpose(d_columns, perm=[0, 2, 3, 1])
    d_mask = None
    if mask is not None:
        d_mask = _like(op, op.ReduceSum(op.Mul(d_values, values), [3], keepdims=0), mask)
        d_values = op.Mul(d_values, factor)
    d_image, d_at = interpolate_adjoint(op, shaped(op, d_values, batch, together, channels), image, neighbours)
    d_offset = op.Transpose(shaped(op, d_at, batch, elements, points, axes), perm=[0, 1, 3, 2])
    d_B = op.as_type(shaped(op, d_B, part(op, op.shape_of(W), 0, 1)), op.type(X))
    return from_rows(op, d_image, image, X), _like(op, d_W, W), _like(op, d_offset, offset), d_B, d_mask


def _like(op: Emitter, value: str, primal: str) -> str:
    return op.as_type(shaped(op, value, op.shape_of(primal)), op.type(primal))


@lowering("RoiAlignGrad")
def roi_align_grad(
    op: Emitter,
    dY: str,
    X: str,
    rois: str,
    batch_indices: str,
    coordinate_transformation_mode: str,
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> tuple[str, str]:
    """By way of the weights of the samples along each axis: their cotangents first, then the cotangents of the regions."""
    kind = work_type(op, X)
    half_pixel = coordinate_transformation_mode.lower() == "half_pixel"
    scaled = op.Mul(op.as_type(rois, kind), spatial_scale)
    if half_pixel:
        scaled = op.Sub(scaled, 0.5)
    start, end = op.Slice(scaled, [0], [2], [1]), op.Slice(scaled, [2], [4], [1])
    extent = op.Sub(end, start)
    size = extent if half_pixel else op.Max(extent, 1)
    shape, mean = op.shape_of(X), mode.lower() != "max"
    width, height = (
        make_samples(
            op,
            _column(op, start, axis),
            _column(op, size, axis),
            part(op, shape, 3 - axis, 4 - axis),
            (output_width, output_height)[axis],
            sampling_ratio,
            mean,
        )
        for axis in (0, 1)
    )
    adjoint = mean_adjoint if mean else largest_adjoint
    d_X, d_along_y, d_along_x = adjoint(op, op.as_type(dY, kind), X, batch_indices, height.taps, width.taps)
    ends = width.adjoint(op, d_along_x), height.adjoint(op, d_along_y)
    d_start, d_size = (op.Concat(*pair, axis=1) for pair in zip(*ends, strict=True))
    if not half_pixel:
        d_size = op.Where(op.GreaterOrEqual(extent, 1), d_size, 0)
    d_rois = op.Mul(op.Concat(op.Sub(d_start, d_size), d_size, axis=1), spatial_scale)
    return d_X, op.as_type(d_rois, op.type(rois))


@lowering("MaxRoiPoolGrad")
def max_roi_pool_grad(
    op: Emitter, dY: str, X: str, rois: str, pooled_shape: Sequence[int], spatial_scale: float
) -> str:
    """The corners of the regions are rounded, halves away from 0."""
    kind = work_type(op, X)
    regions = op.as_type(rois, kind)
    batch = op.Cast(op.Squeeze(_column(op, regions, 0), [1]), to=TensorProto.INT64)
    scaled = op.Mul(op.Slice(regions, [1], [5], [1]), spatial_scale)
    corners = op.Mul(op.Sign(scaled), op.Floor(op.Add(op.Abs(scaled), 0.5)))
    start, end = op.Slice(corners, [0], [2], [1]), op.Slice(corners, [2], [4], [1])
    size = op.Max(op.Add(op.Sub(end, start), 1), 1)
    shape = op.shape_of(X)
    height, width = (
        make_pixels(
            op,
            _column(op, start, axis),
            _column(op, size, axis),
            part(op, shape, 3 - axis, 4 - axis),
            pooled_shape[1 - axis],
        )
        for axis in (1, 0)
    )
    return largest_adjoint(op, op.as_type(dY, kind), X, batch, height, width)[0]


def _column(op: Emitter, values: str, k: int) -> str:
    return op.Slice(values, [k], [k + 1], [1])
