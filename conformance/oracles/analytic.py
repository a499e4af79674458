"""Complex forwards: f(x + i·h·u) of one node, where its operator is analytic, or is on both sides of a branch of the real part.

The table says how each operator is carried on. `PARTS`: it is linear in each of some inputs, so that its own forward in reals
gives the imaginary part. `FORWARDS`: NumPy on complex numbers. `STEADY`: only the real part matters. A branch is decided by
the real part; where it lies on the border, there is no derivative and `KinkError` is raised. Nothing here is a derivative.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np

from refgrad.conformance.case import qualified
from refgrad.conformance.oracles.evaluator import execute
from refgrad.conformance.oracles.operators import erf
from refgrad.tables import extensions

STEP = 1e-20  # h: no difference is taken, so nothing cancels (Squire & Trapp 1998)

Values: TypeAlias = Sequence[Any]
Forward: TypeAlias = Callable[..., Any]


class KinkError(Exception):
    """The point lies on a border between branches."""


class NotAnalyticError(Exception):
    """No complex forward is known."""


class OtherForwardError(NotAnalyticError):
    """A forward is known, and it does not compute what the interpreter does."""


def _words(text: str) -> list[str]:
    """The names in a line."""
    return text.split()


def call(node: Any, inputs: Values) -> Values:
    """The outputs of a node of onnx.reference, complex where they depend on a complex input.

    :raises KinkError: the real part lies on a border.
    :raises NotAnalyticError: the operator, or this form of it, is not in the table.
    """
    if not any(map(_is_complex, inputs)):
        return execute(node, inputs)
    name = qualified(node.onnx_node)
    if name in STEADY:
        _off_border(node, inputs)
        return execute(node, [_real(x) for x in inputs])
    if name in PARTS:
        return _by_parts(node, inputs, PARTS[name])
    if name in FORWARDS:
        try:
            results = FORWARDS[name](node, *inputs)
        except (
            ArithmeticError,
            AttributeError,
            IndexError,
            TypeError,
            ValueError,
        ) as error:  # a form of an older opset
            raise NotAnalyticError(f"this form of {name} has no complex forward: {error}") from error
        return results if isinstance(results, tuple) else (results,)
    entry = extensions.FORWARDS.get((node.onnx_node.domain, node.op_type))
    if entry is not None and entry.options["analytic"]:
        return execute(node, inputs)
    raise NotAnalyticError(f"{name} has no complex forward")


def _is_complex(x: Any) -> bool:
    return getattr(x, "dtype", None) == np.complex128


def _real(x: Any) -> Any:
    return x.real if _is_complex(x) else x


def _complex(real: np.ndarray, imaginary: np.ndarray) -> np.ndarray:
    """Part by part: 1j times infinity is not what it should be."""
    made = np.empty(real.shape, np.complex128)
    made.real, made.imag = real, imaginary
    return made


def _refuse(unless: bool, what: str) -> None:
    if not unless:
        raise NotAnalyticError(f"{what} has no complex forward")


# Operators whose result does not change with a float a little.

STEADY = frozenset(
    _words(
        "Shape Size Equal Greater GreaterOrEqual Less LessOrEqual Sign Floor Ceil Round IsNaN IsInf ArgMax ArgMin Hardmax "
        "NonZero"
    )
)
_COMPARED = frozenset(_words("Equal Greater GreaterOrEqual Less LessOrEqual"))
_ROUNDED = frozenset(_words("Floor Ceil"))


_PICKING = frozenset(_words("ArgMax ArgMin Hardmax"))


def _off_border(node: Any, inputs: Values) -> None:
    if node.op_type in _COMPARED:
        a, b = inputs
        _away(np.asarray(a) - b, 0)
    elif node.op_type in _PICKING and np.ndim(inputs[0]):
        _measure(np.diff(np.sort(inputs[0].real, axis=node.axis), axis=node.axis))
    elif node.op_type in _ROUNDED:
        _away(inputs[0] - np.round(inputs[0].real), 0)
    elif node.op_type == "Round":
        _away(2 * (inputs[0] - np.floor(inputs[0].real)), 1)
    elif node.op_type == "Sign":
        _away(inputs[0], 0)


_distances: ContextVar[list[float] | None] = ContextVar("distances", default=None)


@contextmanager
def measured() -> Iterator[list[float]]:
    """Collect how far the forwards are from their borders, each time one is called in the block.

    A distance is in the units of the value that is compared with a border.
    """
    found: list[float] = []
    before = _distances.set(found)
    try:
        yield found
    finally:
        _distances.reset(before)


def _measure(apart: Any) -> None:
    """Collect the smallest of some distances, where they are measured."""
    found = _distances.get()
    if found is not None:
        found.append(float(np.min(np.abs(apart), initial=math.inf)))


def _away(x: np.ndarray, *borders: Any) -> None:
    """Refuse a point that moves off a border."""
    for border in borders:
        moved = x - border
        _measure(moved.real)
        if np.any((moved.real == 0) & (moved.imag != 0)):
            raise KinkError("the point is a kink")


# Operators that are linear in each of some inputs. A part is a product of inputs; the result is the sum of the parts.

Part: TypeAlias = tuple[int, ...]
Parts: TypeAlias = tuple[Part, ...]


def _by_parts(node: Any, inputs: Values, parts: Parts | Callable[[Any, int], Parts]) -> Values:
    """The node's own forward in reals, once at the real part, and once for each factor moved by its imaginary part."""
    terms = parts(node, len(inputs)) if callable(parts) else parts
    terms = tuple(term for term in terms if all(k < len(inputs) and inputs[k] is not None for k in term))
    linear = {k for term in terms for k in term}
    for k, x in enumerate(inputs):
        _refuse(k in linear or not _is_complex(x), f"{node.op_type} by its input {k}")
    results = execute(node, [_real(x) for x in inputs])
    fixed = _fixed(node, inputs, linear)
    moved = [np.zeros(y.shape) if getattr(y, "dtype", None) == np.float64 else None for y in results]
    for turn in range(max(map(len, terms))):
        fed, moves = [_real(x) for x in inputs], False
        for term in terms:
            for place, k in enumerate(term):
                if turn >= len(term) or place == turn:
                    own = turn < len(term) and _is_complex(inputs[k])
                    fed[k] = inputs[k].imag / STEP if own else np.zeros_like(fed[k])
                    moves |= own and bool(np.any(fed[k]))
        if moves:
            for k, y in enumerate(execute(node, fed)):
                if moved[k] is not None:
                    moved[k] = moved[k] + y - (0 if fixed is None else fixed[k])
    return [y if m is None else _complex(y, m * STEP) for y, m in zip(results, moved, strict=True)]


