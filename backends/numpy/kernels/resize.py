"""Resize and Upsample, axis by axis: an element of the result is a weighted sum of a few elements of the input. AffineGrid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from onnx import numpy_helper

from refgrad.backends.numpy.kernels.indexing import add_rows
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import SIXTEEN_BIT, kernel
from refgrad.protos.domains import MICROSOFT

Ints = list[int] | None
Sizes = tuple[list[int], list[float], list[float]]  # counts, scales, widths

_ABOVE = {
    "ceil": (np.greater, 0.0),
    "round_prefer_floor": (np.greater, 0.5),
    "round_prefer_ceil": (np.greater_equal, 0.5),
}


class Axis(NamedTuple):
    """One axis, from `size` elements to `resized` ones; `start` and `end` are its roi.

    `width` is the count that align_corners uses. Where it follows from a scale it is not rounded: the text has scale =
    length_resized / length_original, and onnx's node tests have it so, as intended (onnx/onnx#2462). torch and ONNX Runtime
    round it. tf_crop_and_resize, whose region ends at the last element, counts elements.
    """

    axis: int
    size: int
    resized: int
    scale: float
    width: float
    start: float = 0.0
    end: float = 1.0


class Filter(NamedTuple):
    """How the elements of an axis are weighed: the attributes of Resize that have nothing to do with sizes."""

    mode: str
    coordinates: str
    nearest: str = "floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: int = 0
    antialias: int = 0
    extrapolation: float = 0.0


@kernel("Resize", since=11, fresh=True)
def resize(
    X: np.ndarray,
    roi: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    sizes: np.ndarray | None = None,
    *,
    antialias: int = 0,
    axes: Ints = None,
    coordinate_transformation_mode: str,
    cubic_coeff_a: float,
    exclude_outside: int,
    extrapolation_value: float,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str,
    nearest_mode: str,
) -> np.ndarray:
    """X at the coordinates that the schema gives for every element of the result."""
    how = Filter(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        exclude_outside,
        antialias,
        extrapolation_value,
    )
    chosen = _chosen(axes, X.ndim)
    given = sizes if sizes is not None and sizes.size else scales
    if given is None or given.size != len(chosen):
        raise ValueError(f"it needs scales or sizes of {len(chosen)} elements, one for each axis to resize")
    lengths = [X.shape[axis] for axis in chosen]
    table = _by_sizes(lengths, given, keep_aspect_ratio_policy) if given is sizes else _by_scales(lengths, given)
    return _resized(X, _plan(chosen, lengths, table, roi, how))


@kernel("ResizeGrad", domain=MICROSOFT, in_float32=True, fresh=True)
def resize_grad(
    dY: np.ndarray,
    X: np.ndarray,
    roi: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    *,
    antialias: int = 0,
    axes: Ints = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> np.ndarray:
    """dX = the elements of dY, each by the weight of the element of X in it; extrapolated elements give nothing.

    Without scales, dY gives the sizes. A policy that keeps the aspect ratio has one scale for all axes, which must
    follow from those sizes.
    """
    how = Filter(mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, exclude_outside, antialias)
    chosen = _chosen(axes, X.ndim)
    lengths, counts = [X.shape[axis] for axis in chosen], [dY.shape[axis] for axis in chosen]
    if scales is not None and scales.size:
        table = _by_scales(lengths, scales)
    elif keep_aspect_ratio_policy == "stretch":
        table = _by_sizes(lengths, np.array(counts), "stretch")
    else:
        table = _by_common_scale(lengths, counts)
    if table[0] != counts:
        raise ValueError(f"dY has the sizes {counts} along the axes that are resized, not {table[0]}")
    dX = dY
    for axis, _ in reversed(_plan(chosen, lengths, table, roi, how)):
        dX = _spread(dX, axis, how)
    return dY.copy() if dX is dY else dX


@kernel("Resize", since=10, fresh=True)
@kernel("Upsample", since=9, fresh=True)
def upsample(X: np.ndarray, scales: np.ndarray, *, mode: str) -> np.ndarray:
    """Element i is read at i/scale. "nearest" takes the element below that, or above it where an axis shrinks."""
    lengths = list(X.shape)
    table = zip(range(X.ndim), lengths, *_by_scales(lengths, scales), strict=True)
    below, above = Filter(mode, "asymmetric", "floor"), Filter(mode, "asymmetric", "ceil")
    return _resized(X, [(a, above if a.scale < 1 else below) for a in [Axis(*row) for row in table]])


@kernel("Upsample", since=7, fresh=True)
def upsample_by_attribute(X: np.ndarray, *, mode: str, scales: list[float]) -> np.ndarray:
    """The same, when the scales were an attribute."""
    return upsample(X, np.array(scales, np.float32), mode=mode)


@kernel("Upsample", fresh=True)
def upsample_1(X: np.ndarray, *, mode: str, height_scale: float, width_scale: float) -> np.ndarray:
    """The same of images (N, C, H, W), where "linear" was called "bilinear"."""
    return upsample_by_attribute(X, mode=mode.removeprefix("bi"), scales=[1, 1, height_scale, width_scale])


@kernel("AffineGrid", in_float32=True, fresh=True)
def affine_grid(theta: np.ndarray, size: np.ndarray, *, align_corners: int) -> np.ndarray:
    """Points (N, out..., rank): θ (N, rank, rank + 1) times the (x, y, ..., 1) of each pixel, in −1..1."""
    spatial = size[2:].tolist()
    if theta.shape != (*size[:1].tolist(), len(spatial), len(spatial) + 1) or min(spatial, default=0) < 1:
        raise ValueError(f"theta {list(theta.shape)} does not fit the size {size.tolist()}, (N, C, out...)")
    points = np.ones((len(spatial) + 1, *spatial), theta.dtype)
    for behind, n in enumerate(spatial[::-1]):
        i = np.arange(n, dtype=theta.dtype).reshape(-1, *[1] * behind)
        points[behind] = (2 * i / max(n - 1, 1) if align_corners else (2 * i + 1) / n) - 1
    grid = theta @ points.reshape(len(points), -1)
    return grid.swapaxes(1, 2).reshape(len(theta), *spatial, len(spatial))


def _chosen(axes: Ints, rank: int) -> list[int]:
    return list(range(rank)) if axes is None else [axis % rank for axis in axes]


def _plan(
    chosen: Sequence[int], lengths: Sequence[int], table: Sizes, roi: np.ndarray | None, how: Filter
) -> list[tuple[Axis, Filter]]:
    starts, ends = [0.0] * len(chosen), [1.0] * len(chosen)
    if how.coordinates == "tf_crop_and_resize":
        if roi is None or roi.size != 2 * len(chosen):
            raise ValueError(f"tf_crop_and_resize needs a roi of {2 * len(chosen)} elements")
        starts, ends = roi.astype(np.float64).reshape(2, -1).tolist()
    return [(Axis(*row), how) for row in zip(chosen, lengths, *table, starts, ends, strict=True)]


def _by_scales(lengths: Sequence[int], scales: np.ndarray) -> Sizes:
    """Return counts, scales and widths. The counts are computed in float32, as in shape inference and ONNX Runtime."""
    counts = np.floor(np.array(lengths, np.float32) * scales.astype(np.float32)).astype(np.int64).tolist()
    factors = scales.astype(np.float64).tolist()
    return counts, factors, [n * s for n, s in zip(lengths, factors, strict=True)]


def _by_sizes(lengths: Sequence[int], sizes: np.ndarray, policy: str) -> Sizes:
    counts = sizes.tolist()
    factors = [o / n if n else 1.0 for o, n in zip(counts, lengths, strict=True)]
    if policy != "stretch":
        factors = [(min if policy == "not_larger" else max)(factors)] * len(factors)
        counts = [int(n * s + 0.5) for n, s in zip(lengths, factors, strict=True)]
    return counts, factors, [float(o) for o in counts]


def _by_common_scale(lengths: Sequence[int], counts: list[int]) -> Sizes:
    """The one scale that gives all of `counts`: along one axis it is exact, along the others the counts are rounded."""
    scales = {o / n for o, n in zip(counts, lengths, strict=True) if n}
    fitting = [s for s in scales if [int(n * s + 0.5) for n in lengths] == counts]
    if len(fitting) != 1:
        raise ValueError(f"no one scale makes the sizes {lengths} become {counts}; give the scales")
    return counts, fitting * len(counts), [float(o) for o in counts]


def _resized(X: np.ndarray, plan: Sequence[tuple[Axis, Filter]]) -> np.ndarray:
    Y = X
    if any(how.mode != "nearest" for _, how in plan) and X.dtype not in (np.float32, np.float64):
        Y = X.astype(np.float32 if X.dtype in SIXTEEN_BIT else np.float64)
    extrapolated = []
    for axis, how in plan:
        crop = how.coordinates == "tf_crop_and_resize"
        if axis.resized == axis.size and axis.scale == 1 and not crop:
            continue
        x, index, weights = _read(axis, how)
        Y = _weighed(Y, axis, index, weights)
        if crop:
            outside = (x < 0) | (x > axis.size - 1)
            extrapolated.append((outside.reshape(-1, *[1] * (X.ndim - 1 - axis.axis)), how.extrapolation))
    for outside, value in extrapolated:
        Y = np.where(outside, np.asarray(value, Y.dtype), Y)
    if Y.dtype == X.dtype:
        return X.copy() if Y is X else Y
    return Y.astype(X.dtype) if X.dtype in SIXTEEN_BIT else numpy_helper.saturate_cast(Y, X.dtype)


def _spread(dY: np.ndarray, axis: Axis, how: Filter) -> np.ndarray:
    """The adjoint of one axis of `_resized`: each tap gives its share of dY to the element that it reads."""
    crop = how.coordinates == "tf_crop_and_resize"
    if axis.resized == axis.size and axis.scale == 1 and not crop:
        return dY
    x, index, weights = _read(axis, how)
    rows = np.moveaxis(dY, axis.axis, 0)
    rest = rows.shape[1:]
    rows = rows.reshape(axis.resized, math.prod(rest))
    if crop:
        rows = np.where(((x < 0) | (x > axis.size - 1))[:, np.newaxis], rows.dtype.type(0), rows)
    dX = np.zeros((axis.size, rows.shape[1]), rows.dtype)
    for tap, positions in enumerate(index):
        share = rows if weights is None else rows * weights[tap, :, np.newaxis].astype(rows.dtype)
        dX += add_rows(axis.size, positions, share)
    return np.moveaxis(dX.reshape(axis.size, *rest), 0, axis.axis)


@lru_cache(maxsize=64)
def _read(axis: Axis, how: Filter) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the coordinates of the elements of the result, and what each reads there; nobody may change them."""
    x = _coordinates(axis, how.coordinates)
    index, weights = _taps(x, axis, how)
    for array in (x, index, *(() if weights is None else (weights,))):
        array.flags.writeable = False
    return x, index, weights


