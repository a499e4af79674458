"""ONNX Runtime's readings of an image between its pixels."""

from __future__ import annotations

import math

import numpy as np

from refgrad.backends.numpy.kernels import sampling
from refgrad.backends.numpy.kernels.operands import check_indices
from refgrad.extend import Arguments, kernel_of_body
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray


@kernel_of_body("GridSample", domain=MICROSOFT, fresh=True)
def grid_sample(args: Arguments) -> Array:
    """GridSample of ai.onnx for images of two axes"""
    return sampling.grid_sample(
        args.X, args.Grid, align_corners=args.align_corners, mode=args.mode, padding_mode=args.padding_mode
    )


@kernel_of_body("CropAndResize", domain=MICROSOFT, in_float32=True, fresh=True)
def crop_and_resize(args: Arguments) -> Array:
    """One point after the other, between the four pixels around it or at the nearest one"""
    if (args.crop_size < 1).any():
        raise ValueError(f"crop_size is {args.crop_size.tolist()}; both numbers are 1 or more")
    check_indices(args.batch_indices, len(args.X), "batch_indices", lowest=0)
    sizes, tops = args.crop_size.tolist(), [n - 1 for n in args.X.shape[2:]]
    Y = np.full((len(args.rois), args.X.shape[1], *sizes), args.extrapolation_value, args.X.dtype)
    for region, (box, image) in enumerate(zip(args.rois, args.X[args.batch_indices], strict=True)):
        for place in np.ndindex(*sizes):
            at = [
                (first + (last - first) * (k / (n - 1) if n > 1 else 0.5)) * top
                for k, n, top, first, last in zip(place, sizes, tops, box[:2], box[2:], strict=True)
            ]
            if not all(0 <= x <= top for x, top in zip(at, tops, strict=True)):
                continue
            if args.mode == "nearest":
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