def _fixed(node: Any, inputs: Values, linear: set[int]) -> Values | None:
    """The constant part of the sum that a node computes, or None."""
    if not (getattr(node, "value", 0) or getattr(node, "extrapolation_value", 0)):
        return None
    return execute(node, [np.zeros_like(x) if k in linear else x for k, x in enumerate(map(_real, inputs))])


def _every(node: Any, count: int) -> Parts:
    """The sum of all inputs, or they side by side."""
    return tuple((k,) for k in range(count))


def _scattered(node: Any, count: int) -> Parts:
    _refuse(getattr(node, "reduction", None) in (None, "none", "add"), f"{node.op_type} with a product")
    return ((0,), (2,))


def _averaged(node: Any, count: int) -> Parts:
    _refuse(getattr(node, "mode", "avg") == "avg", f"{node.op_type} of the largest")
    return ((0,),)


def _product(node: Any, count: int) -> Parts:
    return (tuple(range(count)),)


_FIRST: Parts = ((0,),)
PARTS: dict[str, Parts | Callable[[Any, int], Parts]] = {
    **dict.fromkeys(
        _words(
            "Identity Neg Reshape Transpose Squeeze Unsqueeze Flatten Slice Gather GatherElements GatherND Tile Expand Split "
            "DepthToSpace SpaceToDepth Trilu Compress ReverseSequence CumSum ReduceSum ReduceMean GlobalAveragePool "
            "AveragePool Col2Im Upsample Resize DFT Dropout MaxUnpool CenterCropPad AffineGrid Cast"
        ),
        _FIRST,
    ),
    **dict.fromkeys(_words("Sum Mean Concat Add Sub"), _every),
    **dict.fromkeys(_words("ScatterElements ScatterND"), _scattered),
    **dict.fromkeys(_words("Conv ConvTranspose Gemm"), ((0, 1), (2,))),
    "Where": ((1,), (2,)),
    "Pad": ((0,), (2,)),
    "OneHot": ((2,),),
    "TensorScatter": ((0,), (1,)),
    "Einsum": _product,
    "Mul": ((0, 1),),
    "MatMul": ((0, 1),),
    "STFT": ((0, 2),),
    "GridSample": _FIRST,
    "RoiAlign": _averaged,
    "DeformConv": ((0, 1), (3,)),
    "DequantizeLinear": ((1,),),
}


