"""Operators on object arrays of `Series`, each as its specification defines it. Nothing here is a derivative.

An operator that is missing is computed by its schema's function body, or by onnx.reference on object arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from refgrad.conformance.case import qualified
from refgrad.conformance.oracles.analytic import windows
from refgrad.conformance.oracles.evaluator import execute
from refgrad.conformance.tools.jets.series import CONTEXT, Series, mpf
from refgrad.protos.types import FLOATS

Forward: TypeAlias = Callable[..., Any]
Axes: TypeAlias = tuple[int, ...] | None


def series(values: Any) -> np.ndarray:
    """An object array of constants."""
    given = np.asarray(values)
    made = np.empty(given.shape, object)
    for place, value in np.ndenumerate(given):
        made[place] = Series.of(value)
    return made


def call(node: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of a node of onnx.reference, object arrays where they depend on a series."""
    if not any(map(_moves, inputs)):
        return execute(node, inputs)
    forward = FORWARDS.get(qualified(node.onnx_node))
    if forward is None:
        return execute(node, inputs)
    results = forward(node, *inputs)
    results = results if isinstance(results, tuple) else (results,)
    return [np.asarray(result, object) if _moves(result) else result for result in results]


def _moves(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_moves, value))
    return isinstance(value, Series) or _is_objects(value)


def _is_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "O"


def _each(function: Callable[..., Any]) -> Forward:
    """A function of numbers, element by element with broadcasting."""
    numbers = np.frompyfunc(function, function.__code__.co_argcount, 1)
    return lambda node, *inputs: numbers(*map(_as_series, inputs))


def _with(function: Callable[..., Any]) -> Forward:
    """The same with the node as the first argument."""

    def forward(node: Any, *inputs: Any) -> Any:
        return np.frompyfunc(lambda *x: function(node, *x), len(inputs), 1)(*map(_as_series, inputs))

    return forward


def _as_series(value: Any) -> Any:
    return value if _is_objects(value) else series(value)


def _constant(value: float) -> Series:
    return Series.of(value)


_ROOT2 = Series({(0, 0): CONTEXT.sqrt(2)})


def _sigmoid(x: Series) -> Series:
    if x < 0:
        small = x.exp()
        return small / (1 + small)
    return 1 / (1 + (-x).exp())


def _softplus(x: Series) -> Series:
    return (1 + x.exp()).log() if x < 0 else x + (1 + (-x).exp()).log()


def _gelu(node: Any, x: Series) -> Series:
    if getattr(node, "approximate", "none") == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + mpf(0.044715) * x * x * x)
        share: Series = 1 + inner.tanh()
    else:
        share = 1 + (x / CONTEXT.sqrt(2)).erf()
    made: Series = _constant(0.5) * x * share
    return made


def _between(x: Series, low: Any, high: Any) -> Series:
    """min(max(x, low), high)."""
    if x < low:
        x = Series.of(low)
    return Series.of(high) if x > high else x


def _clip(x: Any, low: Any, high: Any) -> Any:
    """The same with bounds that may move, or be missing: what both bounds cut is `high`."""
    x = _as_series(x)
    for bound, larger in ((low, True), (high, False)):
        if bound is not None:
            pick = np.frompyfunc(
                lambda a, b, larger=larger: (b if a < b else a) if larger else (b if a > b else a), 2, 1
            )
            x = pick(x, _as_series(bound))
    return x


