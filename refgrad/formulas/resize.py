"""The gradients of Resize: linear in X, with weights W that Resize itself computes when it is given an identity matrix.

Along each axis X is read at points between its elements. The scales and the roi move these points, and with antialias the
scale widens the filter: their cotangents are sums of dW times the slopes of W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.formulas.indexing import WRITTEN_OUT, join, part, product
from refgrad.formulas.types import wide_type
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.definitions import Ints

_HIGHEST = 1024  # rank: onnx infers no tensor of a higher one
_MOST_AXES = 8  # of an input of unknown rank, where the node does not say which axes it resizes
_CLOSE = 2.0**-30  # a point this close to an element lies on it


@dataclass(frozen=True)
class _Sizes:
    """Vectors: the shapes of X and Y, and of each axis in `along` its scale or its size, and its roi where that matters.

    `along` is None where nothing says how many axes there are. `ratio` is None where keep_aspect_ratio_policy stretches, else
    the elements before and after of a short axis for which it would decide as it did. `added` is the number of axes that
    X does not have, before its own, or None.
    """

    before: str
    after: str
    rank: int | None
    along: Ints | None
    scales: str | None
    sizes: str | None
    roi: str | None
    ratio: tuple[str, str] | None = None
    added: str | None = None

    @property
    def last(self) -> int | None:
        """The last axis, where its number is known."""
        return None if self.rank is None else self.rank - 1


def resize_adjoints(
    op: Emitter,
    d_Y: str,
    X: str,
    roi: str | None,
    scales: str | None,
    sizes: str | None,
    by_roi: bool,
    by_scales: bool,
    *,
    antialias: int,
    axes: Ints | None,
    coordinate_transformation_mode: str,
    cubic_coeff_a: float,
    exclude_outside: int,
    keep_aspect_ratio_policy: str,
    mode: str,
    nearest_mode: str,
    **_: Any,
) -> tuple[str, str | None, str | None]:
    """The cotangents of X, the roi and the scales, the latter two only where they are asked for and not zero."""
    if sizes is not None and op.static(sizes) != (0,):
        scales = None
    else:
        sizes = None
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    if not crops:
        roi = None
    by_roi = by_roi and roi is not None and mode != "nearest"
    by_scales = by_scales and scales is not None and mode != "nearest" and bool(antialias or not crops)
    roi_type, scales_type = (op.type(value) if value else 0 for value in (roi, scales))
    roi, scales, sizes = (_vector(op, value) for value in (roi, scales, sizes))
    if roi is not None and roi_type in SIXTEEN_BIT:  # ONNX Runtime reads such a roi only beside an X of its type
        known = op.constant(roi)
        roi = op.const(known.astype(np.float32)) if known is not None else op.Cast(roi, to=TensorProto.FLOAT)
    attributes: dict[str, Any] = {
        "antialias": antialias or None,
        "coordinate_transformation_mode": coordinate_transformation_mode,
        "cubic_coeff_a": cubic_coeff_a,
        "exclude_outside": exclude_outside,
        "mode": mode,
        "nearest_mode": nearest_mode,
    }
    rank = _rank(op, X, d_Y, None if axes is not None else scales or sizes)
    along: Ints | None = axes
    if rank is not None:
        along = range(rank) if axes is None else [axis % rank for axis in axes]
    plan = _Sizes(op.shape_of(X), op.shape_of(d_Y), rank, along, scales, sizes, roi)
    if keep_aspect_ratio_policy != "stretch" and sizes is not None:
        attributes |= {"axes": [2, 3], "keep_aspect_ratio_policy": keep_aspect_ratio_policy}
        plan = replace(plan, ratio=_ratio(op, plan, sizes, keep_aspect_ratio_policy))
    if along is None:
        plan = _lengthened(op, plan)
    kind = op.type(d_Y)
    before = _resized_behind(op, op.as_type(X, kind), plan, attributes) if by_roi or by_scales else []
    moves: list[_Moves] = []
    shape = plan.after
    for k, axis in enumerate(plan.along or ()):
        if before:
            d_W = _pairs(op, before[k], d_Y, plan, shape, axis)
            moves.append(_moved(op, d_W, plan, k, axis, attributes, by_roi, by_scales))
        if _is_kept(op, plan, k, axis):
            continue
        W = op.as_type(_weights(op, plan, k, axis, attributes, kind), kind)
        outer, inner = _around(op, plan, shape, axis)
        d_Y = _weighed(op, d_Y, W, outer, _element(op, shape, axis), inner)
        shape = join(op, outer, _element(op, plan.before, axis), inner)
    d_roi, d_scales = _collected(op, plan, moves)
    return (
        op.reshape_like(d_Y, X),
        None if d_roi is None else op.as_type(d_roi, roi_type),
        None if d_scales is None else op.as_type(d_scales, scales_type),
    )


def _vector(op: Emitter, value: str | None) -> str | None:
    """`value` with one axis even for shape inference, which refuses sizes that may have any."""
    return value if value is None or op.rank(value) is not None else op.Reshape(value, [-1])


def _rank(op: Emitter, X: str, d_Y: str, every: str | None) -> int | None:
    """The number of axes, by the number of scales or sizes where there is one for `every` axis."""
    length = None if every is None else op.static(every)
    if length is not None and length[0] > _HIGHEST:  # it is only declared
        length = None
    ranks = (op.rank(X), op.rank(d_Y), None if length is None else length[0])
    return next((rank for rank in ranks if rank is not None), None)


def _around(op: Emitter, plan: _Sizes, shape: str, axis: int) -> tuple[str, str | None]:
    """The dimensions in `shape` before and behind the axis; None behind the last one."""
    return part(op, shape, 0, axis), None if axis in (-1, plan.last) else part(op, shape, axis + 1, None)


def _weighed(op: Emitter, Y: str, W: str, outer: str, count: str, inner: str | None, forward: bool = False) -> str:
    """Y·Wᵀ along an axis of `count` elements that lies between the axes `outer` and `inner`. In `forward` direction Y·W.

    The result is a matrix, or has three axes: `outer` and `inner` are each flattened into one axis.
    """
    one = op.const([1])
    rows = product(op, join(op, one, outer))
    if inner is None:
        Y = op.Reshape(Y, join(op, rows, count), allowzero=1)
        return op.MatMul(Y, W if forward else op.Transpose(W, perm=[1, 0]))
    columns = product(op, join(op, one, inner))
    Y = op.Reshape(Y, join(op, rows, count, columns), allowzero=1)
    return op.MatMul(op.Transpose(W, perm=[1, 0]) if forward else W, Y)


def _resized_behind(op: Emitter, X: str, plan: _Sizes, attributes: Mapping[str, Any]) -> list[str]:
    """For each axis in `along` X resized along those that come after it there; the shapes are lost."""
    kind, shape, made = op.type(X), plan.before, [X]
    for k, axis in list(enumerate(plan.along or ()))[:0:-1]:
        if not _is_kept(op, plan, k, axis):
            W = op.as_type(_weights(op, plan, k, axis, attributes, kind), kind)
            outer, inner = _around(op, plan, shape, axis)
            X = _weighed(op, X, W, outer, _element(op, plan.before, axis), inner, forward=True)
            shape = join(op, outer, _element(op, plan.after, axis), inner)
        made.append(X)
    return made[::-1]


def _pairs(op: Emitter, X: str, Y: str, plan: _Sizes, shape: str, axis: int) -> str:
    """dW (elements of X, elements of Y) of one axis in double: the products of the two, summed over all other axes.

    `shape` is the shape of Y.
    """
    one = op.const([1])
    outer, inner = _around(op, plan, shape, axis)
    size, count = _element(op, plan.before, axis), _element(op, plan.after, axis)
    rows, columns = product(op, join(op, one, outer)), one if inner is None else product(op, join(op, one, inner))
    others = product(op, join(op, rows, columns))
    sides = []
    for value, length in ((X, size), (Y, count)):
        value = op.Reshape(op.as_type(value, wide_type(op, value)), join(op, rows, length, columns), allowzero=1)
        sides.append(op.Reshape(op.Transpose(value, perm=[1, 0, 2]), join(op, length, others), allowzero=1))
    return op.as_type(op.MatMul(sides[0], op.Transpose(sides[1], perm=[1, 0])), TensorProto.DOUBLE)


def _is_kept(op: Emitter, plan: _Sizes, k: int, axis: int) -> bool:
    """True if it is known that W is an identity matrix."""
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
            return op.Resize(eye, roi, factors, sizes, **attributes)
        resized = op.Resize(op.Unsqueeze(eye, [0, 2]), roi, factors, sizes, **attributes)
        return op.Gather(op.Gather(resized, op.const(0), axis=0), op.const(0), axis=1)
    assert plan.sizes is not None
    count = _element(op, plan.sizes, k)
    short, shortened = plan.ratio
    images = op.Expand(op.Unsqueeze(eye, [0, 3]), join(op, op.const([1]), size, size, short))
    resized = op.Resize(images, roi, None, join(op, count, shortened), **attributes)
    W = op.Gather(op.Gather(resized, op.const(0), axis=0), op.const(0), axis=2)
    return op.Slice(W, [0], _element(op, plan.after, axis), [1])  # an axis that `_lengthened` added keeps its size


def _changes(op: Emitter, plan: _Sizes, axis: int) -> bool:
    """True if it is known that the axis changes its size."""
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
        return op.Concat(op.Expand(op.const([value], like=vector), more), vector, axis=0)

    roi = plan.roi
    if roi is not None:
        starts, ends = op.Slice(roi, [0], rank), op.Slice(roi, rank, op.Shape(roi))
        roi = op.Concat(longer(starts, 0), longer(ends, 1), axis=0)
    return replace(
        plan,
        before=longer(plan.before, 1),
        after=longer(plan.after, 1),
        rank=_MOST_AXES,
        added=more,
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
    return op.const([known_dim]) if isinstance(known_dim, int) else op.Gather(vector, [k])


# By what moves the points


@dataclass(frozen=True)
class _Moves:
    """The cotangents of the scale and of the ends of the roi of one axis, each on an axis of size 1; None where not needed."""

    scale: str | None
    ends: tuple[str, str] | None


@dataclass(frozen=True)
class _Points:
    """The positions at which X is read along one axis, in double: `at` for each element of Y, and its derivatives.

    `last` is the last element of X. `by_scale` is None where the scale does not move the points, `by_ends` where there is no
    roi. `stretch` is the factor of the distances that antialias has, and `by_stretch` its derivative by the scale.
    """

    at: str
    last: str
    by_scale: str | None
    by_ends: tuple[str, str] | None
    stretch: str | None
    by_stretch: str | None


def _moved(
    op: Emitter,
    d_W: str,
    plan: _Sizes,
    k: int,
    axis: int,
    attributes: Mapping[str, Any],
    by_roi: bool,
    by_scales: bool,
) -> _Moves:
    """The cotangents of the scale and the roi of one axis, by the chain rule from the cotangents of its points and stretch."""
    points = _points(op, plan, k, axis, attributes)
    d_scale = d_ends = None
    if by_scales:
        terms = []
        d_at, d_stretch = _slopes(op, d_W, points, attributes, points.by_scale, points.by_stretch)
        if points.by_scale is not None:
            terms.append(op.Mul(d_at, points.by_scale))
        if points.by_stretch is not None:
            terms.append(op.Mul(d_stretch, points.by_stretch))
        d_scale = op.ReduceSum(terms[0] if len(terms) == 1 else op.Add(*terms), [0], keepdims=1)
    if by_roi and points.by_ends is not None:
        d_at, _ = _slopes(op, d_W, points, attributes, op.const(np.ones(1)), None)
        start, end = (op.ReduceSum(op.Mul(d_at, by), [0], keepdims=1) for by in points.by_ends)
        d_ends = start, end
    return _Moves(d_scale, d_ends)


def _points(op: Emitter, plan: _Sizes, k: int, axis: int, attributes: Mapping[str, Any]) -> _Points:
    """The coordinates that the schema of Resize gives, as the interpreter and onnx.reference compute them."""
    elements = [_element(op, shape, axis) for shape in (plan.before, plan.after)]
    size, count = (_double(op, value) for value in elements)
    numbers = op.constant(elements[1])
    if numbers is not None and int(numbers[0]) <= WRITTEN_OUT:
        y = op.const(np.arange(int(numbers[0]), dtype=np.float64))
    else:
        y = _double(op, op.Range(0, op.Squeeze(elements[1], [0]), 1))
    last, scale = op.Sub(size, 1), _scale(op, plan, k, size)
    by_scale = by_ends = stretch = by_stretch = None
    coordinates = attributes["coordinate_transformation_mode"]
    if coordinates == "tf_crop_and_resize":
        assert plan.roi is not None
        assert plan.along is not None
        start, end = (_double(op, _element(op, plan.roi, place)) for place in (k, k + len(plan.along)))
        step = op.Where(op.Equal(count, 1), 0.5, y)
        steps = op.Max(op.Sub(count, 1), 1)
        at = op.Add(op.Mul(start, last), op.Div(op.Mul(op.Mul(step, op.Sub(end, start)), last), steps))
        later = op.Div(op.Mul(step, last), steps)
        by_ends = op.Sub(last, later), later
    elif coordinates == "align_corners":
        span = op.Sub(op.Mul(size, scale), 1)
        span = op.Where(op.Equal(span, 0), 1, span)
        at = op.Div(op.Mul(y, last), span)
        by_scale = op.Neg(op.Div(op.Mul(at, size), span))
    else:
        shift = {"asymmetric": (0.0, 0.0), "tf_half_pixel_for_nn": (0.5, 0.0)}.get(coordinates, (0.5, 0.5))
        from_origin = op.Add(y, shift[0]) if shift[0] else y
        moved: str | float = shift[1]
        if coordinates == "half_pixel_symmetric":
            from_origin, moved = op.Sub(from_origin, op.Div(count, 2)), op.Neg(op.Div(last, 2))
        far = op.Div(from_origin, scale)
        at = op.Sub(far, moved) if moved else far
        by_scale = op.Neg(op.Div(far, scale))
        if coordinates == "pytorch_half_pixel":
            several = _double(op, op.Greater(count, 1))
            at, by_scale = op.Mul(at, several), op.Mul(by_scale, several)
    if attributes["antialias"]:
        stretch, by_stretch = op.Min(scale, 1), _double(op, op.Less(scale, 1))
    return _Points(at, last, by_scale, by_ends, stretch, by_stretch)


def _scale(op: Emitter, plan: _Sizes, k: int, size: str) -> str:
    """The scale of one axis in double: the given one, or the quotient of the sizes."""
    if plan.scales is not None:
        return _double(op, _element(op, plan.scales, k))
    if plan.ratio is not None:
        short, shortened = (_double(op, value) for value in plan.ratio)
        return op.Div(shortened, short)
    assert plan.sizes is not None
    return op.Div(_double(op, _element(op, plan.sizes, k)), op.Max(size, 1))


def _slopes(
    op: Emitter,
    d_W: str,
    points: _Points,
    attributes: Mapping[str, Any],
    moves: str | None,
    grows: str | None,
) -> tuple[str, str]:
    """The cotangents of the points and of the stretch, one for each element of Y, from dW.

    `moves` and `grows` are the derivatives of the two by what changes: at a kink they choose the side. Rows are the elements
    of X that a point reads, columns the elements of Y. Where the weights are normalised, w = f/Σf and dw = df·(1 − Σw)/Σf.
    """
    support = 1 if attributes["mode"] == "linear" else 2
    crops = points.by_ends is not None
    if points.stretch is None:
        taps = np.arange(1.0 - support, 1 + support)[:, None]
        offsets, side = op.const(taps), op.const(np.where(taps > 0, -1.0, 1.0))
    else:
        reach = op.Squeeze(op.Ceil(op.Div(op.const(np.full(1, float(support))), points.stretch)), [0])
        offsets = op.Unsqueeze(op.Range(op.Sub(1, reach), op.Add(reach, 1), 1), [1])
        side = op.Where(op.Greater(offsets, 0), op.const(np.array(-1.0)), 1)
    below = op.Floor(points.at if moves is None else op.Add(points.at, _nudge(op, moves)))
    if crops:
        below = op.Min(below, op.Sub(points.last, 1))  # what lies further is extrapolated
    position = op.Add(below, offsets)
    taken = op.Cast(op.Max(op.Min(position, points.last), 0), to=TensorProto.INT64)
    d_weights = op.GatherElements(d_W, taken, axis=0)
    from_point = op.Mul(op.Sub(points.at, position), side)
    distance = from_point if points.stretch is None else op.Mul(from_point, points.stretch)
    weights, slopes = _filter(op, distance, attributes, support)
    if support == 1 and points.stretch is not None:
        by = [op.Mul(op.Mul(side, moves), points.stretch)] if moves is not None else []
        by += [op.Mul(from_point, grows)] if grows is not None else []
        leaves = by[0] if len(by) == 1 else op.Add(*by)
        slopes = op.Where(op.Less(op.Add(distance, _nudge(op, leaves)), 1), slopes, 0)
    if attributes["exclude_outside"]:
        inside = op.And(op.GreaterOrEqual(position, 0), op.LessOrEqual(position, points.last))
        weights, slopes = op.Where(inside, weights, 0), op.Where(inside, slopes, 0)
    if attributes["exclude_outside"] or points.stretch is not None:
        total = op.ReduceSum(weights, [0], keepdims=1)
        total = op.Where(op.Equal(total, 0), 1, total)
        mean = op.Div(op.ReduceSum(op.Mul(weights, d_weights), [0], keepdims=1), total)
        d_weights = op.Div(op.Sub(d_weights, mean), total)
    d_distance = op.Mul(d_weights, slopes)
    if crops:
        inside = op.And(op.GreaterOrEqual(points.at, 0), op.LessOrEqual(points.at, points.last))
        d_distance = op.Where(inside, d_distance, 0)
    d_at = op.ReduceSum(op.Mul(d_distance, side), [0], keepdims=0)
    if points.stretch is not None:
        d_at = op.Mul(d_at, points.stretch)
    return d_at, op.ReduceSum(op.Mul(d_distance, from_point), [0], keepdims=0)


def _filter(op: Emitter, distance: str, attributes: Mapping[str, Any], support: int) -> tuple[str, str]:
    """The weights at a distance from the point, and their derivatives. Mode "cubic" has the weights of Keys (1981)."""
    if support == 1:
        return op.Max(op.Sub(1, distance), 0), op.const(np.array(-1.0))
    a = attributes["cubic_coeff_a"]
    near = np.array([1, 0, -(a + 3), a + 2])
    far = np.array([-4 * a, 8 * a, -5 * a, a])
    made = []
    for pieces in ((near, far), (near[1:] * np.arange(1, 4), far[1:] * np.arange(1, 4))):
        inner, outer = (_polynomial(op, piece, distance) for piece in pieces)
        made.append(op.Where(op.Less(distance, 1), inner, op.Where(op.Less(distance, 2), outer, 0)))
    return made[0], made[1]


def _polynomial(op: Emitter, coefficients: np.ndarray, x: str) -> str:
    """Σ c_k·xᵏ by Horner's scheme."""
    value: str | float = float(coefficients[-1])
    for number in coefficients[-2::-1]:
        value = op.Mul(x, value)
        value = op.Add(value, float(number)) if number else value
    return str(value)


def _nudge(op: Emitter, direction: str) -> str:
    """A step that takes a coordinate off an element in this direction."""
    known = op.constant(direction)
    return op.Mul(op.Sign(direction), _CLOSE) if known is None else op.const(np.sign(known) * _CLOSE)


def _double(op: Emitter, value: str) -> str:
    return op.as_type(value, TensorProto.DOUBLE)


def _collected(op: Emitter, plan: _Sizes, moves: Sequence[_Moves]) -> tuple[str | None, str | None]:
    """The cotangents of the roi and of the scales, from the cotangents for each axis in `moves`."""
    parts = [
        [move.ends[0] for move in moves if move.ends is not None],
        [move.ends[1] for move in moves if move.ends is not None],
        [move.scale for move in moves if move.scale is not None],
    ]
    starts, ends, scales = (op.Concat(*found, axis=0) if found else None for found in parts)
    if plan.added is not None:
        starts, ends, scales = (value and op.Slice(value, plan.added, [_MOST_AXES]) for value in (starts, ends, scales))
    return None if starts is None else op.Concat(starts, ends, axis=0), scales
