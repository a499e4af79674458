"""Resize and AffineGrid: linear, with weights that the operator itself computes when it is given an identity matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import join, part, product
from refgrad.formulas.resize import resize_adjoints
from refgrad.tables.registry import QUANTIZED, rule

QUANTIZED.add(("", "Resize"))


@rule("Resize", wrt=["X", "roi", "scales"], settings=["roi", "scales"])
def resize(
    op: Emitter,
    d_Y: str,
    X: str,
    roi: str | None,
    scales: str | None,
    sizes: str | None,
    **attributes: Any,
) -> tuple[str, str | None, str | None]:
    """dX = dY·Wᵀ along each axis, W = Resize(identity matrix); dscales, droi = Σ dW·(slope of W at the points that are read)

    Y is linear in X, one axis at a time. What is extrapolated is a constant: there W is 0. The scale moves the points, and
    with antialias it widens the filter; the number of elements of Y is piecewise constant. In tf_crop_and_resize the roi
    moves the points, and the scale does not. At a kink the slope is that towards a larger scale or roi: a smaller scale may
    take an element off Y. In mode "nearest" both are 0, and so is the derivative by what Resize does not read.
    """
    by_roi, by_scales = (value is not None and op.is_needed(value) for value in (roi, scales))
    return resize_adjoints(op, d_Y, X, roi, scales, sizes, by_roi, by_scales, **attributes)


@rule("AffineGrid", wrt=["theta"])
def affine_grid(op: Emitter, d_grid: str, theta: str, size: str, align_corners: int) -> str:
    """dθ = Σ_points d_grid · (x, y, …, 1), over the points of the grid of the identity matrix"""
    shape = op.shape_of(theta)
    batch, rank = part(op, shape, 0, 1), part(op, shape, 1, 2)
    number = np.zeros(1, np.float64 if op.type(theta) == TensorProto.DOUBLE else np.float32)
    eye = op.Unsqueeze(op.EyeLike(op.full(part(op, shape, 1, 3), 0.0, like=op.const(number))), [0])
    pixels = part(op, size, 2, None)
    grid = op.AffineGrid(eye, join(op, op.const([1, 1]), pixels), align_corners=align_corners)
    count = product(op, pixels)
    points = op.Reshape(grid, join(op, count, rank), allowzero=1)
    ones = op.full(join(op, count, op.const([1])), 1.0, like=points)
    columns = op.as_type(op.Concat(points, ones, axis=1), op.type(theta))
    rows = op.Transpose(op.Reshape(d_grid, join(op, batch, count, rank), allowzero=1), perm=[0, 2, 1])
    return op.MatMul(rows, columns)