def _clip_node(node: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    low = getattr(node, "min", None) if low is None else low
    high = getattr(node, "max", None) if high is None else high
    return _clip(x, low, high)


def _modulo(node: Any, x: Series, y: Series) -> Series:
    quotient = x / y
    return x - (quotient.trunc() if node.fmod else quotient.floor()) * y


def _shrink(node: Any, x: Series) -> Series:
    moved = x if x > node.lambd or x < -node.lambd else _constant(0.0)
    return moved - Series.of(node.bias * moved.sign)


def _fold(function: Callable[[Any, Any], Any]) -> Forward:
    """A variadic operator, by two inputs at a time."""

    def forward(node: Any, *inputs: Any) -> Any:
        made = _as_series(inputs[0])
        for x in inputs[1:]:
            made = np.frompyfunc(function, 2, 1)(made, _as_series(x))
        return made

    return forward


def _larger(a: Any, b: Any) -> Any:
    return b if b > a else a


def _smaller(a: Any, b: Any) -> Any:
    return b if b < a else a


# Reductions.


def over(function: Callable[[list[Any]], Any], x: Any, axes: Axes, keep: bool) -> Any:
    """A function of the list of elements along `axes`, for every place of the other axes."""
    x = np.asarray(x, object)
    axes = tuple(range(x.ndim)) if axes is None else tuple(sorted(axis % x.ndim for axis in axes))
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    rows = np.transpose(x, [*rest, *axes]).reshape(*(x.shape[axis] for axis in rest), -1)
    made = np.empty(rows.shape[:-1], object)
    for place in np.ndindex(made.shape):
        made[place] = function(list(rows[place]))
    return made.reshape([1 if axis in axes else n for axis, n in enumerate(x.shape)]) if keep else made


def _reduction(function: Callable[[list[Any]], Any]) -> Forward:
    def forward(node: Any, x: Any, axes: Any = None) -> Any:
        axes = getattr(node, "axes", None) if axes is None else axes
        chosen: Axes = None if axes is None or np.size(axes) == 0 else tuple(int(a) for a in np.reshape(axes, -1))
        if chosen is None and bool(getattr(node, "noop_with_empty_axes", False)):
            return np.frompyfunc(lambda element: function([element]), 1, 1)(x)
        return over(function, x, chosen, bool(getattr(node, "keepdims", 1)))

    return forward


def _total(row: Sequence[Any]) -> Any:
    return sum(row, _constant(0.0))


def _squares(row: Sequence[Any]) -> Any:
    return _total([x * x for x in row])


def _mean(row: Sequence[Any]) -> Any:
    return _total(row) / len(row)


def _product(row: Sequence[Any]) -> Any:
    return math.prod(row, start=_constant(1.0))


def _log_total(row: Sequence[Any]) -> Any:
    return _total(row).log()


def log_sum_exp(row: Sequence[Any]) -> Any:
    """log Σ e^x."""
    top = max((x.coefficient(0) for x in row), default=CONTEXT.zero)
    top = top if CONTEXT.isfinite(top) else CONTEXT.zero
    return _total([(x - top).exp() for x in row]).log() + top


def p_norm(row: Sequence[Any], p: float) -> Any:
    """(Σ |x|^p)^(1/p)."""
    if p == 1:
        return _total([abs(x) for x in row])
    if p == 2:
        return _squares(row).sqrt()
    return _total([abs(x) ** p for x in row]) ** _constant(1 / p) if p % 1 else _rooted(row, int(p))


def _rooted(row: Sequence[Any], p: int) -> Any:
    from fractions import Fraction

    return _total([abs(x) ** p for x in row])._power(Fraction(1, p))


# Norms and normalizations.


def _softmax(node: Any, x: Any, log: bool = False) -> Any:
    total = over(log_sum_exp, x, (node.axis,), True)
    made = np.asarray(x - total, object)
    return made if log else np.exp(made)


def _lp_normalization(node: Any, x: Any) -> Any:
    """x/‖x‖, and 0 where x is 0."""
    size = over(lambda row: p_norm(row, node.p), x, (node.axis,), True)
    return np.frompyfunc(lambda a, n: a / n if n else _constant(0.0), 2, 1)(x, size)


def normalized(x: Any, axes: Axes, epsilon: float, centred: bool = True) -> Any:
    """(x − mean)/√(variance + epsilon), or x/√(mean square + epsilon), along some axes."""
    middle = x - over(_mean, x, axes, True) if centred else x
    spread = over(lambda row: _squares(row) / len(row), middle, axes, True)
    return middle * np.sqrt(np.asarray(spread + _constant(epsilon), object)) ** -1


def _channels(x: Any, rank: int) -> Any:
    return np.reshape(x, (-1, *(1,) * (rank - 2)))


def _batch_normalization(node: Any, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    wide = [_as_series(_channels(v, x.ndim)) for v in (scale, bias, mean, var)]
    if not getattr(node, "training_mode", 0):
        return wide[0] * (x - wide[2]) * np.sqrt(wide[3] + _constant(node.epsilon)) ** -1 + wide[1]
    axes = (0, *range(2, x.ndim))
    made = wide[0] * normalized(x, axes, node.epsilon) + wide[1]
    here = over(_mean, x, axes, True)
    spread = over(_mean, (x - here) ** 2, axes, False)
    m = node.momentum
    return made, mean * m + here.reshape(-1) * (1 - m), var * m + spread * (1 - m)


def _instance_normalization(node: Any, x: Any, scale: Any, bias: Any) -> Any:
    made = normalized(x, tuple(range(2, x.ndim)), node.epsilon)
    return _channels(scale, x.ndim) * made + _channels(bias, x.ndim)


def _layer_normalization(node: Any, x: Any, scale: Any, bias: Any = None) -> Any:
    axes = tuple(range(node.axis % x.ndim, x.ndim))
    mean = over(_mean, x, axes, True)
    inverse = np.sqrt(over(_mean, (x - mean) ** 2, axes, True) + _constant(node.epsilon)) ** -1
    made = (x - mean) * inverse * scale + (0 if bias is None else bias)
    return (made, mean, inverse)[: len(node.output)]


def _rms_normalization(node: Any, x: Any, scale: Any) -> Any:
    axes = tuple(range(node.axis % x.ndim, x.ndim))
    return normalized(x, axes, node.epsilon, centred=False) * scale


def _group_normalization(node: Any, x: Any, scale: Any, bias: Any) -> Any:
    grouped = x.reshape(x.shape[0], node.num_groups, -1)
    made = normalized(grouped, (2,), node.epsilon).reshape(x.shape)
    return made * _channels(scale, x.ndim) + _channels(bias, x.ndim)


def _lrn(node: Any, x: Any) -> Any:
    before, after = (node.size - 1) // 2, node.size // 2
    sums = [np.sum(x[:, max(c - before, 0) : c + after + 1] ** 2, axis=1) for c in range(x.shape[1])]
    total = np.stack(sums, axis=1) * (node.alpha / node.size) + _constant(node.bias)
    return x * total ** _constant(-node.beta)


# Windows.


def _pool(function: Callable[[Any, list[Any]], Any], fill: float) -> Forward:
    def forward(node: Any, x: Any) -> Any:
        border: Any = Series.of(fill)
        seen = windows(node, x, border)
        return over(lambda row: function(node, row), seen, tuple(range(x.ndim, seen.ndim)), False)

    return forward


def _global_pool(function: Callable[[Any, list[Any]], Any]) -> Forward:
    return lambda node, x: over(lambda row: function(node, row), x, tuple(range(2, x.ndim)), True)


def _highest(node: Any, row: list[Any]) -> Any:
    best = row[0]
    for x in row[1:]:
        best = _larger(best, x)
    return best


# Matrices and products along an axis.


def determinant(x: Any) -> Any:
    """Σ over permutations of their sign times the product of the elements they pick (Leibniz)."""
    size = x.shape[-1]
    total = np.full(x.shape[:-2], _constant(0.0), object)
    for order in itertools.permutations(range(size)):
        sign = (-1) ** sum(a > b for k, b in enumerate(order) for a in order[:k])
        total = total + sign * math.prod((x[..., k, j] for k, j in enumerate(order)), start=1)
    return total


def _inverse(node: Any, x: Any) -> Any:
    """The adjugate over the determinant (Cramer)."""
    made = np.empty(x.shape, object)
    for row, column in itertools.product(range(x.shape[-1]), repeat=2):
        minor = np.delete(np.delete(x, row, -2), column, -1)
        made[..., column, row] = (-1) ** (row + column) * determinant(minor)
    return made / np.asarray(determinant(x), object)[..., None, None]


def _cumulative_product(node: Any, x: Any, axis: Any) -> Any:
    axis = int(np.reshape(axis, ()))
    x = np.moveaxis(x, axis, 0)[:: -1 if node.reverse else 1]
    made, running = np.empty(x.shape, object), np.full(x.shape[1:], _constant(1.0), object)
    for k in range(len(x)):
        after = np.asarray(running * x[k], object)
        made[k, ...] = running if node.exclusive else after
        running = after
    return np.moveaxis(made[:: -1 if node.reverse else 1], 0, axis)


def _top(node: Any, x: Any, k: Any) -> Any:
    """The k largest or smallest elements along an axis, ordered; the first of equal ones first."""
    rows = np.moveaxis(x, node.axis, -1)
    count = int(np.reshape(k, ()))
    values, indices = np.empty((*rows.shape[:-1], count), object), np.zeros((*rows.shape[:-1], count), np.int64)
    for place in np.ndindex(rows.shape[:-1]):
        left = list(enumerate(rows[place]))
        for n in range(count):
            best = left[0]
            for item in left[1:]:
                if (item[1] > best[1]) if node.largest else (item[1] < best[1]):
                    best = item
            left.remove(best)
            values[(*place, n)], indices[(*place, n)] = best[1], best[0]
    return np.moveaxis(values, -1, node.axis), np.moveaxis(indices, -1, node.axis)


_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": _larger,
    "min": _smaller,
}


def _scatter_elements(node: Any, data: Any, indices: Any, updates: Any) -> Any:
    made = _as_series(data).copy()
    combine = _COMBINED[getattr(node, "reduction", None) or "none"]
    for place, index in np.ndenumerate(indices):
        target = list(place)
        target[node.axis] = int(index)
        made[tuple(target)] = combine(made[tuple(target)], _as_series(updates)[place])
    return made


def _scatter_nd(node: Any, data: Any, indices: Any, updates: Any) -> Any:
    made = _as_series(data).copy()
    combine = np.frompyfunc(_COMBINED[getattr(node, "reduction", None) or "none"], 2, 1)
    for place in np.ndindex(indices.shape[:-1]):
        target = tuple(int(i) for i in indices[place])
        made[target] = combine(made[target], _as_series(updates)[place])
    return made


def _cross_entropy(node: Any, scores: Any, labels: Any, weights: Any = None) -> Any:
    log_probability = np.asarray(scores - over(log_sum_exp, scores, (1,), True), object)
    loss = _likelihood(node, log_probability, labels, weights)
    return (loss, log_probability)[: len(node.output)]


def _likelihood(node: Any, x: Any, labels: Any, weights: Any = None) -> Any:
    """−w[label]·x[label], the weighted mean or the sum of them; a label that is ignored weighs 0."""
    loss, weight = np.empty(labels.shape, object), np.empty(labels.shape, object)
    for place, label in np.ndenumerate(labels):
        ignored = label == getattr(node, "ignore_index", None)
        w = _constant(1.0) if weights is None or ignored else Series.of(np.asarray(weights)[label])
        weight[place] = _constant(0.0) if ignored else w
        loss[place] = _constant(0.0) if ignored else -w * x[(place[0], int(label), *place[1:])]
    match node.reduction:
        case "none":
            return loss
        case "sum":
            return np.asarray(_total(list(loss.flat)), object)
        case _:
            return np.asarray(_total(list(loss.flat)) / _total(list(weight.flat)), object)


# Sampling, casts.


def _grid_sample(node: Any, x: Any, grid: Any) -> Any:
    """The bilinear interpolation of x, of rank 4, at the points of a grid."""
    if node.mode not in ("linear", "bilinear"):
        raise NotImplementedError(f"GridSample, {node.mode}")
    made = np.empty((*x.shape[:2], *grid.shape[1:3]), object)
    points = _as_series(grid)
    for image, row, column in np.ndindex(grid.shape[:3]):
        corners = [_neighbours(node, p, n) for p, n in zip(points[image, row, column], x.shape[:1:-1], strict=True)]
        for channel in range(x.shape[1]):
            total = _constant(0.0)
            for (j, across), (i, down) in itertools.product(*corners):
                if j is not None and i is not None:
                    total = total + across * down * x[image, channel, i, j]
            made[image, channel, row, column] = total
    return made


def _neighbours(node: Any, point: Any, size: int) -> list[tuple[int | None, Any]]:
    """Both pixels beside a point of [−1, 1] and their weights; None for one that is outside and counts 0."""
    place = (point + 1) * ((size - 1) / 2) if node.align_corners else ((point + 1) * size - 1) / 2
    if node.padding_mode == "border":
        place = _between(place, 0, size - 1)
    elif node.padding_mode != "zeros":
        raise NotImplementedError(f"GridSample, {node.padding_mode}")
    below = int(place.floor().coefficient(0))
    found = [(below, below + 1 - place), (below + 1, place - below)]
    return [(k if 0 <= k < size else None, weight) for k, weight in found]


def _cast(node: Any, x: Any) -> Any:
    """A cast to a float type, of which every one is a double here."""
    if node.to not in FLOATS:
        raise NotImplementedError("a cast of a series to whole numbers")
    return x


def _average_pool(node: Any, x: Any) -> Any:
    if any(getattr(node, "pads", None) or ()) or node.auto_pad not in ("NOTSET", "VALID"):
        raise NotImplementedError("AveragePool with padding")
    return _pool(lambda _, row: _mean(row), 0.0)(node, x)


def _named(name: str) -> Forward:
    """A method of `Series`, element by element."""
    return _each(lambda x: getattr(x, name)())


def _select(node: Any, condition: Any, x: Any, y: Any) -> Any:
    return np.where(condition, _as_series(x), _as_series(y))


FORWARDS: dict[str, Forward] = {
    "Abs": _each(lambda x: abs(x)),
    "Acos": _named("arccos"),
    "Acosh": _named("arccosh"),
    "Add": _each(lambda a, b: a + b),
    "Asin": _named("arcsin"),
    "Asinh": _named("arcsinh"),
    "Atan": _named("arctan"),
    "Atanh": _named("arctanh"),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_normalization,
    "Cast": _cast,
    "Ceil": _named("ceil"),
    "Celu": _with(lambda node, x: x if x > 0 else node.alpha * ((x / node.alpha).exp() - 1)),
    "Clip": _clip_node,
    "Cos": _named("cos"),
    "Cosh": _named("cosh"),
    "CumProd": _cumulative_product,
    "Det": lambda node, x: determinant(x),
    "Div": _each(lambda a, b: a / b),
    "Elu": _with(lambda node, x: x if x > 0 else node.alpha * (x.exp() - 1)),
    "Erf": _named("erf"),
    "Exp": _named("exp"),
    "Floor": _named("floor"),
    "Gelu": _with(_gelu),
    "GlobalLpPool": _global_pool(lambda node, row: p_norm(row, node.p)),
    "GlobalMaxPool": _global_pool(_highest),
    "GlobalAveragePool": _global_pool(lambda node, row: _mean(row)),
    "GridSample": _grid_sample,
    "GroupNormalization": _group_normalization,
    "HardSigmoid": _with(lambda node, x: _between(node.alpha * x + node.beta, 0, 1)),
    "HardSwish": _each(lambda x: x * _between(x / 6 + 0.5, 0, 1)),
    "InstanceNormalization": _instance_normalization,
    "LRN": _lrn,
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": _with(lambda node, x: x if x >= 0 else node.alpha * x),
    "Log": _named("log"),
    "LogSoftmax": lambda node, x: _softmax(node, x, log=True),
    "LpNormalization": _lp_normalization,
    "LpPool": _pool(lambda node, row: p_norm(row, node.p), 0.0),
    "Max": _fold(_larger),
    "MaxPool": _pool(_highest, -math.inf),
    "Mean": lambda node, *x: _fold(lambda a, b: a + b)(node, *x) / len(x),
    "Min": _fold(_smaller),
    "Mish": _each(lambda x: x * _softplus(x).tanh()),
    "Mod": _with(_modulo),
    "Mul": _each(lambda a, b: a * b),
    "Neg": _each(lambda x: -x),
    "NegativeLogLikelihoodLoss": _likelihood,
    "PRelu": _each(lambda x, slope: x if x >= 0 else x * slope),
    "Pow": _each(lambda x, y: x**y),
    "RMSNormalization": _rms_normalization,
    "Reciprocal": _each(lambda x: x.reciprocal()),
    "ReduceL1": _reduction(lambda row: p_norm(row, 1)),
    "ReduceL2": _reduction(lambda row: p_norm(row, 2)),
    "ReduceLogSum": _reduction(_log_total),
    "ReduceLogSumExp": _reduction(log_sum_exp),
    "ReduceMax": _reduction(lambda row: _highest(None, row)),
    "ReduceMean": _reduction(_mean),
    "ReduceMin": _reduction(lambda row: -_highest(None, [-x for x in row])),
    "ReduceProd": _reduction(_product),
    "ReduceSum": _reduction(_total),
    "ReduceSumSquare": _reduction(_squares),
    "Relu": _each(lambda x: x if x > 0 else _constant(0.0)),
    "Round": _named("rint"),
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Selu": _with(lambda node, x: node.gamma * (x if x > 0 else node.alpha * (x.exp() - 1))),
    "Shrink": _with(_shrink),
    "Sigmoid": _each(_sigmoid),
    "Sign": _each(lambda x: _constant(float(x.sign))),
    "Sin": _named("sin"),
    "Sinh": _named("sinh"),
    "Softmax": _softmax,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
    "Softplus": _each(_softplus),
    "Softsign": _each(lambda x: x / (1 + abs(x))),
    "Sqrt": _named("sqrt"),
    "Sub": _each(lambda a, b: a - b),
    "Sum": _fold(lambda a, b: a + b),
    "Swish": _with(lambda node, x: x * _sigmoid(getattr(node, "alpha", 1.0) * x)),
    "Tan": _named("tan"),
    "Tanh": _named("tanh"),
    "ThresholdedRelu": _with(lambda node, x: x if x > node.alpha else _constant(0.0)),
    "TopK": _top,
    "Where": _select,
    "com.microsoft.Inverse": _inverse,
    "com.microsoft.QuickGelu": _with(lambda node, x: x * _sigmoid(node.alpha * x)),
}
