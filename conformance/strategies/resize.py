"""Strategies of Resize and AffineGrid."""

from __future__ import annotations

from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.drawing import Drawing, strategy

_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize")


@strategy("Resize")
def resize(d: Drawing) -> Case:
    """Every filter at every kind of coordinates, every way to give the sizes, along some axes or all.

    The scales and the roi get gradients only where no kink is near: no scale times a size is whole, and the roi does not
    end at an element.
    """
    newer = d.opset >= 18
    x = d.shape(1, 4, size=4, elements=36)
    axes = d.axes(len(x), least=1) if newer and d.flag() else None
    taken = x if axes is None else tuple(x[axis] for axis in axes)
    coordinates = d.pick(None, *_COORDINATES, *(["half_pixel_symmetric"] if d.opset >= 19 else []))
    crop = coordinates == "tf_crop_and_resize"
    moved = d.flag()
    starts, ends = ((0.13, -0.31), (0.83, 1.23)) if moved else ((0, 0.13, -0.3), (1, 0.8, 1.2))
    roi = np.array([*(d.pick(*starts) for _ in taken), *(d.pick(*ends) for _ in taken)]) if crop else None
    scales = sizes = None
    attributes: dict[str, Any] = {}
    if d.flag():
        scales = np.array([d.pick(*((1.3, 1.7, 0.57) if moved else (1, 2, 1.7, 0.6, 0.5))) for _ in taken], np.float32)
    else:
        sizes = np.array([d.integer(1, 6) if n else 0 for n in taken], np.int64)
        if newer and all(taken) and not crop:
            attributes["keep_aspect_ratio_policy"] = d.pick(None, "stretch", "not_larger", "not_smaller")
    given = {"roi": roi, "scales": scales, "sizes": sizes}
    wrt = ["X", *(name for name in ("roi", "scales") if moved and given[name] is not None)]
    return d.case(
        d.floats(x),
        None if roi is None else roi.astype(np.float32),
        *(scales, sizes),
        fixed=[name for name, array in given.items() if array is not None and name not in wrt],
        wrt=wrt,
        axes=axes,
        coordinate_transformation_mode=coordinates,
        extrapolation_value=d.pick(None, 2.0) if crop else None,
        **(attributes | _filter(d, newer)),
    )


def _filter(d: Drawing, newer: bool) -> dict[str, Any]:
    """The mode and the attributes that it has; antialias since opset 18."""
    mode = d.pick(None, "nearest", "linear", "cubic")
    if mode in (None, "nearest"):
        return {"mode": mode, "nearest_mode": d.pick(None, *_NEAREST)}
    chosen: dict[str, Any] = {"mode": mode, "antialias": d.pick(None, 0, 1) if newer else None}
    if mode == "cubic" or chosen["antialias"]:
        chosen["exclude_outside"] = d.pick(None, 0, 1)
    return chosen | ({"cubic_coeff_a": d.pick(None, -0.5)} if mode == "cubic" else {})


@strategy("AffineGrid")
def affine_grid(d: Drawing) -> Case:
    """Of images of two and three axes."""
    rank = d.integer(2, 3)
    batch = 0 if d.rarely() else d.integer(1, 2)
    size = np.array([batch, d.integer(1, 2), *(d.integer(2, 3) for _ in range(rank))], np.int64)
    return d.case(d.floats((batch, rank, rank + 1)), size, fixed=["size"], align_corners=d.pick(None, 0, 1))
