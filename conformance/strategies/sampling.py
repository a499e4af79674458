"""Strategies of the operators that read between pixels. No point lies at a kink: a pixel, halfway between two, the border."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from refgrad.conformance.case import Case
from refgrad.conformance.strategies.convolution import group_or_absent, groups
from refgrad.conformance.strategies.drawing import STEP, Drawing, Shape, strategy
from refgrad.conformance.strategies.windows import batch, windows


@strategy("GridSample")
def grid_sample(d: Drawing) -> Case:
    """Every mode and padding, for images of any rank. Before opset 20 images have two axes, and the modes other names."""
    older = d.opset < 20
    image = tuple(d.integer(2, 4) for _ in range(2 if older else d.pick(2, 2, 1, 3)))
    points = tuple(d.integer(1, 2) for _ in image)
    if d.rarely():
        points = (0, *points[1:])
    modes = ("bilinear", "nearest", "bicubic") if older else ("linear", "nearest", "cubic")
    number, aligned = batch(d), d.pick(None, 0, 1)
    axes = []
    for n in reversed(image):
        at = _off_pixels(d, (number, *points), -3, n + 2)
        axes.append(2 * at / (n - 1) - 1 if aligned else (2 * at + 1) / n - 1)
    grid = np.stack(axes, -1).astype(d.dtype)
    padding = d.pick(None, "zeros", "border", "reflection")
    x = d.floats((number, d.integer(1, 2), *image))
    return d.case(x, grid, mode=d.pick(None, *modes), padding_mode=padding, align_corners=aligned)


def _off_pixels(d: Drawing, shape: Shape, low: int, high: int) -> np.ndarray:
    """Float64 numbers from `low` to `high`, each at least `STEP` away from every multiple of 1/2."""
    steps = np.array([1, 2, 3, 5, 6, 7])[d.integers(shape, 0, 5)]
    return np.asarray(d.integers(shape, low, high - 1) + STEP * steps)


@strategy("DeformConv")
def deform_conv(d: Drawing) -> Case:
    """Groups of channels and of offsets, a mask and a bias, windows as of Conv without auto_pad."""
    over = windows(d, d.pick(2, 2, 1, 3), padding=False)
    group, channels, filters = groups(d)
    offset_group = d.pick(*(n for n in range(1, group * channels + 1) if group * channels % n == 0))
    number, elements = batch(d), offset_group * prod(over.kernel)
    offset = _off_pixels(d, (number, elements * len(over.image), *over.counts), -2, 2).astype(d.dtype)
    return d.case(
        d.floats((number, group * channels, *over.image)),
        d.floats((group * filters, channels, *over.kernel)),
        offset,
        d.optional(lambda: d.floats((group * filters,))),
        d.optional(lambda: d.floats((number, elements, *over.counts))),
        fixed=["W"],
        group=group_or_absent(d, group),
        offset_group=None if offset_group == 1 and not d.flag() else offset_group,
        **(over.attributes(d, d.flag()) | {"auto_pad": None}),
    )


@strategy("RoiAlign", oldest=16)
def roi_align(d: Drawing) -> Case:
    """Means and maxima over regions inside the image, across its border, and with swapped corners."""
    x, regions, images = _regions(d)
    bins: dict[str, Any] = {name: d.pick(None, 1, 2) for name in ("output_height", "output_width")}
    return d.case(
        *(d.normal(x), regions, images),
        mode=d.pick(None, "avg", "max"),
        coordinate_transformation_mode=d.pick(None, "half_pixel", "output_half_pixel"),
        sampling_ratio=d.pick(None, 0, 1, 2),
        spatial_scale=d.pick(None, 1.0, 0.75),
        **bins,
    )


@strategy("MaxRoiPool", kinks=True)
def max_roi_pool(d: Drawing) -> Case:
    """Maxima over regions. Their corners are rounded to pixels, and the index of the image is truncated."""
    x, regions, images = _regions(d)
    rois = np.concatenate([images[:, None].astype(d.dtype) + d.scalar(0.5), regions], 1)
    pooled = [d.integer(1, 2), d.integer(1, 2)]
    return d.case(d.distinct(x), rois, pooled_shape=pooled, spatial_scale=d.pick(None, 1.0, 0.5))


def _regions(d: Drawing) -> tuple[Shape, np.ndarray, np.ndarray]:
    """The shape of the images, the corners of the regions, far from halves, and the image of each region."""
    x = (d.integer(1, 2), d.integer(1, 2), d.integer(1, 4), d.integer(1, 4))
    count = 0 if d.rarely() else d.integer(1, 2)
    corners = d.integers((count, 4), -2, 5) + np.random.default_rng(d.integer(0, 99)).uniform(0.06, 0.19, (count, 4))
    return x, corners.astype(d.dtype), d.integers((count,), 0, x[0] - 1)
