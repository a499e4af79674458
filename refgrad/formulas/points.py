"""Points between the pixels of an image, and the adjoints of reading it there.

Symbols: B images of C channels and S pixels along r axes, P points in each. A point lies between m pixels along an axis
and K = m^r in all. Nothing here needs to know r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product as tuples

import numpy as np
from onnx import TensorProto

from refgrad.formulas.indexing import END, MOST_AXES, WRITTEN_OUT, distances, join, part, product
from refgrad.formulas.windows import typed
from refgrad.reverse.emit import Emitter

_KEYS = -0.75  # the free parameter of the cubic of Keys (1981), as GridSample has it

# The weights of the m pixels around a point at distance t from the one before it: a row of m coefficients per power of t.
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
    """`rows` (B·S, C) holds the channels of a pixel in a row; `sizes` are B, C and S, each on one axis, `lengths` (r)."""

    rows: str
    sizes: tuple[str, str, str]
    lengths: str


@dataclass(frozen=True)
class Corners:
    """The pixels that each point is read from: their rows (B, P, K), weights (B, P, K), and the slopes of these (B, P, K, r).

    The slopes are the derivatives of the weights by the coordinates of the point.
    """

    index: str
    weight: str
    slope: str


def work_type(op: Emitter, *values: str) -> int:
    """The type to compute coordinates in: 16-bit floats cannot tell the pixels of a large image apart."""
    wide = any(op.type(value) == TensorProto.DOUBLE for value in values)
    return TensorProto.DOUBLE if wide else TensorProto.FLOAT


def shaped(op: Emitter, value: str, *sizes: str) -> str:
    """The elements of `value` in a shape that is given in parts; a size may be 0."""
    return op.Reshape(value, join(op, *sizes), allowzero=1)


def make_image(op: Emitter, X: str, kind: int, groups: int = 1) -> Image:
    """`X` (N, groups·C, S...) as N·groups images."""
    shape = op.shape_of(X)
    lengths = part(op, shape, 2, None)
    batch, channels = part(op, shape, 0, 1), part(op, shape, 1, 2)
    if groups != 1:
        batch, channels = product(op, join(op, batch, op.const([groups]))), over(op, channels, groups)
    sizes = batch, channels, product(op, lengths)
    channels_last = op.Transpose(shaped(op, op.as_type(X, kind), *sizes), perm=[0, 2, 1])
    rows = shaped(op, channels_last, _rows_shape(op, sizes))
    return Image(rows, sizes, lengths)


def over(op: Emitter, sizes: str, divisor: int) -> str:
    """Sizes divided by a number, constant where they are."""
    known = op.constant(sizes)
    return op.Div(sizes, [divisor]) if known is None else op.const((known // divisor).tolist())


def _rows_shape(op: Emitter, sizes: tuple[str, str, str]) -> str:
    return join(op, product(op, join(op, sizes[0], sizes[2])), sizes[1])


def from_rows(op: Emitter, rows: str, image: Image, X: str) -> str:
    """Rows (B·S, C) in the shape and type of `X`, which `image` was made of."""
    batch, channels, pixels = image.sizes
    pixels_last = op.Transpose(shaped(op, rows, batch, pixels, channels), perm=[0, 2, 1])
    whole = shaped(op, pixels_last, op.shape_of(X))
    return op.as_type(whole, op.type(X))


def make_corners(
    op: Emitter,
    at: str,
    image: Image,
    rank: int | None,
    mode: str = "linear",
    padding: str = "zeros",
    low: float = 0.0,
    innermost_first: bool = False,
) -> Corners:
    """The pixels around the points `at` (B, P, r), in pixels along the axes of the image, or along them in reverse.

    Outside are 0 with padding "zeros", the pixels of the border with "border", and with "reflection" those that the image has
    when it is folded at `low` and at its length − 1 − `low`. At a pixel the slopes of the linear weights are those towards
    the next one, and 0 at the border with the latter two: torch's choice.
    """
    lengths, strides = image.lengths, distances(op, image.lengths, rank)
    if innermost_first:
        lengths, strides = reverse(op, lengths), reverse(op, strides)
    length = op.Cast(lengths, to=op.type(at))
    last = op.Sub(length, 1)
    high = op.Sub(last, low)
    if mode == "nearest":
        at = op.Round(at)
    x, sign = _held(op, at, last, low, high, mode, padding)
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
        folded, _ = _reflect(op, position, low, op.Unsqueeze(high, [1]))
        position = op.Where(_beyond(op, position, low, op.Unsqueeze(high, [1])), folded, position)
    if sign is not None:
        slope = op.Mul(slope, op.Unsqueeze(sign, [3]))
    position = op.Cast(op.Min(op.Max(position, 0), end), to=TensorProto.INT64)
    index = op.Mul(position, op.Unsqueeze(strides, [1]))
    return _combined(op, image, index, weight, slope, width, rank)


def _held(op: Emitter, at: str, last: str, low: float, high: str, mode: str, padding: str) -> tuple[str, str | None]:
    """The position at which the image is read instead of `at`, and its derivative by `at`; None if it is `at` itself."""
    if padding == "border" and mode != "cubic":
        between = op.And(op.Greater(at, 0), op.Less(at, last))
        return op.Min(op.Max(at, 0), last), op.Cast(between, to=op.type(at))
    if padding != "reflection":
        return at, None
    folded, backwards = _reflect(op, at, low, high)
    x = op.Where(_beyond(op, at, low, high), folded, at)
    sign = op.Where(backwards, op.const(-1.0, like=at), 1)
    if mode != "cubic":  # whose pixels are reflected too: its slope at the border is that of the image
        sign = op.Where(op.And(op.Greater(x, 0), op.Less(x, last)), sign, 0)
    return x, sign


def _combined(op: Emitter, image: Image, index: str, weight: str, slope: str, width: int, rank: int | None) -> Corners:
    """Of the pixels along each axis (B, P, r, m) every tuple: indices add up, weights multiply."""
    if rank is not None and (rank > MOST_AXES or width**rank * rank > WRITTEN_OUT):
        rank = None  # there are m^r tuples, and a model may have any r: the run counts them
    if rank is None:
        axes = op.Range(0, op.length(image.lengths), 1)
        powers = op.Pow(op.const(width, like=axes), axes)
        count = op.Pow(op.const(width, like=axes), op.length(image.lengths))
        digits = op.Mod(op.Div(op.Unsqueeze(op.Range(0, count, 1), [1]), powers), width)
        taken = op.Add(digits, op.Mul(axes, width))
        same = op.Equal(op.Unsqueeze(axes, [0]), op.Unsqueeze(axes, [1]))
    else:
        taken = op.const(np.array(list(tuples(range(width), repeat=rank)), np.int64) + width * np.arange(rank))
        same = op.const(np.eye(rank, dtype=bool))

    ends = op.Mul(op.Shape(image.lengths), [width]) if rank is None else op.const([width * rank])

    def chosen(values: str) -> str:
        """(B, P, r, m) to (B, P, K, r)"""
        return op.Gather(shaped(op, values, op.Shape(values, start=0, end=2), ends), taken, axis=2)

    def multiplied(values: str, axis: int) -> str:
        return op.Squeeze(op.reduce("ReduceProd", values, op.const([axis])), [axis])

    batch, _, pixels = image.sizes
    begins = op.Mul(op.Range(0, op.Squeeze(batch, [0]), 1), pixels)
    rows = op.Add(op.ReduceSum(chosen(index), [3], keepdims=0), op.Unsqueeze(begins, [1, 2]))
    weights = chosen(weight)
    factors = op.Where(same, op.Unsqueeze(chosen(slope), [3]), op.Unsqueeze(weights, [3]))
    return Corners(rows, multiplied(weights, 3), multiplied(factors, 4))


def read(op: Emitter, image: Image, corners: Corners) -> str:
    """The values (B, P, C) at the points: Σ_K weight·pixel."""
    pixels = op.Gather(image.rows, corners.index, axis=0)
    return op.Squeeze(op.MatMul(op.Unsqueeze(corners.weight, [2]), pixels), [2])


def read_adjoint(op: Emitter, dV: str, image: Image, corners: Corners) -> tuple[str, str]:
    """The adjoints of the rows and of the points, for the cotangent dV (B, P, C) of the values."""
    parts = op.Mul(op.Unsqueeze(dV, [2]), op.Unsqueeze(corners.weight, [3]))
    d_rows = op.grad.GatherGrad(_rows_shape(op, image.sizes), corners.index, parts, axis=0)
    pixels = op.Gather(image.rows, corners.index, axis=0)
    d_weight = op.MatMul(pixels, op.Unsqueeze(dV, [3]))
    return d_rows, op.ReduceSum(op.Mul(d_weight, corners.slope), [2], keepdims=0)


def read_largest_adjoint(
    op: Emitter, dV: str, image: Image, index: str, weight: str, valid: str | None
) -> tuple[str, str]:
    """The adjoints of the rows and of the weights where a value (B, P, C) is the largest weight·pixel of those in `index`.

    `index` and `weight` are (B, P, J). Those that are not `valid` are not looked at; their weights are 0.
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
    read = shaped(op, op.GatherElements(image.rows, row, axis=0), op.Shape(winner))
    return d_rows, op.grad.GatherElementsGrad(op.Mul(dV, read), op.Shape(index), winner, axis=2)


