"""Cases of ONNX Runtime's readings of an image between its pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import array, case, drawer


def cases() -> Iterator[Case]:
    """Every mode and padding; boxes inside the image, partly outside, turned over, and none."""
    floats = drawer(10)
    X = floats(2, 2, 4, 5)
    grid = array([[[-0.73, 0.21], [0.34, -0.56], [1.27, 0.13]], [[0.11, -1.38], [0.62, 0.43], [-0.17, 0.91]]])[:, None]
    rois = array([[0.166, 0.21, 0.81, 0.93], [0.52, -0.31, 1.33, 0.41], [0.93, 0.82, 0.14, 0.23]])
    places, size = np.array([0, 1, 1], np.int32), np.array([3, 2], np.int32)
    for shapes in SHAPES:
        modes = ("bilinear", "nearest", "bicubic") if shapes == "static" else ("bilinear",)
        for mode in modes:
            for padding in ("zeros", "border", "reflection"):
                settings: dict[str, Any] = {
                    "mode": mode,
                    "padding_mode": padding,
                    "align_corners": int(mode == "nearest"),
                }
                yield case("GridSample", X, grid, shapes=shapes, **settings)
        yield case("GridSample", X[:0], grid[:0], shapes=shapes)
        name = "CropAndResize"
        yield case(name, X, rois, places, size, shapes=shapes, extrapolation_value=-1.5)
        yield case(name, X, rois, places, size, shapes=shapes, mode="nearest")
        yield case(name, X, rois[:1], places[:1], np.array([1, 4], np.int32), shapes=shapes)
        yield case(name, X, rois[:0], places[:0], size, shapes=shapes)
    whole = array([[0, 0, 1, 1], [0.5, 1, 0, 0.5], [1, 0.25, 1, 0]])  # to the borders, which are inside
    yield case("CropAndResize", X, whole, places, size, constant=["batch_indices", "crop_size"], wrt=("X",))
