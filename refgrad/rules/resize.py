"""Resize and AffineGrid: linear, with weights that the operator itself computes when it is given an identity matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.formulas.indexing import join, part, product
from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import QUANTIZED, rule

Ints = Sequence[int] | None

QUANTIZED.add(("", "Resize"))
_MOST_AXES = 8  # of an input of unknown rank, where the node does not say which axes it resizes
_MOVES = "it moves the points at which X is read: the schema says not differentiable, GridSample is in its grid"


@dataclass(frozen=True)
class _Sizes:
    """Vectors: the shapes of X and Y, and of each axis in `along` its scale or its size, and its roi where that matters.

    `along` is None where nothing says how many axes there are. `ratio` is None where keep_aspect_ratio_policy stretches, else
    the elements before and after of a short axis for which it would decide as it did.
    """

    before: str
    after: str
    rank: int | None
    along: Sequence[int] | None
    scales: str | None
    sizes: str | None
    roi: str | None
    ratio: tuple[str, str] | None = None

    @property
    def last(self) -> int | None:
        """The last axis, where its number is known."""
        return None if self.rank is None else self.rank - 1


@rule("Resize", wrt=["X"], refused={"roi": _MOVES, "scales": _MOVES})
def resize(
    op: Emitter,
    d_Y: str,
    X: str,
    roi: str | None,
    scales: str | None,
    sizes: str | None,
    antialias: int,
    axes: Ints,
    coordinate_transformation_mode: str,
    cubic_coeff_a: float,
    exclude_outside: int,
    keep_aspect_ratio_policy: str,
    mode: str,
    nearest_mode: str,
) -> str:
    """dX = dY·Wᵀ along each axis, W = Resize(identity matrix)

    Y is linear in X, one axis at a time. What is extrapolated is a constant: there W is 0.
    """
    if sizes is not None and op.static(sizes) != (0,):
        scales = None
    else:
        sizes = None
    if coordinate_transformation_mode != "tf_crop_and_resize":
        roi = None
    roi, scales, sizes = (_vector(op, value) for value in (roi, scales, sizes))
    attributes: dict[str, Any] = {
        "antialias": antialias or None,
        "coordinate_transformation_mode": coordinate_transformation_mode,
        "cubic_coeff_a": cubic_coeff_a,
        "exclude_outside": exclude_outside,
        "mode": mode,
        "nearest_mode": nearest_mode,
    }
    rank = _rank(op, X, d_Y, None if axes is not None else scales or sizes)
    along: Ints = axes
    if rank is not None:
        along = range(rank) if axes is None else [axis % rank for axis in axes]
    plan = _Sizes(op.shape_of(X), op.shape_of(d_Y), rank, along, scales, sizes, roi)
    if keep_aspect_ratio_policy != "stretch" and sizes is not None:
        attributes |= {"axes": [2, 3], "keep_aspect_ratio_policy": keep_aspect_ratio_policy}
        plan = replace(plan, ratio=_ratio(op, plan, sizes, keep_aspect_ratio_policy))
    if along is None:
        plan = _lengthened(op, plan)
    shape = plan.after
    for k, axis in enumerate(plan.along or ()):
        if _is_kept(op, plan, k, axis):
            continue
        W = op.as_type(_weights(op, plan, k, axis, attributes, op.type(d_Y)), op.type(d_Y))
        outer = part(op, shape, 0, axis)
        inner = None if axis in (-1, plan.last) else part(op, shape, axis + 1, None)
        d_Y = _weighed(op, d_Y, W, outer, _element(op, shape, axis), inner)
        shape = join(op, outer, _element(op, plan.before, axis), inner)
    return op.reshape_like(d_Y, X)


def _vector(op: Emitter, value: str | None) -> str | None:
    """`value` with one axis even for shape inference, which refuses sizes that may have any."""
    return value if value is None or op.rank(value) is not None else str(op.Reshape(value, [-1]))


def _rank(op: Emitter, X: str, d_Y: str, every: str | None) -> int | None:
    """The number of axes, by the number of scales or sizes where there is one for `every` axis."""
    length = None if every is None else op.static(every)
    ranks = (op.rank(X), op.rank(d_Y), None if length is None else length[0])
    return next((rank for rank in ranks if rank is not None), None)


def _weighed(op: Emitter, Y: str, W: str, outer: str, count: str, inner: str | None) -> str:
    """Y·Wᵀ along an axis of `count` elements that lies between the axes `outer` and `inner`; the shape is not that of Y."""
    one = op.const([1])
    rows = product(op, join(op, one, outer))
    if inner is None:
        return str(op.MatMul(op.Reshape(Y, join(op, rows, count), allowzero=1), op.Transpose(W, perm=[1, 0])))
    columns = product(op, join(op, one, inner))
    return str(op.MatMul(W, op.Reshape(Y, join(op, rows, count, columns), allowzero=1)))


def _is_kept(op: Emitter, plan: _Sizes, k: int, axis: int) -> bool:
    """Whether it is known that W is an identity matrix."""
    if plan.ratio is not None:
        return False
    if plan.roi is not None:
        roi = op.constant(plan.roi)
        if roi is None or tuple(roi.reshape(2, -1)[:, k]) != (0, 1):
            return False
    if plan.scales is not None:
        scales = op.constant(plan.scales)
        return scales is not None and bool(scales[k] == 1)
    before, after = op.dims(plan.before), op.dims(plan.after)
    return before is not None and after is not None and before[axis] == after[axis] is not None


def _weights(op: Emitter, plan: _Sizes, k: int, axis: int, attributes: Mapping[str, Any], kind: int) -> str:
    """W of one axis, (elements of X, elements of Y).

    Where the policy lets another axis decide, the scale is more than W can tell by its size: then the identity matrix has a
    second axis behind it, along which it is constant, and which decides the same. Where the axis may keep its size, one before
    it changes its own: ONNX Runtime copies what keeps its shape, whatever the scale and the roi.
    """
    number = np.zeros(1, np.float64 if kind == TensorProto.DOUBLE else np.float32)
    size = _element(op, plan.before, axis)
    eye = op.EyeLike(op.full(join(op, size, size), 0.0, like=op.const(number)))
    alone, roi = _changes(op, plan, axis), None
    if plan.roi is not None and plan.along is not None:
        start, end = (_element(op, plan.roi, place) for place in (k, k + len(plan.along)))
        low, high = (op.const([value] * (1 if alone else 3), like=plan.roi) for value in (0, 1))
        if plan.ratio is None:
            roi = join(op, low, start, high, end)
        else:
            roi = join(op, start, op.const([0], like=plan.roi), end, op.const([1], like=plan.roi))
    if plan.ratio is None:
        factors = sizes = None
        if plan.scales is not None:
            others = op.const(np.array([1] if alone else [1, 1, 2], np.float32))
            factors = join(op, others, _element(op, plan.scales, k))
        elif plan.sizes is not None:
            counts = [size] if alone else [op.const([1]), size, op.const([2])]
            sizes = join(op, *counts, _element(op, plan.sizes, k))
        if alone:
            return str(op.Resize(eye, roi, factors, sizes, **attributes))
        resized = op.Resize(op.Unsqueeze(eye, [0, 2]), roi, factors, sizes, **attributes)
        return str(op.Gather(op.Gather(resized, op.const(0), axis=0), op.const(0), axis=1))
    assert plan.sizes is not None
    count = _element(op, plan.sizes, k)
    short, shortened = plan.ratio
    images = op.Expand(op.Unsqueeze(eye, [0, 3]), join(op, op.const([1]), size, size, short))
    resized = op.Resize(images, roi, None, join(op, count, shortened), **attributes)
    W = op.Gather(op.Gather(resized, op.const(0), axis=0), op.const(0), axis=2)
    return str(op.Slice(W, [0], _element(op, plan.after, axis), [1]))  # an axis that `_lengthened` added keeps its size


def _changes(op: Emitter, plan: _Sizes, axis: int) -> bool:
    """Whether it is known that the axis changes its size."""
    before, after = (op.dims(shape) for shape in (plan.before, plan.after))
    sizes = () if before is None or after is None else (before[axis], after[axis])
    return len({size for size in sizes if isinstance(size, int)}) == 2


def _ratio(op: Emitter, plan: _Sizes, sizes: str, policy: str) -> tuple[str, str]:
    """The sizes before and after of the axis that decides, in lowest terms."""
    lengths = plan.before if plan.along is None else op.Gather(plan.before, list(plan.along))
    ratios = op.Div(*(op.Cast(vector, to=TensorProto.DOUBLE) for vector in (sizes, lengths)))
    decides = (op.ArgMin if policy == "not_larger" else op.ArgMax)(ratios, axis=0)
    short, shortened = op.Gather(lengths, decides), op.Gather(sizes, decides)
    numbers = op.Range(1, op.Add(op.Squeeze(short, [0]), 1), 1)
    divides = op.And(op.Equal(op.Mod(short, numbers), 0), op.Equal(op.Mod(shortened, numbers), 0))
    divisor = op.reduce("ReduceMax", op.Where(divides, numbers, 1), None)
    return op.Div(short, divisor), op.Div(shortened, divisor)


def _lengthened(op: Emitter, plan: _Sizes) -> _Sizes:
    """The same for X with so many axes of size 1 before its own that there are `_MOST_AXES`."""
    rank = op.Shape(plan.before)
    more = op.Sub([_MOST_AXES], rank)

    def longer(vector: str, value: int) -> str:
        return str(op.Concat(op.Expand(op.const([value], like=vector), more), vector, axis=0))

    roi = plan.roi
    if roi is not None:
        starts, ends = op.Slice(roi, [0], rank), op.Slice(roi, rank, op.Shape(roi))
        roi = op.Concat(longer(starts, 0), longer(ends, 1), axis=0)
    return replace(
        plan,
        before=longer(plan.before, 1),
        after=longer(plan.after, 1),
        rank=_MOST_AXES,
        along=range(_MOST_AXES),
        scales=None if plan.scales is None else longer(plan.scales, 1),
        sizes=None if plan.sizes is None else longer(plan.sizes, 1),
        roi=roi,
    )


def _element(op: Emitter, vector: str, k: int) -> str:
    """One element, on an axis whose size onnx can infer."""
    known, dims = op.constant(vector), op.dims(vector)
    if known is not None:
        return op.const(known[[k]])
    known_dim = dims[k] if dims is not None else None
    return op.const([known_dim]) if isinstance(known_dim, int) else str(op.Gather(vector, [k]))


@rule("AffineGrid", wrt=["theta"])
def affine_grid(op: Emitter, d_grid: str, theta: str, size: str, align_corners: int) -> str:
    """dθ = Σ_points d_grid · (x, y, …, 1), the points those of the identity matrix"""
    shape = op.shape_of(theta)
    batch, rank = part(op, shape, 0, 1), part(op, shape, 1, 2)
    number = np.zeros(1, np.float64 if op.type(theta) == TensorProto.DOUBLE else np.float32)
    eye = op.Unsqueeze(op.EyeLike(op.full(part(op, shape, 1, 3), 0.0, like=op.const(number))), [0])
    pixels = part(op, size, 2, None)
    grid = op.AffineGrid(eye, join(op, op.const([1, 1]), pixels), align_corners=align_corners)
    count = product(op, pixels)
    points = op.Reshape(grid, join(op, count, rank), allowzero=1)
    ones = op.full(join(op, count, op.const([1])), 1.0, like=points)
    columns = op.as_type(op.Concat(points, ones, axis=1), op.type(theta))
    rows = op.Transpose(op.Reshape(d_grid, join(op, batch, count, rank), allowzero=1), perm=[0, 2, 1])
    return op.MatMul(rows, columns)