def _coordinates(axis: Axis, mode: str) -> np.ndarray:
    """The coordinate of each element of the result among the elements of the input."""
    need(axis.resized * 3 * 8)
    y = np.arange(axis.resized, dtype=np.float64)
    last = axis.size - 1
    if mode == "asymmetric":
        return y / axis.scale
    if mode == "tf_half_pixel_for_nn":
        return (y + 0.5) / axis.scale
    if mode == "align_corners":
        return y * last / (axis.width - 1) if axis.width != 1 else 0 * y
    if mode == "tf_crop_and_resize":
        if axis.resized == 1:
            return y + 0.5 * (axis.start + axis.end) * last
        return axis.start * last + y * (axis.end - axis.start) * last / (axis.resized - 1)
    if mode == "pytorch_half_pixel" and axis.resized == 1:
        return y
    x = (y + 0.5) / axis.scale - 0.5
    return x + (axis.size - axis.resized / axis.scale) / 2 if mode == "half_pixel_symmetric" else x


def _taps(x: np.ndarray, axis: Axis, how: Filter) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the elements that each coordinate reads, (taps, O), and their weights; None for a single one of weight 1.

    Outside the input its first or last element is read. With antialias the filter of a shrunken axis is stretched by
    1/scale.
    """
    below = np.floor(x)
    if how.mode == "nearest":
        if how.nearest != "floor":
            compare, part = _ABOVE[how.nearest]
            below += compare(x - below, part)
        return np.minimum(np.maximum(below, 0), axis.size - 1).astype(np.int64)[None], None
    stretch = min(axis.scale, 1.0) if how.antialias else 1.0
    reach = int(np.ceil((1 if how.mode == "linear" else 2) / stretch))
    need(2 * reach * len(x) * 6 * 8)
    position = below + np.arange(1 - reach, reach + 1)[:, None]
    distance = np.abs(x - position) * stretch
    weights = np.maximum(1 - distance, 0) if how.mode == "linear" else _keys(distance, how.cubic_coeff_a)
    if how.exclude_outside:
        weights = np.where((position >= 0) & (position < axis.size), weights, 0)
    if how.exclude_outside or how.antialias:
        total = weights.sum(0)
        weights = weights / np.where(total == 0, 1, total)
    return position.clip(0, axis.size - 1).astype(np.int64), weights


def _keys(d: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution of Keys (1981), whose second piece has the slope `a` at 1."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.asarray(np.where(d <= 1, near, np.where(d < 2, far, 0)))


def _weighed(X: np.ndarray, axis: Axis, index: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    if weights is None:
        return np.asarray(X.take(index[0], axis.axis))
    Y = np.zeros((*X.shape[: axis.axis], axis.resized, *X.shape[axis.axis + 1 :]), X.dtype)
    for positions, shares in zip(index, weights.astype(X.dtype), strict=True):
        Y += np.take(X, positions, axis.axis) * shares.reshape(-1, *[1] * (X.ndim - 1 - axis.axis))
    return Y
