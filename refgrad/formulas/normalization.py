"""The gradients of normalizations. x̂ = (x − mean)·r is the normalized input, r = 1/√(var + ε)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.types import widest

_PRODUCTS = (TensorProto.FLOAT, TensorProto.DOUBLE)  # what runtimes multiply fast and accurately


def channels(op: Emitter, *values: str) -> list[str]:
    """Values of one shape as they are, or where the rank of any is unknown all with their spatial axes in one: (N, C, S)."""
    if all(op.rank(value) is not None for value in values):
        return list(values)
    return [_flat(op, value) for value in values]


def _flat(op: Emitter, X: str) -> str:
    size = op.ReduceProd(op.Shape(X, start=2), keepdims=1)
    return op.Reshape(X, op.Concat(op.Shape(X, end=2), size, axis=0), allowzero=1)


def channel_axes(op: Emitter, x: str) -> list[int]:
    """The axes over which the elements of a channel of `channels(X)` lie: batch and space."""
    rank = op.rank(x)
    return [0, *range(2, 3 if rank is None else rank)]


def along_channels(op: Emitter, per_channel: str, axes: Sequence[int]) -> str:
    """(C) so that it broadcasts along the spatial ones of `axes`, (0, 2, 3, ...)."""
    return op.Unsqueeze(per_channel, [axis - 1 for axis in axes[1:]]) if len(axes) > 1 else per_channel


def statistics(op: Emitter, x: str, axes: Sequence[int], epsilon: float) -> tuple[str, str]:
    """The mean of `x` over `axes`, which stay, and r = 1/√(var + ε)."""
    over = op.const(list(axes))
    mean = op.reduce("ReduceMean", x, over)
    centred = op.Sub(x, mean)
    var = op.reduce("ReduceMean", op.Mul(centred, centred), over)
    return mean, op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))


def by_statistics(
    op: Emitter,
    d_y: str,
    x: str,
    scale: str,
    mean: str,
    r: str,
    axes: Sequence[int],
    shared: Sequence[int],
) -> tuple[str, str, str]:
    """The cotangents of x, scale and B: `mean` and `r` are of `x` over `axes`, scale and B the same over `shared`.

    With c = x − mean: dx = scale·r·(dy − c·r²·mean(dy·c) − mean(dy)), dscale = r·Σ dy·c, dB = Σ dy. No product leaves the
    range of float32 where x̂ does not; the range of float16 is too small for r² and for the sums.
    """
    along, over = list(axes), list(shared)
    centred = op.Sub(x, mean)
    product = op.Mul(d_y, centred)
    slope, total = op.ReduceSum(product, along), op.ReduceSum(d_y, along)
    share = fraction(op, x, mean, axes)
    r = finite(op, r, x, axes)
    d_scale = op.ReduceSum(op.Mul(slope, r), over, keepdims=0)
    d_B = op.ReduceSum(total, over, keepdims=0)
    factor = op.Mul(along_channels(op, scale, shared), r)
    d_x = op.Sub(d_y, op.Mul(centred, op.Mul(op.Mul(op.Mul(slope, share), r), r)))
    return op.Mul(op.Sub(d_x, op.Mul(total, share)), factor), d_scale, d_B


def fraction(op: Emitter, x: str, mean: str, axes: Sequence[int]) -> str | float:
    """1/n, where `mean` has the means of n elements of `x` along `axes`."""
    count = _count(op, x, axes)
    return 1 / count if count else op.share(x, mean, like=x)


def finite(op: Emitter, r: str, x: str, axes: Sequence[int]) -> str:
    """r of `x` over `axes`, 0 where these have no elements: there it is NaN, and the sums that it multiplies are 0."""
    return r if _count(op, x, axes) else op.Where(op.Equal(op.Size(x), 0), 0.0, r)


def _count(op: Emitter, x: str, axes: Sequence[int]) -> int:
    """The number of elements of `x` along `axes`, 0 where it is not known."""
    shape = op.shape(x)
    sizes = [dim for axis in axes if isinstance(dim := shape[axis], int)] if shape is not None else []
    return math.prod(sizes) if len(sizes) == len(axes) else 0


def by_rows(
    op: Emitter, dY: str, centred: str, X: str, Scale: str, r: str, *, has_mean: bool
) -> tuple[str, str] | None:
    """dX and dScale of `by_normalized`, for x̂ = c·r along the last axis. Its size is known, and `Scale` has as many elements.

    With s = Scale/n: dX = r·(dY·Scale − dY·s − c·r²·((dY·c)·s)), where a product with s, a column, is the mean along the
    axis of a product with Scale; dScale = rᵀ(dY·c). None where it is not of this form. `has_mean`: c is x − mean, else x.
    """
    shape, kind = op.shape(X), op.type(centred)
    size = shape[-1] if shape else None
    if (
        kind not in _PRODUCTS
        or not isinstance(size, int)
        or size < 2
        or op.shape(Scale) != (size,)
        or 0 in (shape or ())
    ):
        return None
    d_y, scale = op.as_type(dY, kind), op.as_type(Scale, kind)
    column = op.Reshape(op.Mul(scale, 1 / size), [size, 1])
    product = op.Mul(d_y, centred)
    rows = product if len(shape or ()) == 2 else op.Reshape(product, [-1, size])
    d_scale = op.MatMul(op.Reshape(r, [-1]), rows)
    slope = op.Mul(op.Mul(op.MatMul(product, column), r), r)
    rest = op.Sub(op.Mul(d_y, scale), op.Mul(centred, slope))
    if has_mean:
        rest = op.Sub(rest, op.MatMul(d_y, column))
    return op.as_type(op.Mul(rest, r), op.type(X)), op.as_type(d_scale, op.type(Scale))


def by_normalized(
    op: Emitter,
    dY: str,
    normalized: str,
    X: str,
    Scale: str,
    InvStdDev: str,
    axis: int,
    centred: bool,
    B: str | None = None,
) -> tuple[str, str, str]:
    """With g = dY·Scale: dX as in `through_statistics`, dScale = Σ dY·x̂, dB = Σ dY over the axes before `axis`.

    Without `B`, dB has the shape of `Scale`.
    """
    kinds, rank, shape, wide = (op.type(X), op.type(Scale)), op.rank(X), op.shape(X), widest(op, normalized, InvStdDev)
    dY, scale, r, normalized = (op.as_type(value, wide) for value in (dY, Scale, InvStdDev, normalized))
    g, d_scale = op.Mul(dY, scale), op.Mul(dY, normalized)
    if rank is None:  # the axes from `axis` on as one row
        g, normalized, r = (op.Flatten(value, axis=axis) for value in (g, normalized, r))
        dX = op.reshape_like(through_statistics(op, g, normalized, r, [1], centred), X)
    else:
        dX = through_statistics(op, g, normalized, r, list(range(axis % rank, rank)), centred)
    for value in (dY, d_scale):
        if shape is not None:
            op.assume(value, shape)
    d_scale, d_B = (
        op.grad.BroadcastGradient(value, like, (like, value)) for value, like in ((d_scale, Scale), (dY, B or Scale))
    )
    return op.as_type(dX, kinds[0]), op.as_type(d_scale, kinds[1]), op.as_type(d_B, kinds[1])


def through_statistics(op: Emitter, g: str, normalized: str, r: str, axes: Sequence[int], centred: bool = True) -> str:
    """dx = r·(g − mean(g) − x̂·mean(g·x̂)), where g is the cotangent of x̂ and the means are over `axes`, the statistics'.

    Where x̂ = x·r is not `centred`, mean(g) does not occur.
    """
    along = op.const(list(axes))
    mean = op.reduce("ReduceMean", g, along) if centred else None
    slope = op.reduce("ReduceMean", op.Mul(g, normalized), along)
    rest = g if mean is None else op.Sub(g, mean)
    return op.Mul(op.Sub(rest, op.Mul(normalized, slope)), r)
