"""Reading an image between its pixels: GridSample, DeformConv, and the poolings of regions of interest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from refgrad.emit import Emitter
from refgrad.lowering.onnx.indexing import join, part, product
from refgrad.lowering.onnx.rois import largest_adjoint, make_pixels, make_samples, mean_adjoint
from refgrad.lowering.onnx.sampling import (
    from_rows,
    index_tuples,
    make_corners,
    make_image,
    over,
    read,
    read_adjoint,
    reverse,
    work_type,
)
from refgrad.lowering.onnx.windows import typed
from refgrad.registry import rule

Ints = Sequence[int] | None
_MODES = {"bilinear": "linear", "bicubic": "cubic"}  # as they were called before opset 20


@rule("GridSample")
def grid_sample(
    op: Emitter, d_Y: str, X: str, grid: str, align_corners: int, mode: str, padding_mode: str
) -> tuple[str, str]:
    """dX = Σ weight·dY at the pixels that were read; dgrid = Σ dY·X·(the slope of the weight), 0 in mode "nearest"

    A point that the padding moved to the border has slope 0, one that it reflected has the slope turned round.
    """
    kind = work_type(op, X, grid)
    image, shape = make_image(op, X, kind), op.shape_of(grid)
    batch, channels, _ = image.sizes
    points = product(op, part(op, shape, 1, -1))
    unit = op.Reshape(op.as_type(grid, kind), join(op, batch, points, part(op, shape, -1, None)), allowzero=1)
    length = op.Cast(reverse(op, image.lengths), to=kind)
    if align_corners:
        span = op.Sub(length, 1)
        at = op.Mul(op.Div(op.Add(unit, 1), 2), span)
    else:
        span = length
        at = op.Div(op.Sub(op.Mul(op.Add(unit, 1), length), 1), 2)
    corners = make_corners(
        op,
        at,
        image,
        _spatial_rank(op, X, grid),
        _MODES.get(mode, mode),
        padding_mode,
        low=0.0 if align_corners else -0.5,
        innermost_first=True,
    )
    d_values = op.Reshape(op.as_type(d_Y, kind), join(op, batch, channels, points), allowzero=1)
    d_rows, d_at = read_adjoint(op, op.Transpose(d_values, perm=[0, 2, 1]), image, corners)
    d_X = from_rows(op, d_rows, image, X)
    if d_at is None:
        return d_X, op.zeros_like(grid)
    d_grid = op.Reshape(op.Mul(d_at, op.Div(span, 2)), shape, allowzero=1)
    return d_X, op.as_type(d_grid, op.type(grid))


def _spatial_rank(op: Emitter, *values: str) -> int | None:
    """The number of spatial axes; None where it is not known."""
    ranks = [rank for rank in (op.rank(value) for value in values) if rank is not None]
    return ranks[0] - 2 if ranks else 2 if op.opset < 20 else None


@rule("DeformConv")
def deform_conv(
    op: Emitter,
    d_Y: str,
    X: str,
    W: str,
    offset: str,
    B: str | None,
    mask: str | None,
    dilations: Ints,
    group: int,
    offset_group: int,
    pads: Ints,
    strides: Ints,
) -> tuple[str, str, str, str | None, str | None]:
    """dW = dY·(mask·V)ᵀ, dB = Σ dY, dmask = Σ_c V·Wᵀ·dY; dX and doffset are those of reading V for its adjoint mask·Wᵀ·dY

    V, the values read from X at the moved elements of the windows, has a column per window.
    """
    kind = work_type(op, X)
    image = make_image(op, X, kind, offset_group)
    batch, channels, _ = image.sizes
    kernel, out = part(op, op.shape_of(W), 2, None), part(op, op.shape_of(offset), 2, None)
    elements, points, axes = product(op, kernel), product(op, out), op.Shape(image.lengths)
    moved = op.Reshape(op.as_type(offset, kind), join(op, batch, elements, axes, points), allowzero=1)
    inside, begin = index_tuples(op, kernel, kind), index_tuples(op, out, kind)
    if dilations:
        inside = op.Mul(inside, typed(op, np.array(dilations), like=inside))
    if strides:
        begin = op.Mul(begin, typed(op, np.array(strides), like=begin))
    if pads:
        begin = op.Sub(begin, typed(op, np.array(pads[: len(pads) // 2]), like=begin))
    at = op.Add(op.Transpose(moved, perm=[0, 1, 3, 2]), op.Add(op.Unsqueeze(inside, [1]), begin))
    window = product(op, join(op, elements, points))
    at = op.Reshape(at, join(op, batch, window, axes), allowzero=1)
    rank = next((len(a) for a in (strides, dilations) if a), None)
    corners = make_corners(op, at, image, _spatial_rank(op, X, W, offset) if rank is None else rank)
    values = op.Reshape(read(op, image, corners), join(op, batch, elements, points, channels), allowzero=1)
    factor = None
    if mask is not None:
        factor = op.Reshape(op.as_type(mask, kind), join(op, batch, elements, points, op.const([1])), allowzero=1)
    masked = values if factor is None else op.Mul(values, factor)

    images, groups = part(op, op.shape_of(X), 0, 1), op.const([group])
    outputs = over(op, part(op, op.shape_of(W), 0, 1), group)
    rows = product(op, join(op, part(op, op.shape_of(W), 1, 2), elements))
    d_rows = op.Reshape(op.as_type(d_Y, kind), join(op, images, groups, outputs, points), allowzero=1)
    columns = op.Reshape(op.Transpose(masked, perm=[0, 3, 1, 2]), join(op, images, groups, rows, points), allowzero=1)
    d_W = op.ReduceSum(op.MatMul(d_rows, op.Transpose(columns, perm=[0, 1, 3, 2])), [0], keepdims=0)
    weights = op.Reshape(op.as_type(W, kind), join(op, groups, outputs, rows), allowzero=1)
    d_columns = op.MatMul(op.Transpose(weights, perm=[0, 2, 1]), d_rows)
    d_masked = op.Transpose(
        op.Reshape(d_columns, join(op, batch, channels, elements, points), allowzero=1), perm=[0, 2, 3, 1]
    )
    d_mask = None
    if mask is not None:
        d_mask = op.ReduceSum(op.Mul(d_masked, values), [3], keepdims=0)
        d_mask = op.as_type(op.Reshape(d_mask, op.shape_of(mask), allowzero=1), op.type(X))
    d_values = d_masked if factor is None else op.Mul(d_masked, factor)
    d_image, d_at = read_adjoint(
        op, op.Reshape(d_values, join(op, batch, window, channels), allowzero=1), image, corners
    )
    d_moved = op.Transpose(op.Reshape(d_at, join(op, batch, elements, points, axes), allowzero=1), perm=[0, 1, 3, 2])
    d_offset = op.Reshape(d_moved, op.shape_of(offset), allowzero=1)
    d_B = op.Reshape(op.ReduceSum(d_rows, [0, 3], keepdims=0), part(op, op.shape_of(W), 0, 1))
    return (
        from_rows(op, d_image, image, X),
        op.as_type(op.Reshape(d_W, op.shape_of(W), allowzero=1), op.type(X)),
        op.as_type(d_offset, op.type(X)),
        op.as_type(d_B, op.type(X)),
        d_mask,
    )


@rule("RoiAlign", wrt=["X", "rois"])
def roi_align(
    op: Emitter,
    d_Y: str,
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
    """Y = A·X·Bᵀ, the weights of the samples along each axis: dX = Aᵀ·dY·B, dA = dY·B·Xᵀ, dB = dYᵀ·A·X; drois by dA and dB

    With mode "max" each dY goes to the weighted pixel that won. The number of samples is piecewise constant.
    """
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
            op.Slice(start, [axis], [axis + 1], [1]),
            op.Slice(size, [axis], [axis + 1], [1]),
            part(op, shape, 3 - axis, 4 - axis),
            (output_width, output_height)[axis],
            sampling_ratio,
            mean,
        )
        for axis in (0, 1)
    )
    adjoint = mean_adjoint if mean else largest_adjoint
    d_X, d_along_y, d_along_x = adjoint(op, op.as_type(d_Y, kind), X, batch_indices, height.taps, width.taps)
    ends = width.adjoint(op, d_along_x), height.adjoint(op, d_along_y)
    d_start, d_size = (op.Concat(*pair, axis=1) for pair in zip(*ends, strict=True))
    if not half_pixel:
        d_size = op.Where(op.GreaterOrEqual(extent, 1), d_size, 0)
    d_rois = op.Mul(op.Concat(op.Sub(d_start, d_size), d_size, axis=1), spatial_scale)
    return d_X, op.as_type(d_rois, op.type(rois))


@rule("MaxRoiPool", wrt=["X"])
def max_roi_pool(op: Emitter, d_Y: str, X: str, rois: str, pooled_shape: Sequence[int], spatial_scale: float) -> str:
    """dX = dY added at the first largest pixel of each bin; the corners of the regions are rounded"""
    kind = work_type(op, X)
    regions = op.as_type(rois, kind)
    batch = op.Cast(op.Squeeze(op.Slice(regions, [0], [1], [1]), [1]), to=TensorProto.INT64)
    scaled = op.Mul(op.Slice(regions, [1], [5], [1]), spatial_scale)
    corners = op.Mul(op.Sign(scaled), op.Floor(op.Add(op.Abs(scaled), 0.5)))
    shape = op.shape_of(X)
    height, width = (
        make_pixels(
            op,
            start := op.Slice(corners, [axis], [axis + 1], [1]),
            op.Max(op.Add(op.Sub(op.Slice(corners, [axis + 2], [axis + 3], [1]), start), 1), 1),
            part(op, shape, 3 - axis, 4 - axis),
            pooled_shape[1 - axis],
        )
        for axis in (1, 0)
    )
    return largest_adjoint(op, op.as_type(d_Y, kind), X, batch, height, width)[0]