# Operators that NumPy's complex numbers know.


def _root(x: np.ndarray, power: float = 0.5) -> Any:
    """A root, which has no derivative at 0: there the real part is only (h·u)²."""
    _measure(x.real)
    if np.any((x.real <= STEP) & (x != 0)):
        raise KinkError("the point is a kink: the root of 0")
    return np.sqrt(x) if power == 0.5 else x**power


def _raised(x: np.ndarray, p: int) -> Any:
    """|x|^p, smooth at 0 for an even p."""
    return x**p if p % 2 == 0 else _absolute(x) ** p


def _numpy(function: Callable[..., Any]) -> Forward:
    return lambda node, *inputs: function(*inputs)


def _split(x: np.ndarray, above: np.ndarray, below: Any, border: Any = 0) -> Any:
    """`above` where the real part is above the border, `below` where it is below."""
    _away(x, border)
    return np.where(x.real > border, above, below)


def _absolute(x: np.ndarray) -> Any:
    return _split(x, x, -x)


def _sigmoid(x: np.ndarray) -> Any:
    small = np.exp(np.where(x.real > 0, -x, x))  # never above 1
    return np.where(x.real > 0, 1, small) / (1 + small)


def _softplus(x: np.ndarray) -> Any:
    return np.where(x.real > 0, x, 0) + np.log1p(np.exp(np.where(x.real > 0, -x, x)))


def _power(x: np.ndarray, y: np.ndarray) -> Any:
    if not np.any(np.imag(y)):
        base, exponent = np.broadcast_arrays(x, np.real(y))
        _away(base[exponent % 1 != 0], 0)
        return np.where(exponent == 0, 1.0, np.power(base, exponent))
    _refuse(bool(np.all(x.real > 0)), "a power of what is not above 0")
    return np.exp(y * np.log(x))


def _modulo(node: Any, x: np.ndarray, y: np.ndarray) -> Any:
    quotient = x.real / y.real
    whole = np.trunc(quotient) if node.fmod else np.floor(quotient)
    rest = x - whole * y
    _away(rest, 0, np.copysign(y.real, rest.real))
    return rest


def _extreme(best: Callable[..., Any]) -> Forward:
    def forward(node: Any, *inputs: np.ndarray) -> Any:
        chosen = inputs[0]
        for x in inputs[1:]:
            chosen, x = np.broadcast_arrays(chosen, x)
            _away(np.asarray(chosen - x), 0)
            chosen = np.where(best(x.real, chosen.real) == x.real, x, chosen)
        return chosen

    return forward


def _clip(node: Any, x: np.ndarray, low: Any = None, high: Any = None) -> Any:
    low = getattr(node, "min", None) if low is None else low
    high = getattr(node, "max", None) if high is None else high
    for bound, over in ((low, False), (high, True)):
        if bound is not None:
            _away(x - bound, 0)
            x = np.where((x.real > np.real(bound)) == over, bound, x)
    return x


