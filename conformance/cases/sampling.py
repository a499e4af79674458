"""Cases of the operators that read between pixels. No point lies at a kink: a pixel, halfway between two, the border."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case, node_case

_PADDINGS = ("zeros", "border", "reflection")


def cases() -> Iterator[Case]:
    """Every mode, on static, symbolic and unknown shapes."""
    for shapes in SHAPES:
        for mode, padding_mode, align_corners in product(("linear", "nearest", "cubic"), _PADDINGS, (0, 1)):
            chosen: dict[str, Any] = {
                "mode": mode,
                "padding_mode": padding_mode,
                "align_corners": align_corners,
                "shapes": shapes,
            }
            yield _grid_sample((2, 2, 3, 4), (2, 3), opset=22, **chosen)
            if align_corners and shapes != "symbolic":
                yield _grid_sample((1, 2, 2, 3, 3), (2, 1, 2), opset=20, **chosen)
                yield _grid_sample((2, 1, 4), (5,), opset=22, **chosen)
        for x, points in (
            ((0, 2, 3, 4), (2, 3)),
            ((2, 2, 3, 4), (0, 3)),
            ((2, 0, 3, 4), (2, 3)),
            ((1, 2, 1, 1), (2, 3)),
        ):
            yield _grid_sample(x, points, opset=22, padding_mode="reflection", shapes=shapes)
        yield from _deform_convs(shapes)
        yield from _rois(shapes)
    for mode, padding_mode in (("bilinear", "border"), ("nearest", "zeros"), ("bicubic", "reflection")):
        for shapes in ("static", "unknown"):
            yield _grid_sample((2, 2, 3, 4), (2, 3), opset=16, mode=mode, padding_mode=padding_mode, shapes=shapes)


def _off_pixels(rng: np.random.Generator, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Numbers from `low` to `high`, each at least 0.1 away from every multiple of 1/2."""
    away = rng.uniform(0.1, 0.4, shape) + rng.choice([0.0, 0.5], shape)
    return np.asarray(rng.integers(low, high, shape) + away)


def _grid_sample(
    x: tuple[int, ...], points: tuple[int, ...], opset: int, align_corners: int = 0, **arguments: Any
) -> Case:
    rng = np.random.default_rng(prod(x))
    axes = []
    for n in reversed(x[2:]):
        at = _off_pixels(rng, (x[0], *points), -3, n + 2)
        axes.append(2 * at / (n - 1) - 1 if align_corners else (2 * at + 1) / n - 1)
    X, grid = rng.standard_normal(x).astype(np.float32), np.stack(axes, -1).astype(np.float32)
    return node_case("GridSample", X, grid, opset=opset, align_corners=align_corners, **arguments)


def _deform_convs(shapes: str) -> Iterator[Case]:
    yield _deform_conv((2, 2, 4, 5), (2, 2, 2, 3), mask=False, bias=False, opset=19, shapes=shapes)
    yield _deform_conv((2, 4, 4, 5), (6, 2, 2, 2), shapes=shapes, group=2, offset_group=4, pads=[1, 0, 2, 1])
    yield _deform_conv((1, 2, 6, 5), (2, 1, 2, 2), mask=False, shapes=shapes, group=2, strides=[2, 1], dilations=[1, 2])
    yield _deform_conv((2, 4, 4, 3), (2, 4, 2, 2), shapes=shapes, offset_group=2)
    yield _deform_conv((2, 2, 6), (3, 2, 3), bias=False, shapes=shapes, offset_group=2, pads=[1, 1], kernel_shape=[3])
    yield _deform_conv((1, 1, 3, 2, 3), (1, 1, 2, 2, 1), shapes=shapes, pads=[0, 1, 0, 1, 0, 0])
    yield _deform_conv((0, 2, 4, 5), (2, 2, 2, 3), shapes=shapes)


def _deform_conv(
    x: tuple[int, ...],
    w: tuple[int, ...],
    mask: bool = True,
    bias: bool = True,
    opset: int = 22,
    offset_group: int = 1,
    **attributes: Any,
) -> Case:
    rng = np.random.default_rng(prod(w))
    rank = len(x) - 2
    pads = np.reshape(attributes.get("pads", [0] * (2 * rank)), (2, rank)).sum(0)
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    axes = zip(x[2:], w[2:], pads.tolist(), strides, dilations, strict=True)
    out = [(n + p - (k - 1) * d - 1) // s + 1 for n, k, p, s, d in axes]
    elements = offset_group * prod(w[2:])
    offset = _off_pixels(rng, (x[0], elements * rank, *out), -2, 2).astype(np.float32)
    return node_case(
        "DeformConv",
        rng.standard_normal(x).astype(np.float32),
        rng.standard_normal(w).astype(np.float32),
        offset,
        rng.standard_normal(w[0]).astype(np.float32) if bias else None,
        rng.uniform(0.2, 1, (x[0], elements, *out)).astype(np.float32) if mask else None,
        opset=opset,
        offset_group=offset_group,
        **attributes,
    )


# Inside, across the border, far outside, smaller than a pixel, larger than the image, with swapped corners.
_REGIONS = np.array(
    [
        [1.13, 0.87, 7.41, 5.29],
        [-1.57, 2.31, 4.19, 9.93],
        [30.3, 20.2, 37.7, 25.1],
        [2.17, 3.23, 2.71, 3.67],
        [-4.43, -3.37, 15.71, 13.39],
        [6.83, 5.57, 3.11, 2.47],
    ],
    np.float32,
)
_IMAGES = np.array([0, 1, 1, 0, 1, 0])


def _rois(shapes: str) -> Iterator[Case]:
    X = np.random.default_rng(5).permutation(2 * 2 * 5 * 6).reshape(2, 2, 5, 6).astype(np.float32) * 0.1 - 5.93
    bins: dict[str, Any] = {"output_height": 3, "output_width": 2, "spatial_scale": 0.75}
    for mode, place, ratio in product(("avg", "max"), ("half_pixel", "output_half_pixel"), (0, 2)):
        chosen: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": place, "sampling_ratio": ratio}
        yield node_case("RoiAlign", X, _REGIONS, _IMAGES, opset=16, shapes=shapes, **bins, **chosen)
    for mode in ("avg", "max"):
        yield node_case("RoiAlign", X, _REGIONS[:1], _IMAGES[:1], opset=22, shapes=shapes, mode=mode)
        yield node_case("RoiAlign", X, _REGIONS[:0], _IMAGES[:0], opset=22, shapes=shapes, mode=mode, **bins)
        # No samples at all
        yield node_case("RoiAlign", X, _REGIONS[5:], _IMAGES[5:], opset=22, shapes=shapes, mode=mode, **bins)
    rois = np.concatenate([_IMAGES[:, None].astype(np.float32) + 0.5, _REGIONS], 1)  # image indices are truncated
    for scale, opset in ((1.0, 16), (0.5, 22)):
        yield node_case("MaxRoiPool", X, rois, opset=opset, shapes=shapes, pooled_shape=[3, 2], spatial_scale=scale)
    yield node_case("MaxRoiPool", X, rois[:0], opset=22, shapes=shapes, pooled_shape=[3, 2])
