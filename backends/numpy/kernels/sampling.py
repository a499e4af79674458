"""Reading an image between its pixels: GridSample, AffineGrid, DeformConv."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from refgrad.backends.numpy.kernels.windows import make_windows
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
        pixels = np.take_along_axis(flat, index.reshape(n, 1, -1), 2).reshape(Y.shape)
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


@kernel("GridSample", in_float32=True)
def grid_sample(X: np.ndarray, grid: np.ndarray, *, align_corners: int, mode: str, padding_mode: str) -> np.ndarray:
    """X at the points of `grid` (N, out..., rank), whose last axis is (x, y, ...) in −1..1 from border to border."""
    size = X.shape[2:]
    low = 0.0 if align_corners else -0.5
    high = [n - 1 - low for n in size]
    at = []
    for axis, (n, top) in enumerate(zip(size, high, strict=True)):
        unit = grid[..., len(size) - 1 - axis]
        x = (unit + 1) / 2 * (n - 1) if align_corners else ((unit + 1) * n - 1) / 2
        if mode == "nearest":
            x = np.rint(x)
        outside = (x < low) | (x > top)
        if padding_mode == "border":
            x = np.where(outside, x.clip(0, n - 1), x)
        elif padding_mode == "reflection":
            x = np.where(outside, _reflected(x, low, top), x)
        at.append(x)
    return interpolate(X, at, mode, padding_mode, low, high)


@kernel("AffineGrid", in_float32=True)
def affine_grid(theta: np.ndarray, size: np.ndarray, *, align_corners: int) -> np.ndarray:
    """Points (N, out..., rank): θ (N, rank, rank + 1) times the (x, y, ..., 1) of each pixel, in −1..1."""
    spatial = size[2:].tolist()
    axes = [
        np.linspace(-1, 1, n, dtype=theta.dtype) if align_corners else (2 * np.arange(n, dtype=theta.dtype) + 1) / n - 1
        for n in spatial
    ]
    mesh = np.meshgrid(*axes, indexing="ij")[::-1]
    points = np.stack([*mesh, np.ones(spatial, theta.dtype)])
    grid = theta @ points.reshape(len(points), -1)
    return np.moveaxis(grid.reshape(len(theta), len(spatial), *spatial), 1, -1)


@kernel("DeformConv", in_float32=True)
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
