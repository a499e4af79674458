"""Reading an image between its pixels: GridSample, DeformConv, RoiAlign; and MaxRoiPool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from refgrad.backends.numpy.kernels.operands import check_indices, check_shape, widened
from refgrad.backends.numpy.kernels.windows import make_windows
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel

Ints = list[int] | None
Tap = tuple[np.ndarray, np.ndarray]
_CUBIC_ALPHA = -0.75


def interpolate(
    X: np.ndarray, at: Sequence[np.ndarray], mode: str, padding: str, low: float, high: Sequence[float]
) -> np.ndarray:
    """X (N, C, spatial...) at one coordinate (N, out...) per spatial axis, to (N, C, out...).

    `low` and `high` are the borders that "reflection" reflects at; "zeros" is 0 outside the pixels.
    """
    size = X.shape[2:]
    n, c = X.shape[:2]
    flat = X.reshape(n, c, math.prod(size))
    width = {"nearest": 1, "linear": 2, "bilinear": 2}.get(mode, 4)
    need(at[0].size * ((2 * width * len(at) + 2) * X.itemsize + 24 + 3 * c * X.itemsize))
    Y = np.zeros((n, c, *at[0].shape[1:]), X.dtype)
    for taps in product(*(_taps(x, mode) for x in at)):
        index = np.zeros(at[0].shape, np.int64)
        weight = np.ones(at[0].shape, X.dtype)
        for (position, share), length, top in zip(taps, size, high, strict=True):
            if padding == "zeros":
                share = np.where((position >= 0) & (position < length), share, 0)
            elif padding == "reflection":
                position = _reflected(position, low, top)
            index = index * length + position.clip(0, length - 1).astype(np.int64)
            weight = weight * share
        pixels = np.take_along_axis(flat, index.reshape(n, 1, math.prod(Y.shape[2:])), 2).reshape(Y.shape)
        Y += pixels * weight[:, None]
    return Y


def _taps(x: np.ndarray, mode: str) -> list[Tap]:
    """Positions and weights of the pixels that a coordinate lies between; Keys' cubic with α = −0.75."""
    if mode == "nearest":
        return [(np.rint(x), np.ones_like(x))]
    base = np.floor(x)
    t = x - base
    if mode in ("linear", "bilinear"):
        return [(base, 1 - t), (base + 1, t)]
    return [(base + i, _keys(np.abs(t - i))) for i in (-1, 0, 1, 2)]


def _keys(d: np.ndarray) -> np.ndarray:
    a = _CUBIC_ALPHA
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.asarray(np.where(d <= 1, near, far))


