"""Operators that onnx.reference lacks, knows in part, or computes in float32, in double."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_grid_sample, op_resize


def erf(z: Any) -> Any:
    """The integral 2/√π·∫ e^(−t²) dt, from Re z on by Gauss's quadrature (Abramowitz & Stegun 7.1.1)."""
    real = np.vectorize(math.erf, otypes=[np.float64])(np.real(z))
    if not np.iscomplexobj(z):
        return real
    nodes, weights = np.polynomial.legendre.leggauss(8)
    points = z.real[..., None] + 0.5j * z.imag[..., None] * (1 + nodes)
    return real + 1j / math.sqrt(math.pi) * z.imag * np.sum(weights * np.exp(-points * points), axis=-1)


class Erf(OpRun):
    """In double: onnx.reference computes it in float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (erf(x),)


class Gelu(OpRun):
    """x·Φ(x), or its approximation by tanh: the body has constants in float32, and onnx.reference its own Erf."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str) -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (x / 2 * (1 + erf(x / math.sqrt(2))),)


class GlobalLpPool(OpRun):
    """(Σ |x|^p)^(1/p) over the axes behind the second: onnx.reference has none."""

    op_domain = ""

    def _run(self, x: np.ndarray, p: int) -> tuple[np.ndarray]:
        return (np.sum(np.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class AffineGrid(OpRun):
    """θ·(x, y, 1) at the points of a grid over [−1, 1]: in double, where onnx.reference uses float32."""

    op_domain = ""

    def _run(self, theta: np.ndarray, size: np.ndarray, align_corners: int) -> tuple[np.ndarray]:
        spans = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in size[2:].tolist()]
        points = np.stack([*np.meshgrid(*spans, indexing="ij")[::-1], np.ones(size[2:])], axis=-1)
        return (np.einsum("...k,njk->n...j", points, theta),)


class MaxRoiPool(OpRun):
    """The largest elements of a grid of cells over each region, its corners rounded: onnx.reference has none."""

    op_domain = ""

    def _run(
        self, x: np.ndarray, rois: np.ndarray, pooled_shape: Sequence[int], spatial_scale: float
    ) -> tuple[np.ndarray]:
        pooled = np.zeros((len(rois), x.shape[1], *pooled_shape))
        for k, (image, *corners) in enumerate(rois):
            left, top, right, bottom = (math.floor(c * spatial_scale + 0.5) for c in corners)
            spans = [
                _cells(begin, end, count, size)
                for begin, end, count, size in zip((top, left), (bottom, right), pooled_shape, x.shape[2:], strict=True)
            ]
            for (i, rows), (j, columns) in itertools.product(*map(enumerate, spans)):
                cell = x[int(image), :, slice(*rows), slice(*columns)]
                if cell.size:
                    pooled[k, :, i, j] = cell.max(axis=(1, 2))
        return (pooled,)


def _cells(begin: int, end: int, count: int, size: int) -> list[tuple[int, int]]:
    """The places, within `size` elements, at which `count` cells from `begin` to `end`, this one included, begin and end."""
    width = max(end - begin + 1, 1) / count
    bounds = [(math.floor(k * width) + begin, math.ceil((k + 1) * width) + begin) for k in range(count)]
    return [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in bounds]


class ConvTranspose(OpRun):
    """Each element of x adds its kernel to the output: onnx.reference knows no bias of groups, and one filter for each."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        auto_pad: str,
        group: int,
        dilations: Sequence[int] | None,
        kernel_shape: Sequence[int] | None,
        output_padding: Sequence[int] | None,
        output_shape: Sequence[int] | None,
        pads: Sequence[int] | None,
        strides: Sequence[int] | None,
    ) -> tuple[np.ndarray]:
        kernel, filters, channels, rank = w.shape[2:], w.shape[1], x.shape[1] // group, x.ndim - 2
        strides, dilations = (tuple(given or [1] * rank) for given in (strides, dilations))
        reach = [s * (n - 1) + 1 for n, s in zip(x.shape[2:], strides, strict=True)]
        spans = zip(reach, kernel, dilations, output_padding or [0] * rank, strict=True)
        full = [max(r + (k - 1) * d + more, 0) for r, k, d, more in spans]
        begins, ends = _transposed_pads(x.shape[2:], full, strides, auto_pad, output_shape, pads)
        made = np.zeros((x.shape[0], filters * group, *full), np.result_type(x, w))
        for g, place in itertools.product(range(group), np.ndindex(*kernel)):
            of, to = slice(g * channels, (g + 1) * channels), slice(g * filters, (g + 1) * filters)
            at = tuple(slice(p * d, p * d + r, s) for p, d, r, s in zip(place, dilations, reach, strides, strict=True))
            made[:, to, *at] += np.einsum("ni...,io->no...", x[:, of], w[of, :, *place])
        made = made[:, :, *(slice(b, n - e) for n, b, e in zip(full, begins, ends, strict=True))]
        return (made if bias is None else made + bias.reshape(-1, *[1] * rank),)


def _transposed_pads(
    sizes: Sequence[int],
    full: Sequence[int],
    strides: Sequence[int],
    auto_pad: str,
    results: Sequence[int] | None,
    pads: Sequence[int] | None,
) -> tuple[Sequence[int], Sequence[int]]:
    """How much is cut off before and behind along each axis of a transposed convolution of `full` size."""
    if not results and not auto_pad.startswith("SAME"):
        pads = pads or [0] * 2 * len(sizes)
        return pads[: len(sizes)], pads[len(sizes) :]
    results = list(results or [n * s for n, s in zip(sizes, strides, strict=True)])[-len(sizes) :]
    totals = [n - result for n, result in zip(full, results, strict=True)]
    if min(totals) < 0:
        raise NotImplementedError("an output_shape larger than what the kernels reach")
    begins = [total // 2 if auto_pad == "SAME_UPPER" else total - total // 2 for total in totals]
    return begins, [total - begin for total, begin in zip(totals, begins, strict=True)]


class Resize(op_resize.Resize):
    """Axis by axis, a matrix of weights: onnx.reference is slow, and cubic in float32. It has the other coordinates."""

    op_domain = ""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, roi: Any = None, scales: Any = None, sizes: Any = None, **attributes: Any
    ) -> tuple[np.ndarray]:
        where = attributes["coordinate_transformation_mode"]
        if where not in _COORDINATES or (attributes.get("keep_aspect_ratio_policy") or "stretch") != "stretch":
            return super()._run(x, roi, scales, sizes, **attributes)  # type: ignore[no-any-return]
        for k, axis in enumerate(attributes.get("axes") or range(x.ndim)):
            size = x.shape[axis]
            scale = float(scales[k]) if sizes is None else int(sizes[k]) / size
            length = math.floor(size * scale) if sizes is None else int(sizes[k])
            weights = np.zeros((length, size))
            for place in range(length):
                at = _COORDINATES[where](place, scale, size, length)
                for j, weight in _taps(at, scale, size, attributes).items():
                    weights[place, min(max(j, 0), size - 1)] += weight
            x = np.moveaxis(np.tensordot(weights, np.moveaxis(x, axis, 0), 1), 0, axis)
        return (x,)


def _taps(at: float, scale: float, size: int, attributes: dict[str, Any]) -> dict[int, float]:
    """The weights of the elements around a point, which add up to 1; some may lie outside."""
    mode = attributes["mode"]
    if mode == "nearest":
        return {_NEAREST[attributes["nearest_mode"] or "round_prefer_floor"](at): 1.0}
    width = min(scale, 1.0) if attributes.get("antialias") else 1.0
    reach = math.ceil((1 if mode == "linear" else 2) / width) + 1
    taps = range(math.floor(at) - reach, math.floor(at) + reach + 1)
    found = {j: _kernel(mode, abs(j - at) * width, attributes["cubic_coeff_a"]) for j in taps}
    if attributes["exclude_outside"]:
        found = {j: weight for j, weight in found.items() if 0 <= j < size}
    return {j: weight / sum(found.values()) for j, weight in found.items()}


def _kernel(mode: str, d: float, a: float) -> float:
    """The weight of a point at a distance: a triangle, or the cubic convolution of Keys (1981)."""
    if mode == "linear":
        return max(1 - d, 0.0)
    if d <= 1:
        return ((a + 2) * d - (a + 3)) * d * d + 1
    return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a if d < 2 else 0.0


_COORDINATES: dict[str, Callable[[int, float, int, int], float]] = {
    "half_pixel": lambda i, scale, size, length: (i + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda i, scale, size, length: (i + 0.5) / scale - 0.5 if length > 1 else 0.0,
    "asymmetric": lambda i, scale, size, length: i / scale,
    "align_corners": lambda i, scale, size, length: i * (size - 1) / (size * scale - 1) if size * scale != 1 else 0.0,
}
_NEAREST: dict[str, Callable[[float], int]] = {
    "round_prefer_floor": lambda x: math.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: math.floor(x + 0.5),
    "floor": math.floor,
    "ceil": math.ceil,
}


class GridSample(op_grid_sample.GridSample):
    """Linear and nearest in double: onnx.reference finds the points in float32. It has the cubic mode."""

    op_domain = ""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, grid: np.ndarray, mode: str, padding_mode: str, align_corners: int
    ) -> tuple[np.ndarray]:
        if "cubic" in mode:
            return super()._run(x, grid, mode, padding_mode, align_corners)  # type: ignore[no-any-return, no-untyped-call]
        sizes, at = x.shape[2:], []
        for size, place in zip(sizes, np.moveaxis(grid, -1, 0)[::-1], strict=True):
            point = (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2
            low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
            if padding_mode == "reflection":
                span = max(high - low, 1e-300)
                point = high - np.abs((point - low) % (2 * span) - span)
            at.append(np.clip(point, 0, size - 1) if padding_mode == "border" else point)
        result = np.zeros((*x.shape[:2], *grid.shape[1:-1]), x.dtype)
        for corner in np.ndindex(*[1 if mode == "nearest" else 2] * len(sizes)):
            pixels = [
                np.rint(p) if mode == "nearest" else np.floor(p) + side for p, side in zip(at, corner, strict=True)
            ]
            weight = np.ones(grid.shape[:-1])
            for p, pixel, size in zip(at, pixels, sizes, strict=True):
                weight = weight * (1 if mode == "nearest" else 1 - np.abs(p - pixel))
                weight = np.where((pixel >= 0) & (pixel < size) | (padding_mode != "zeros"), weight, 0)
            inside = [np.clip(p, 0, size - 1).astype(np.int64) for p, size in zip(pixels, sizes, strict=True)]
            for image in range(x.shape[0]):
                result[image] += weight[image] * x[image][:, *(p[image] for p in inside)]
        return (result,)


OPERATORS: list[Any] = [AffineGrid, ConvTranspose, Erf, Gelu, GlobalLpPool, GridSample, MaxRoiPool, Resize]