def index_tuples(op: Emitter, shape: str, kind: int) -> str:
    """The index tuples of a tensor of `shape` in order, one in a row (elements, r)."""
    return op.Cast(op.Transpose(op.NonZero(op.full(shape, 1, like=shape)), perm=[1, 0]), to=kind)


def reverse(op: Emitter, values: str) -> str:
    """The elements of a vector, the last one first."""
    known = op.constant(values)
    return op.Slice(values, [-1], [-END], [0], [-1]) if known is None else op.const(known[::-1].tolist())


def _beyond(op: Emitter, x: str, low: float, high: str) -> str:
    return op.Or(op.Less(x, low), op.Greater(x, high))


def _reflect(op: Emitter, x: str, low: float, high: str) -> tuple[str, str]:
    """x reflected at `low` and `high` until it lies between them, and whether it runs against x then."""
    length = op.Sub(high, low)
    period = op.Max(op.Mul(length, 2), 1)  # 0 where there is one pixel, at which every x is
    away = op.Mod(op.Abs(op.Sub(x, low)), period, fmod=1)
    backwards = op.Xor(op.Less(x, low), op.Greater(away, length))
    return op.Add(op.Min(away, op.Sub(period, away)), low), backwards


def _horner(op: Emitter, coefficients: np.ndarray, t: str) -> str:
    """Σ_k coefficients[k]·t^k, shape (..., 1) to (..., m)."""
    value = typed(op, coefficients[-1], like=t)
    for row in coefficients[-2::-1]:
        value = op.Add(op.Mul(value, t), typed(op, row, like=t))
    return value