def _reflected(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """x reflected at `low` and `high` until it lies between them."""
    length = high - low
    if length <= 0:
        return np.full_like(x, low)
    away = np.abs(x - low) % (2 * length)
    return np.asarray(low + np.minimum(away, 2 * length - away))


@kernel("GridSample", fresh=True)
def grid_sample(X: np.ndarray, grid: np.ndarray, *, align_corners: int, mode: str, padding_mode: str) -> np.ndarray:
    """X at the points of `grid` (N, out..., rank), whose last axis is (x, y, ...) in −1..1 from border to border.

    With "cubic" and "border" a point outside is interpolated among the pixels of the border, as in torch and ONNX Runtime.
    """
    size = X.shape[2:]
    if grid.ndim != X.ndim or X.ndim < 3 or grid.shape[0] != X.shape[0] or grid.shape[-1] != len(size):
        expected = "the same ranks and batches, and in the grid a coordinate for each spatial axis of X"
        raise ValueError(f"X {list(X.shape)} and grid {list(grid.shape)} must have {expected}")
    pixels, grid = X.astype(np.float64) if X.dtype.kind in "biu" else widened(X), widened(grid)
    low = 0.0 if align_corners else -0.5
    high = [n - 1 - low for n in size]
    at = []
    for axis, (n, top) in enumerate(zip(size, high, strict=True)):
        unit = grid[..., len(size) - 1 - axis]
        x = (unit + 1) / 2 * (n - 1) if align_corners else ((unit + 1) * n - 1) / 2
        if mode == "nearest":
            x = np.rint(x)
        outside = (x < low) | (x > top)
        if padding_mode == "border" and mode not in ("cubic", "bicubic"):
            x = x.clip(0, n - 1)
        elif padding_mode == "reflection":
            x = np.where(outside, _reflected(x, low, top), x)
        at.append(x)
    return interpolate(pixels, at, mode, padding_mode, low, high).astype(X.dtype, copy=False)


@kernel("DeformConv", in_float32=True, fresh=True)
def deform_conv(
    X: np.ndarray,
    W: np.ndarray,
    offset: np.ndarray,
    B: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    *,
    dilations: Ints = None,
    group: int,
    kernel_shape: Ints = None,
    offset_group: int,
    pads: Ints = None,
    strides: Ints = None,
) -> np.ndarray:
    """Conv whose window elements are moved by `offset` (N, groups·K·rank, O...) and scaled by `mask` (N, groups·K, O...)."""
    windows = make_windows(X.shape[2:], W.shape[2:], strides, dilations, pads)
    n, c = X.shape[:2]
    rank, elements, out = len(windows.size), math.prod(windows.kernel), windows.count
    check_shape("offset", offset.shape, (n, offset_group * elements * rank, *out))
    if mask is not None:
        check_shape("mask", mask.shape, (n, offset_group * elements, *out))
    moved = offset.reshape(n * offset_group, elements, rank, *out)
    at = []
    for axis in range(rank):
        rows = np.stack([windows.positions(tap)[axis] for tap in np.ndindex(*windows.kernel)])
        shape = [1] * rank
        shape[axis] = -1
        at.append(moved[:, :, axis] + rows.reshape(1, elements, *shape))
    images = X.reshape(n * offset_group, c // offset_group, *windows.size)
    samples = interpolate(images, at, "linear", "zeros", 0, windows.size)
    if mask is not None:
        samples = samples * mask.reshape(n * offset_group, 1, elements, *out)
    columns = samples.reshape(n, group, c // group * elements, math.prod(out))
    Y = (W.reshape(group, W.shape[0] // group, columns.shape[2]) @ columns).reshape(n, W.shape[0], *out)
    return Y if B is None else np.asarray(Y + B.reshape(-1, *[1] * rank))


@kernel("RoiAlign", in_float32=True, fresh=True)
def roi_align(
    X: np.ndarray,
    rois: np.ndarray,
    batch_indices: np.ndarray,
    *,
    coordinate_transformation_mode: str = "output_half_pixel",
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> np.ndarray:
    """Mean of the bilinear samples of each bin, or the largest weighted pixel of them, to (regions, C, height, width)."""
    check_shape("rois", rois.shape, (len(batch_indices), 4))
    check_indices(batch_indices, len(X), "batch_indices", lowest=0)
    half_pixel = coordinate_transformation_mode.lower() == "half_pixel"
    corners = rois * rois.dtype.type(spatial_scale) - rois.dtype.type(0.5 if half_pixel else 0)
    Y = np.zeros((len(rois), X.shape[1], output_height, output_width), X.dtype)
    for y, (x0, y0, x1, y1), batch in zip(Y, corners, batch_indices, strict=True):
        image = X[batch]
        sizes = [y1 - y0, x1 - x0]
        if not half_pixel:
            sizes = [max(size, size.dtype.type(1)) for size in sizes]
        taps = [
            _roi_taps(start, size, n, bins, sampling_ratio)
            for start, size, n, bins in zip((y0, x0), sizes, X.shape[2:], Y.shape[2:], strict=True)
        ]
        (rows, across), (columns, along) = taps
        if not rows.size or not columns.size:
            continue
        need(rows.size * columns.size * (2 * len(image) + 1) * X.itemsize)
        pixels = image[:, rows[:, None, :, None], columns[:, None, :]] * (across[:, None, :, None] * along[:, None, :])
        if mode.lower() == "max":
            y[...] = pixels.max((3, 4))
        else:
            y[...] = pixels.sum((3, 4)) / (rows.shape[1] // 2 * (columns.shape[1] // 2))
    return Y


def _roi_taps(start: np.floating, size: np.floating, n: int, bins: int, sampling_ratio: int) -> Tap:
    """Pixels (bins, 2·samples) and their weights, of the samples along one axis; without weight beyond a pixel outside."""
    extent = size / bins
    count = sampling_ratio if sampling_ratio > 0 else max(math.ceil(extent), 0)
    need(bins * count * 10 * max(size.itemsize, 8))
    within = (np.arange(count, dtype=size.dtype) + size.dtype.type(0.5)) * extent / max(count, 1)
    at = start + np.arange(bins, dtype=size.dtype)[:, None] * extent + within
    met = (at >= -1) & (at <= n)
    moved = at.clip(0, n - 1)
    before = np.floor(moved)
    t = moved - before
    pixels = np.concatenate([before, (before + 1).clip(0, n - 1)], 1).astype(np.int64)
    return pixels, np.concatenate([met * (1 - t), met * t], 1)


@kernel("MaxRoiPool", fresh=True)
def max_roi_pool(X: np.ndarray, rois: np.ndarray, *, pooled_shape: list[int], spatial_scale: float) -> np.ndarray:
    """Largest pixel of each bin of the regions (image, x1, y1, x2, y2), whose corners are rounded; 0 in an empty bin."""
    check_shape("rois", rois.shape, (len(rois), 5))
    check_indices(rois[:, 0], len(X), "the images of the rois", lowest=0)
    Y = np.zeros((len(rois), X.shape[1], *pooled_shape), X.dtype)
    wide = rois.astype(np.promote_types(rois.dtype, np.float32))
    scaled = wide[:, 1:] * wide.dtype.type(spatial_scale)
    corners = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
    for y, n, (x0, y0, x1, y1) in zip(Y, wide[:, 0].astype(np.int64), corners, strict=True):
        rows, columns = (
            _roi_edges(start, end, size, bins)
            for start, end, size, bins in zip((y0, x0), (y1, x1), X.shape[2:], pooled_shape, strict=True)
        )
        for i, (top, bottom) in enumerate(rows):
            for j, (left, right) in enumerate(columns):
                if top < bottom and left < right:
                    y[:, i, j] = X[n, :, top:bottom, left:right].max((1, 2))
    return Y


def _roi_edges(start: np.floating, end: np.floating, n: int, bins: int) -> list[tuple[int, int]]:
    """The first pixel and the one after the last of every bin along one axis, inside 0..n."""
    extent = max(end - start + 1, start.dtype.type(1)) / bins
    steps = np.arange(bins + 1, dtype=start.dtype) * extent
    begins, ends = start + np.floor(steps[:-1]), start + np.ceil(steps[1:])
    return list(zip(begins.clip(0, n).astype(int).tolist(), ends.clip(0, n).astype(int).tolist(), strict=True))
