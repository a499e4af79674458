"""Interpolation of images at points between pixels, and its gradients.

Symbols: B images have C channels and S pixels along r axes, and P points each. A point has m neighbours along each axis, and
K = m^r neighbours in all. No function needs to know r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product as tuples

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import END, MOST_AXES, WRITTEN_OUT, distances, join, part, product
from refgrad.formulas.windows import typed

_KEYS = -0.75  # the free parameter of Keys' cubic (1981), as in GridSample

# The weights of the m neighbours along an axis are polynomials in t, the distance of the point from the pixel before it. A row
# has the m coefficients of one power of t.
_POLYNOMIALS = {
    "nearest": np.array([[1.0], [0.0]]),
    "linear": np.array([[1.0, 0.0], [-1.0, 1.0]]),
    "cubic": np.array(
        [
            [0.0, 1.0, 0.0, 0.0],
            [_KEYS, 0.0, -_KEYS, 0.0],
            [-2 * _KEYS, -(_KEYS + 3), 2 * _KEYS + 3, _KEYS],
            [_KEYS, _KEYS + 2, -(_KEYS + 2), -_KEYS],
        ]
    ),
}


@dataclass(frozen=True)
class Image:
    """B images in the layout that pixels are gathered from."""

    rows: str  # (B·S, C): a row has the channels of a pixel
    sizes: tuple[str, str, str]  # B, C and S, each of shape (1,)
    lengths: str  # (r): the pixels along each axis


@dataclass(frozen=True)
class Neighbours:
    """The pixels that each point is interpolated from."""

    index: str  # (B, P, K): their rows in the image
    weight: str  # (B, P, K)
    slope: str  # (B, P, K, r): the derivatives of the weights by the coordinates of the point


def work_type(op: Emitter, *values: str) -> int:
    """The type to compute coordinates in: double if a value is double, else float. 16 bits are too few for large images."""
    wide = any(op.type(value) == TensorProto.DOUBLE for value in values)
    return TensorProto.DOUBLE if wide else TensorProto.FLOAT


def shaped(op: Emitter, value: str, *sizes: str) -> str:
    """`value` reshaped to the concatenation of `sizes`. A size of 0 means 0."""
    return op.Reshape(value, join(op, *sizes), allowzero=1)


def make_image(op: Emitter, X: str, kind: int, groups: int = 1) -> Image:
    """`X` (N, groups·C, S...) as N·groups images of the element type `kind`."""
    shape = op.shape_of(X)
    lengths = part(op, shape, 2, None)
    batch, channels = part(op, shape, 0, 1), part(op, shape, 1, 2)
    if groups != 1:
        batch, channels = product(op, join(op, batch, op.const([groups]))), divided(op, channels, groups)
    sizes = batch, channels, product(op, lengths)
    channels_last = op.Transpose(shaped(op, op.as_type(X, kind), *sizes), perm=[0, 2, 1])
    rows = shaped(op, channels_last, _rows_shape(op, sizes))
    return Image(rows, sizes, lengths)


def divided(op: Emitter, sizes: str, divisor: int) -> str:
    """Sizes divided by a number. The result is a constant if the sizes are."""
    known = op.constant(sizes)
    return op.Div(sizes, [divisor]) if known is None else op.const((known // divisor).tolist())


def _rows_shape(op: Emitter, sizes: tuple[str, str, str]) -> str:
    return join(op, product(op, join(op, sizes[0], sizes[2])), sizes[1])


def from_rows(op: Emitter, rows: str, image: Image, X: str) -> str:
    """Rows (B·S, C) in the shape and type of `X`, from which `make_image` made `image`."""
    batch, channels, pixels = image.sizes
    pixels_last = op.Transpose(shaped(op, rows, batch, pixels, channels), perm=[0, 2, 1])
    whole = shaped(op, pixels_last, op.shape_of(X))
    return op.as_type(whole, op.type(X))


def make_neighbours(
    op: Emitter,
    at: str,
    image: Image,
    rank: int | None,
    mode: str = "linear",
    padding: str = "zeros",
    low: float = 0.0,
    innermost_first: bool = False,
) -> Neighbours:
    """The neighbours of the points `at`.

    If a point lies on a pixel, the slopes of linear weights point to the next pixel. At the border they are 0 with padding
    "border" and "reflection". torch chooses the same.

    :param at: (B, P, r), in pixels.
    :param padding: the pixels outside of the image. "zeros": 0. "border": the nearest pixel of the border. "reflection": the
        image, reflected at `low` and at its length − 1 − `low`.
    :param innermost_first: the coordinates in `at` have the axes of the image in reverse order.
    """
    lengths, strides = image.lengths, distances(op, image.lengths, rank)
    if innermost_first:
        lengths, strides = reverse(op, lengths), reverse(op, strides)
    length = op.Cast(lengths, to=op.type(at))
    last = op.Sub(length, 1)
    high = op.Sub(last, low)
    if mode == "nearest":
        at = op.Round(at)
    x, sign = _clamped(op, at, last, low, high, mode, padding)
    polynomial = _POLYNOMIALS[mode]
    width = polynomial.shape[1]
    base = x if mode == "nearest" else op.Floor(x)
    t = op.Unsqueeze(op.Sub(x, base), [3])
    first = -1.0 if mode == "cubic" else 0.0
    position = op.Unsqueeze(base, [3])
    if width > 1:
        position = op.Add(position, typed(op, np.arange(width) + first, like=at))
    weight = _horner(op, polynomial, t)
    slope = _horner(op, polynomial[1:] * np.arange(1, len(polynomial))[:, None], t)
    column = op.Unsqueeze(length, [1])
    end = op.Sub(column, 1)
    if padding == "zeros":
        inside = op.And(op.GreaterOrEqual(position, 0), op.Less(position, column))
        weight, slope = op.Where(inside, weight, 0), op.Where(inside, slope, 0)
    elif padding == "reflection" and mode == "cubic":
        reflected, _ = _reflect(op, position, low, op.Unsqueeze(high, [1]))
        position = op.Where(_is_outside(op, position, low, op.Unsqueeze(high, [1])), reflected, position)
    if sign is not None:
        slope = op.Mul(slope, op.Unsqueeze(sign, [3]))
    position = op.Cast(op.Min(op.Max(position, 0), end), to=TensorProto.INT64)
    index = op.Mul(position, op.Unsqueeze(strides, [1]))
    return _combined(op, image, index, weight, slope, width, rank)


def _clamped(op: Emitter, at: str, last: str, low: float, high: str, mode: str, padding: str) -> tuple[str, str | None]:
    """`at` moved into the image by the padding, and its derivative by `at`.

    With "zeros", and with "border" for cubic weights, the point stays where it is: the derivative is None, for 1.
    """
    if padding == "border" and mode != "cubic":
        between = op.And(op.Greater(at, 0), op.Less(at, last))
        return op.Min(op.Max(at, 0), last), op.Cast(between, to=op.type(at))
    if padding != "reflection":
        return at, None
    reflected, falls = _reflect(op, at, low, high)
    x = op.Where(_is_outside(op, at, low, high), reflected, at)
    sign = op.Where(falls, op.const(-1.0, like=at), 1)
    if mode != "cubic":  # cubic weights reflect the neighbours too, so their slope at the border is right
        sign = op.Where(op.And(op.Greater(x, 0), op.Less(x, last)), sign, 0)
    return x, sign


def _combined(
    op: Emitter, image: Image, index: str, weight: str, slope: str, width: int, rank: int | None
) -> Neighbours:
    """The K neighbours of each point: all combinations of its m neighbours along each axis.

    Indices are added, weights multiplied.

    :param index: likewise `weight` and `slope`: along each axis, (B, P, r, m).
    """
    if rank is not None and (rank > MOST_AXES or width**rank * rank > WRITTEN_OUT):
        rank = None  # too many combinations for a constant: the run computes them
    if rank is None:
        axes = op.Range(0, op.length(image.lengths), 1)
        powers = op.Pow(op.const(width, like=axes), axes)
        count = op.Pow(op.const(width, like=axes), op.length(image.lengths))
        digits = op.Mod(op.Div(op.Unsqueeze(op.Range(0, count, 1), [1]), powers), width)
        combinations = op.Add(digits, op.Mul(axes, width))
        is_diagonal = op.Equal(op.Unsqueeze(axes, [0]), op.Unsqueeze(axes, [1]))
    else:
        combinations = op.const(np.array(list(tuples(range(width), repeat=rank)), np.int64) + width * np.arange(rank))
        is_diagonal = op.const(np.eye(rank, dtype=bool))

    ends = op.Mul(op.Shape(image.lengths), [width]) if rank is None else op.const([width * rank])

    def chosen(values: str) -> str:
        """(B, P, r, m) to (B, P, K, r)"""
        return op.Gather(shaped(op, values, op.Shape(values, start=0, end=2), ends), combinations, axis=2)

    def multiplied(values: str, axis: int) -> str:
        return op.Squeeze(op.reduce("ReduceProd", values, op.const([axis])), [axis])

    batch, _, pixels = image.sizes
    begins = op.Mul(op.Range(0, op.Squeeze(batch, [0]), 1), pixels)
    rows = op.Add(op.ReduceSum(chosen(index), [3], keepdims=0), op.Unsqueeze(begins, [1, 2]))
    weights = chosen(weight)
    factors = op.Where(is_diagonal, op.Unsqueeze(chosen(slope), [3]), op.Unsqueeze(weights, [3]))
    return Neighbours(rows, multiplied(weights, 3), multiplied(factors, 4))


def interpolate(op: Emitter, image: Image, neighbours: Neighbours) -> str:
    """The values (B, P, C) at the points: Σ_K weight·pixel."""
    pixels = op.Gather(image.rows, neighbours.index, axis=0)
    return op.Squeeze(op.MatMul(op.Unsqueeze(neighbours.weight, [2]), pixels), [2])


def interpolate_adjoint(op: Emitter, dV: str, image: Image, neighbours: Neighbours) -> tuple[str, str]:
    """The cotangents of the image's rows (B·S, C) and of the points (B, P, r). dV is the cotangent of the values (B, P, C)."""
    parts = op.Mul(op.Unsqueeze(dV, [2]), op.Unsqueeze(neighbours.weight, [3]))
    d_rows = op.grad.GatherGrad(_rows_shape(op, image.sizes), neighbours.index, parts, axis=0)
    pixels = op.Gather(image.rows, neighbours.index, axis=0)
    d_weight = op.MatMul(pixels, op.Unsqueeze(dV, [3]))
    return d_rows, op.ReduceSum(op.Mul(d_weight, neighbours.slope), [2], keepdims=0)