def _range(node: Any, start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Any:
    count = math.ceil((limit.real - start.real) / delta.real)
    return start + delta * np.arange(max(count, 0))


def _along(node: Any, inputs: Values) -> tuple[int, ...] | None:
    """The axes that a reduction goes over: an input or an attribute; None for all."""
    axes = inputs[1] if len(inputs) > 1 else getattr(node, "axes", None)
    if axes is None or np.size(axes) == 0:
        return () if getattr(node, "noop_with_empty_axes", 0) else None
    return tuple(int(axis) for axis in np.reshape(axes, -1))


def _reduction(function: Callable[..., Any]) -> Forward:
    def forward(node: Any, *inputs: Any) -> Any:
        axes = _along(node, inputs)
        if axes == () or not np.ndim(inputs[0]):
            axes = ()
        return function(inputs[0], axes, bool(getattr(node, "keepdims", 1)))

    return forward


def _sum(x: np.ndarray, axes: tuple[int, ...] | None, keep: bool) -> Any:
    return np.asarray(np.sum(x, axis=axes, keepdims=keep))


def _log_sum_exp(x: np.ndarray, axes: tuple[int, ...] | None, keep: bool) -> Any:
    if not x.size:
        return np.log(_sum(np.exp(x), axes, keep))
    top = np.max(x.real, axis=axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = np.log(_sum(np.exp(x - top), axes, True)) + top
    return total if keep else total.reshape(_sum(x, axes, False).shape)


def _chosen(pick: Callable[..., Any]) -> Callable[..., Any]:
    """The largest or the smallest by the real part, over some axes."""

    def reduce(x: np.ndarray, axes: tuple[int, ...] | None, keep: bool) -> Any:
        if axes == ():
            return x
        if not x.size:
            return pick(x.real, axis=axes, keepdims=keep, initial=np.nan)
        best = pick(x.real, axis=axes, keepdims=True)
        is_best = x.real == best
        _measure(np.where(is_best, np.inf, best - x.real))
        move = np.where(is_best, x.imag, 0)
        first = np.sum(move, axis=axes, keepdims=True) / np.sum(is_best, axis=axes, keepdims=True)
        if np.any(is_best & (x.imag != first)):
            raise KinkError("the point is a kink: several are the largest or the smallest")
        result = _complex(best, first)
        return result if keep else result.reshape(np.sum(x.real, axis=axes).shape)

    return reduce


def _top(node: Any, x: np.ndarray, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
    axis = getattr(node, "axis", -1)
    apart = np.diff(np.sort(x.real, axis=axis), axis=axis)
    _measure(apart)
    if np.any(apart == 0):
        raise KinkError("the point is a kink: two elements are equal")
    _, indices = execute(node, [x.real, *rest])
    return np.take_along_axis(x, indices, axis), indices


def _softmax(node: Any, x: np.ndarray, log: bool = False) -> Any:
    if not x.size:
        return x
    x = x - np.max(x.real, axis=node.axis, keepdims=True)
    if log:
        return x - np.log(np.sum(np.exp(x), axis=node.axis, keepdims=True))
    return np.exp(x) / np.sum(np.exp(x), axis=node.axis, keepdims=True)


def _channels(x: np.ndarray, rank: int) -> Any:
    return np.reshape(x, (-1, *(1,) * (rank - 2)))


def _normalized(x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> Any:
    centred = x - np.mean(x, axis=axes, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, axis=axes, keepdims=True) + epsilon)


def _instance_normalization(node: Any, x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> Any:
    made = _normalized(x, tuple(range(2, x.ndim)), node.epsilon)
    return _channels(scale, x.ndim) * made + _channels(bias, x.ndim)


def _batch_normalization(node: Any, x: np.ndarray, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    if not getattr(node, "training_mode", 0):
        scale, bias, mean, var = (_channels(v, x.ndim) for v in (scale, bias, mean, var))
        return scale * (x - mean) / np.sqrt(var + node.epsilon) + bias
    axes = (0, *range(2, x.ndim))
    made = _channels(scale, x.ndim) * _normalized(x, axes, node.epsilon) + _channels(bias, x.ndim)
    here = np.mean(x, axis=axes)
    spread = np.mean((x - _channels(here, x.ndim)) ** 2, axis=axes)
    m = node.momentum
    return made, mean * m + here * (1 - m), var * m + spread * (1 - m)


def _lrn(node: Any, x: np.ndarray) -> Any:
    """Channel c is divided by (bias + α/size·Σ x²)^β over channels c − ⌊(size−1)/2⌋ to c + ⌈(size−1)/2⌉."""
    before, after = (node.size - 1) // 2, node.size // 2
    total = np.stack([np.sum(x[:, max(c - before, 0) : c + after + 1] ** 2, axis=1) for c in range(x.shape[1])], axis=1)
    return x / (node.bias + node.alpha / node.size * total) ** node.beta


def _norm(x: np.ndarray, p: int, axes: tuple[int, ...]) -> Any:
    return _root(np.sum(_raised(x, p), axis=axes, keepdims=True), 1 / p)


def _lp_normalization(node: Any, x: np.ndarray) -> Any:
    return x / _norm(x, node.p, (node.axis,))


def _cumulative_product(node: Any, x: np.ndarray, axis: Any) -> Any:
    axis = int(np.reshape(axis, ()))
    x = np.flip(x, axis) if node.reverse else x
    if node.exclusive and x.shape[axis]:
        head = np.delete(x, -1, axis)
        x = np.concatenate([np.ones_like(np.take(x, [0], axis)), head], axis)
    made = np.cumprod(x, axis)
    return np.flip(made, axis) if node.reverse else made


def windows(node: Any, x: np.ndarray, fill: float) -> Any:
    """The windows of a pooling: x in windows, the axes of the window last, `fill` around x.

    The number of windows follows from the sizes, pads, strides and `ceil_mode`, as in the operator.
    """
    kernel = np.array(node.kernel_shape)
    rank = len(kernel)
    strides, dilations = (np.array(getattr(node, n, None) or [1] * rank) for n in ("strides", "dilations"))
    sizes = np.array(x.shape[2:])
    span = (kernel - 1) * dilations + 1
    auto = getattr(node, "auto_pad", None) or "NOTSET"
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        counts = -(-sizes // strides)
        total = np.maximum((counts - 1) * strides + span - sizes, 0)
        heads = total // 2 if auto == "SAME_UPPER" else total - total // 2
    else:
        pads = np.array(getattr(node, "pads", None) or [0] * 2 * rank) if auto == "NOTSET" else np.zeros(2 * rank, int)
        heads, tails = pads[:rank], pads[rank:]
        room = sizes + heads + tails - span
        counts = room // strides + 1
        if getattr(node, "ceil_mode", 0):
            counts = -(-room // strides) + 1
            counts = counts - (
                (counts - 1) * strides >= sizes + heads
            )  # a window starts inside x or the padding before it
    tails = np.maximum((counts - 1) * strides + span - sizes - heads, 0)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(heads, tails, strict=True)], constant_values=fill)
    seen = np.lib.stride_tricks.sliding_window_view(padded, tuple(span), tuple(range(2, x.ndim)))
    starts = tuple(slice(0, (c - 1) * s + 1, s) for c, s in zip(counts, strides, strict=True))
    return seen[(slice(None), slice(None), *starts, *(slice(None, None, d) for d in dilations))]


def _max_pool(node: Any, x: np.ndarray) -> Any:
    _refuse(len(node.output) == 1 or not node.output[1], "MaxPool with its indices")
    seen = windows(node, x, -np.inf)
    return _chosen(np.max)(seen, tuple(range(x.ndim, seen.ndim)), False)


def _lp_pool(node: Any, x: np.ndarray) -> Any:
    seen = windows(node, x, 0)
    return _root(np.sum(_raised(seen, node.p), axis=tuple(range(x.ndim, seen.ndim))), 1 / node.p)


def _over_grid(x: np.ndarray) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


_ACTIVATIONS: dict[str, Callable[[np.ndarray, Any, Any], np.ndarray]] = {
    "relu": lambda x, a, b: _split(x, x, 0),
    "tanh": lambda x, a, b: np.tanh(x),
    "sigmoid": lambda x, a, b: _sigmoid(x),
    "affine": lambda x, a, b: a * x + b,
    "leakyrelu": lambda x, a, b: _split(x, x, (0.01 if a is None else a) * x),
    "thresholdedrelu": lambda x, a, b: _split(x, x, 0, 1.0 if a is None else a),
    "scaledtanh": lambda x, a, b: a * np.tanh(b * x),
    "hardsigmoid": lambda x, a, b: _between(x * (0.2 if a is None else a) + (0.5 if b is None else b), 0, 1),
    "elu": lambda x, a, b: _split(x, x, (1.0 if a is None else a) * (np.exp(x) - 1)),
    "softsign": lambda x, a, b: x / (1 + _absolute(x)),
    "softplus": lambda x, a, b: _softplus(x),
}
_TWO, _ONE = ("affine", "scaledtanh"), ("leakyrelu", "thresholdedrelu", "elu")


def _between(x: np.ndarray, low: Any, high: Any) -> Any:
    _away(x, low, high)
    return np.where(x.real > high, high, np.where(x.real < low, low, x))


def _recurrent(op_type: str) -> Forward:
    """RNN, GRU and LSTM as the specification's equations have them."""
    gates, default = {
        "RNN": (1, ["Tanh"]),
        "GRU": (3, ["Sigmoid", "Tanh"]),
        "LSTM": (4, ["Sigmoid", "Tanh", "Tanh"]),
    }[op_type]

    def forward(node: Any, X: Any, W: Any, R: Any, B: Any = None, lengths: Any = None, *states: Any) -> Any:
        batch_first = bool(getattr(node, "layout", 0))
        h0, c0, peepholes = (*states, None, None, None)[:3]
        if batch_first:
            X, h0, c0 = (None if v is None else np.swapaxes(v, 0, 1) for v in (X, h0, c0))
        steps, batch = X.shape[:2]
        ways, size = R.shape[0], R.shape[-1]
        lengths = np.full(batch, steps) if lengths is None else lengths
        names = [n.lower() for n in (getattr(node, "activations", None) or default * ways)]
        alphas, betas = (list(getattr(node, f"activation_{k}", None) or []) for k in ("alpha", "beta"))
        bound = getattr(node, "clip", None)
        functions = [_activation(name, alphas, betas, bound) for name in names]
        Y = np.zeros((steps, ways, batch, size), np.complex128)
        H, C = np.zeros((2, ways, batch, size), np.complex128)
        for way in range(ways):
            acts = functions[way * len(default) : (way + 1) * len(default)]
            backward = way == 1 or node.direction == "reverse"
            h = np.zeros((batch, size)) if h0 is None else h0[way]
            c = np.zeros((batch, size)) if c0 is None else c0[way]
            bias = np.zeros(2 * gates * size) if B is None else B[way]
            p = np.zeros(3 * size) if peepholes is None else peepholes[way]
            for t in range(steps - 1, -1, -1) if backward else range(steps):
                live = (t < lengths)[:, None]
                new_h, new_c = _CELLS[op_type](node, acts, X[t] @ W[way].T, h, R[way], np.split(bias, 2), c, p)
                h, c = np.where(live, new_h, h), np.where(live, new_c, c)
                Y[t, way] = np.where(live, h, 0)
            live = (lengths > 0)[:, None]  # a sequence of no element leaves nothing
            H[way], C[way] = np.where(live, h, 0), np.where(live, c, 0)
        if batch_first:
            Y, H, C = np.transpose(Y, (2, 0, 1, 3)), np.swapaxes(H, 0, 1), np.swapaxes(C, 0, 1)
        return (Y, H, C)[: len(node.output)]

    return forward


def _activation(name: str, alphas: list[float], betas: list[float], bound: float | None) -> Callable[[Any], Any]:
    """An activation with its parameters taken off the lists, behind the clip of its input."""
    known = _ACTIVATIONS.get(name)
    _refuse(known is not None, f"the activation {name}")
    assert known is not None
    both = name in _TWO or name == "hardsigmoid"
    alpha = alphas.pop(0) if alphas and (both or name in _ONE) else None
    beta = betas.pop(0) if betas and both else None
    if bound is None:
        return lambda x: known(x, alpha, beta)
    return lambda x: known(_between(x, -bound, bound), alpha, beta)


def _rnn_cell(node: Any, f: Values, x: Any, h: Any, R: Any, b: Values, c: Any, p: Any) -> tuple[Any, Any]:
    return f[0](x + h @ R.T + b[0] + b[1]), c


def _gru_cell(node: Any, f: Values, x: Any, h: Any, R: Any, b: Values, c: Any, p: Any) -> tuple[Any, Any]:
    Rz, Rr, Rh = np.split(R, 3)
    (wz, wr, wh), (rz, rr, rh) = np.split(b[0], 3), np.split(b[1], 3)
    xz, xr, xh = np.split(x, 3, -1)
    z, r = f[0](xz + h @ Rz.T + wz + rz), f[0](xr + h @ Rr.T + wr + rr)
    n = r * (h @ Rh.T + rh) if node.linear_before_reset else (r * h) @ Rh.T + rh
    return (1 - z) * f[1](xh + n + wh) + z * h, c


def _lstm_cell(node: Any, f: Values, x: Any, h: Any, R: Any, b: Values, c: Any, p: Any) -> tuple[Any, Any]:
    i, o, g, n = np.split(x + h @ R.T + b[0] + b[1], 4, -1)
    pi, po, pf = np.split(p, 3)
    i = f[0](i + pi * c)
    g = 1 - i if node.input_forget else f[0](g + pf * c)
    c = g * c + i * f[1](n)
    return f[0](o + po * c) * f[2](c), c


_CELLS: dict[str, Forward] = {"RNN": _rnn_cell, "GRU": _gru_cell, "LSTM": _lstm_cell}


def _determinant(node: Any, x: np.ndarray) -> Any:
    """Σ over permutations of their sign times the product of what they pick (Leibniz)."""
    size = x.shape[-1]
    _refuse(size <= 6, "the determinant of a large matrix")
    total = np.zeros(x.shape[:-2], np.complex128)
    for order in itertools.permutations(range(size)):
        sign = (-1) ** sum(a > b for k, b in enumerate(order) for a in order[:k])
        total = total + sign * math.prod((x[..., k, j] for k, j in enumerate(order)), start=1)
    return total


def _unique(node: Any, x: np.ndarray) -> Any:
    _refuse(len(node.output) == 1 and node.sorted and node.axis is None, "Unique but for the sorted elements")
    values, first, of = np.unique(x.real, return_index=True, return_inverse=True)
    _measure(np.diff(values))
    moves = x.imag.reshape(-1)
    if np.any(moves[first][of.reshape(-1)] != moves):
        raise KinkError("the point is a kink: two elements are equal")
    return _complex(values, moves[first])


def _cast_like(node: Any, x: Any, like: Any) -> Any:
    return x if _is_complex(x) and like.dtype.kind in "fc" else execute(node, [_real(x), _real(like)])[0]


def _layer_normalization(node: Any, x: np.ndarray, scale: np.ndarray, bias: Any = None) -> Values:
    axes = tuple(range(node.axis % x.ndim, x.ndim))
    mean = np.mean(x, axis=axes, keepdims=True)
    inverse = 1 / np.sqrt(np.mean((x - mean) ** 2, axis=axes, keepdims=True) + node.epsilon)
    return (x - mean) * inverse * scale + (0 if bias is None else bias), mean, inverse


def _pieces(node: Any, x: np.ndarray, *others: Any) -> tuple[list[np.ndarray]]:
    """The pieces of the real part and of the imaginary part: both are split in the same way."""
    [real], [imaginary] = (execute(node, [part, *others]) for part in (x.real, x.imag))
    return ([_complex(a, b) for a, b in zip(real, imaginary, strict=True)],)


def _inserted(node: Any, sequence: Sequence[Any], x: np.ndarray, position: Any = None) -> tuple[list[Any]]:
    """The sequence with one more element, the last one where no position is given."""
    made = list(sequence)
    made.insert(len(made) if position is None else int(position), x)
    return (made,)


FORWARDS: dict[str, Forward] = {
    "Optional": lambda node, x: (x,),
    "OptionalGetElement": lambda node, x: (x,),
    "SequenceConstruct": lambda node, *x: (list(x),),
    "SequenceInsert": _inserted,
    "SplitToSequence": _pieces,
    "Abs": _numpy(_absolute),
    "Acos": _numpy(np.arccos),
    "Acosh": _numpy(np.arccosh),
    "Asin": _numpy(np.arcsin),
    "Asinh": _numpy(np.arcsinh),
    "Atan": _numpy(np.arctan),
    "Atanh": _numpy(np.arctanh),
    "BatchNormalization": _batch_normalization,
    "CastLike": _cast_like,
    "Celu": lambda node, x: _split(x, x, node.alpha * (np.exp(x / node.alpha) - 1)),
    "Clip": _clip,
    "Cos": _numpy(np.cos),
    "Cosh": _numpy(np.cosh),
    "CumProd": _cumulative_product,
    "Det": _determinant,
    "Div": _numpy(np.true_divide),
    "Elu": lambda node, x: _split(x, x, node.alpha * (np.exp(x) - 1)),
    "Erf": _numpy(erf),
    "Exp": _numpy(np.exp),
    "GRU": _recurrent("GRU"),
    "Gelu": lambda node, x: execute(node, [x]),
    "GlobalLpPool": lambda node, x: _norm(x, node.p, _over_grid(x)),
    "GlobalMaxPool": lambda node, x: _chosen(np.max)(x, _over_grid(x), True),
    "HardSigmoid": lambda node, x: _between(node.alpha * x + node.beta, 0, 1),
    "HardSwish": lambda node, x: x * _between(x / 6 + 0.5, 0, 1),
    "InstanceNormalization": _instance_normalization,
    "LRN": _lrn,
    "LSTM": _recurrent("LSTM"),
    "LayerNormalization": _layer_normalization,
    "LeakyRelu": lambda node, x: _split(x, x, node.alpha * x),
    "Log": _numpy(np.log),
    "LogSoftmax": lambda node, x: _softmax(node, x, log=True),
    "LpNormalization": _lp_normalization,
    "LpPool": _lp_pool,
    "Max": _extreme(np.maximum),
    "MaxPool": _max_pool,
    "Min": _extreme(np.minimum),
    "Mod": _modulo,
    "PRelu": lambda node, x, slope: _split(x, x, x * slope) if _is_complex(x) else np.where(x > 0, x, x * slope),
    "Pow": _numpy(_power),
    "RNN": _recurrent("RNN"),
    "Range": _range,
    "Reciprocal": lambda node, x: 1 / x,
    "ReduceL1": _reduction(lambda x, axes, keep: _sum(_absolute(x), axes, keep)),
    "ReduceL2": _reduction(lambda x, axes, keep: _root(_sum(x * x, axes, keep))),
    "ReduceLogSum": _reduction(lambda x, axes, keep: np.log(_sum(x, axes, keep))),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "ReduceMax": _reduction(_chosen(np.max)),
    "ReduceMin": _reduction(_chosen(np.min)),
    "ReduceProd": _reduction(lambda x, axes, keep: np.asarray(np.prod(x, axis=axes, keepdims=keep))),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: _sum(x * x, axes, keep)),
    "Relu": lambda node, x: _split(x, x, 0),
    "Selu": lambda node, x: node.gamma * _split(x, x, node.alpha * (np.exp(x) - 1)),
    "Shrink": lambda node, x: _split(x, x - node.bias, _split(x, 0 * x, x + node.bias, -node.lambd), node.lambd),
    "Sigmoid": _numpy(_sigmoid),
    "Sin": _numpy(np.sin),
    "Sinh": _numpy(np.sinh),
    "Softmax": _softmax,
    "Softplus": _numpy(_softplus),
    "Softsign": lambda node, x: x / (1 + _absolute(x)),
    "Sqrt": _numpy(_root),
    "Tan": _numpy(np.tan),
    "Tanh": _numpy(np.tanh),
    "ThresholdedRelu": lambda node, x: _split(x, x, 0 * x, node.alpha),
    "TopK": _top,
    "Unique": _unique,
}

KNOWN = frozenset(STEADY) | frozenset(PARTS) | frozenset(FORWARDS)
