"""ONNX Runtime's readings of an image between its pixels."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels import sampling
from refgrad.backends.numpy.kernels.operands import check_indices, check_shape
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel("GridSample", domain=MICROSOFT, fresh=True)
def grid_sample(
    X: Array, Grid: Array, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Array:
    """GridSample of ai.onnx for images of two axes"""
    known = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    for name, given, values in zip(("mode", "padding_mode"), (mode, padding_mode), known, strict=True):
        if given not in values:
            raise ValueError(f"{name}={given!r} is not known; there are {', '.join(map(repr, values))}")
    if align_corners not in (0, 1):
        raise ValueError(f"align_corners={align_corners} is not known; there are 0 and 1")
    if X.ndim != 4:
        raise ValueError(f"X has rank {X.ndim}; rank 4 is needed")
    return sampling.grid_sample(X, Grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@kernel("CropAndResize", domain=MICROSOFT, in_float32=True, fresh=True)
def crop_and_resize(
    X: Array,
    rois: Array,
    batch_indices: Array,
    crop_size: Array,
    *,
    extrapolation_value: float = 0.0,
    mode: str = "bilinear",
) -> Array:
    """One point after the other, between the four pixels around it or at the nearest one"""
    if mode not in ("bilinear", "nearest"):
        raise ValueError(f"mode={mode!r} is not known; there are 'bilinear' and 'nearest'")
    if X.ndim != 4:
        raise ValueError(f"X has rank {X.ndim}; rank 4 is needed")
    check_shape("rois", rois.shape, (*rois.shape[:1], 4))
    check_shape("batch_indices", batch_indices.shape, (len(rois),))
    check_shape("crop_size", crop_size.shape, (2,))
    if (crop_size < 1).any():
        raise ValueError(f"crop_size is {crop_size.tolist()}; both numbers are 1 or more")
    check_indices(batch_indices, len(X), "batch_indices", lowest=0)
    sizes, tops = crop_size.tolist(), [n - 1 for n in X.shape[2:]]
    Y = np.full((len(rois), X.shape[1], *sizes), extrapolation_value, X.dtype)
    for region, (box, image) in enumerate(zip(rois, X[batch_indices], strict=True)):
        for place in np.ndindex(*sizes):
            at = [
                (first + (last - first) * (k / (n - 1) if n > 1 else 0.5)) * top
                for k, n, top, first, last in zip(place, sizes, tops, box[:2], box[2:], strict=True)
            ]
            if not all(0 <= x <= top for x, top in zip(at, tops, strict=True)):
                continue
            if mode == "nearest":
                y, x = (math.floor(c + 0.5) for c in at)
                Y[(region, slice(None), *place)] = image[:, y, x]
                continue
            (top, bottom), (left, right) = ((math.floor(c), math.ceil(c)) for c in at)
            upper, lower = (
                image[:, row, left] + (at[1] - left) * (image[:, row, right] - image[:, row, left])
                for row in (top, bottom)
            )
            Y[(region, slice(None), *place)] = upper + (at[0] - top) * (lower - upper)
    return Y