def largest_pixel_adjoint(
    op: Emitter, dV: str, image: Image, index: str, weight: str, valid: str | None
) -> tuple[str, str]:
    """The cotangents of the rows and of the weights, if a value (B, P, C) is the largest of J products weight·pixel.

    :param index: (B, P, J): the rows of the pixels.
    :param weight: (B, P, J).
    :param valid: (B, P, J): False leaves a product out. Its weight is 0.
    """
    pixels = op.Mul(op.Gather(image.rows, index, axis=0), op.Unsqueeze(weight, [3]))
    if valid is not None:
        pixels = op.Where(op.Unsqueeze(valid, [3]), pixels, -math.inf)
    winner = op.ArgMax(pixels, axis=2, keepdims=0)
    flat = join(op, product(op, op.Shape(index, start=0, end=2)), image.sizes[1])
    row = shaped(op, op.GatherElements(index, winner, axis=2), flat)
    d_pixel = op.Mul(dV, op.GatherElements(weight, winner, axis=2))
    shape = _rows_shape(op, image.sizes)
    d_rows = op.grad.GatherElementsGrad(shaped(op, d_pixel, flat), shape, row, axis=0)
    pixel = shaped(op, op.GatherElements(image.rows, row, axis=0), op.Shape(winner))
    return d_rows, op.grad.GatherElementsGrad(op.Mul(dV, pixel), op.Shape(index), winner, axis=2)


def index_tuples(op: Emitter, shape: str, kind: int) -> str:
    """The indices of all elements of a tensor of `shape`, in order: a row of r indices per element."""
    return op.Cast(op.Transpose(op.NonZero(op.full(shape, 1, like=shape)), perm=[1, 0]), to=kind)


def reverse(op: Emitter, values: str) -> str:
    """A vector with its elements in reverse order."""
    known = op.constant(values)
    return op.Slice(values, [-1], [-END], [0], [-1]) if known is None else op.const(known[::-1].tolist())


def _is_outside(op: Emitter, x: str, low: float, high: str) -> str:
    return op.Or(op.Less(x, low), op.Greater(x, high))


def _reflect(op: Emitter, x: str, low: float, high: str) -> tuple[str, str]:
    """x reflected at `low` and `high` until it lies between them, and true if it falls as x rises."""
    length = op.Sub(high, low)
    period = op.Max(op.Mul(length, 2), 1)  # at least 1, for an image of one pixel, whose length is 0
    distance = op.Mod(op.Abs(op.Sub(x, low)), period, fmod=1)
    falls = op.Xor(op.Less(x, low), op.Greater(distance, length))
    return op.Add(op.Min(distance, op.Sub(period, distance)), low), falls


def _horner(op: Emitter, coefficients: np.ndarray, t: str) -> str:
    """Σ_k coefficients[k]·t^k, of shape (..., m) for t of shape (..., 1)."""
    value = typed(op, coefficients[-1], like=t)
    for row in coefficients[-2::-1]:
        value = op.Add(op.Mul(value, t), typed(op, row, like=t))
    return value
