"""Recurrent networks and their backpropagation through time; the only loops are over time.

What the loops need of the inputs is one matrix product before them, and the gradients of X, W and R are one each after
them. In the loops, arrays are (batch, gates·hidden) for one direction. Along time a direction is read forwards or
backwards; a sequence that has ended (or, backwards, not yet begun) keeps its state, and its results there are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from refgrad.backends.numpy.kernels.activation import elu, hard_sigmoid, leaky_relu, relu, sigmoid, softplus, softsign
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel
from refgrad.protos.domains import MICROSOFT

Array = np.ndarray
_OF_A_STEP = 3  # times the gates of a step: its product, the sum, and the results of the activations
Directions: TypeAlias = "list[tuple[bool, list[_Activation]]]"
Formula: TypeAlias = Callable[[Array, float, float], Any]

# "foward" is how GRU-1 spells its default.
_BACKWARD = {"forward": (False,), "foward": (False,), "reverse": (True,), "bidirectional": (False, True)}

# By name the function of x, α and β, and its derivative given by the function's result y.
_FUNCTIONS: dict[str, tuple[Formula, Formula]] = {
    "sigmoid": (lambda x, a, b: sigmoid(x), lambda y, a, b: y * (1 - y)),
    "tanh": (lambda x, a, b: np.tanh(x), lambda y, a, b: (1 - y) * (1 + y)),
    "relu": (lambda x, a, b: relu(x), lambda y, a, b: y > 0),
    "softsign": (lambda x, a, b: softsign(x), lambda y, a, b: np.square(1 - np.abs(y))),
    "softplus": (lambda x, a, b: softplus(x), lambda y, a, b: -np.expm1(-y)),
    "affine": (lambda x, a, b: a * x + b, lambda y, a, b: np.full_like(y, a)),
    "leakyrelu": (lambda x, a, b: leaky_relu(x, alpha=a), lambda y, a, b: np.where(y > 0, 1, a)),
    "thresholdedrelu": (lambda x, a, b: np.where(x < a, 0, x), lambda y, a, b: y > 0),  # x ≥ α, the operator x > α
    "scaledtanh": (
        lambda x, a, b: a * np.tanh(b * x),
        lambda y, a, b: b * (a - y * (y / a)) if a else np.zeros_like(y),
    ),
    "hardsigmoid": (
        lambda x, a, b: hard_sigmoid(x, alpha=a, beta=b),
        lambda y, a, b: np.where((y > 0) & (y < 1), a, 0),
    ),
    "elu": (lambda x, a, b: elu(x, alpha=a), lambda y, a, b: np.where(y > 0, 1, y + a)),
}

# The defaults of α and β, from the operators of the same names as ONNX stores them. It has no Affine and no ScaledTanh.
_DEFAULTS: dict[str, tuple[float | None, ...]] = {
    "affine": (None, None),
    "leakyrelu": (float(np.float32(0.01)),),
    "thresholdedrelu": (1.0,),
    "scaledtanh": (None, None),
    "hardsigmoid": (float(np.float32(0.2)), 0.5),
    "elu": (1.0,),
}


# The attributes that RNN, GRU, LSTM, and their training forms and gradients have in common.
_SETTINGS: dict[str, Any] = {
    "direction": "forward",
    "hidden_size": None,
    "activations": None,
    "activation_alpha": None,
    "activation_beta": None,
    "clip": None,
}
_GRU, _LSTM = ("Sigmoid", "Tanh"), ("Sigmoid", "Tanh", "Tanh")  # the functions of each direction by default


@dataclass(frozen=True, slots=True)
class _Activation:
    """One of the functions with its parameters; its argument is clipped to ±clip."""

    name: str
    alpha: float
    beta: float
    clip: float | None

    def __call__(self, x: Array) -> Array:
        if self.clip is not None:
            x = np.clip(x, -self.clip, self.clip)
        return np.asarray(_FUNCTIONS[self.name][0](x, self.alpha, self.beta), x.dtype)

    def slope(self, y: Array) -> Array:
        """f'(x) where y = f(x); 0 where x was clipped"""
        if self.alpha < 0 and self.name in ("leakyrelu", "thresholdedrelu", "elu"):
            raise ValueError(
                f"two arguments of {self.name} have the same result where alpha is {self.alpha}: expected alpha ≥ 0"
            )
        slope = np.asarray(_FUNCTIONS[self.name][1](y, self.alpha, self.beta), y.dtype)
        if self.clip is None:
            return slope
        ends = self(np.array([-self.clip, self.clip], y.dtype))
        return np.where((ends.min() < y) & (y < ends.max()), slope, 0)


def directions_of(
    default: tuple[str, ...],
    direction: str,
    activations: list[str] | None,
    activation_alpha: list[float] | None,
    activation_beta: list[float] | None,
    clip: float | None,
) -> Directions:
    """List for each direction whether it reads time backwards, and its functions.

    Each function takes the next alpha and the next beta, if it has that parameter.
    """
    if direction not in _BACKWARD:
        raise ValueError(f"direction is {direction!r}, expected 'forward', 'reverse' or 'bidirectional'")
    if clip is not None and clip < 0:
        raise ValueError(f"clip is {clip}, expected a threshold ≥ 0")
    backward = _BACKWARD[direction]
    names = default * len(backward) if activations is None else activations
    if len(names) != len(default) * len(backward):
        raise ValueError(f"activations has {len(names)} names, expected {len(default) * len(backward)}")
    alpha, beta = iter(activation_alpha or ()), iter(activation_beta or ())
    functions = [_activation(name.lower(), alpha, beta, clip) for name in names]
    return [(b, functions[k * len(default) : (k + 1) * len(default)]) for k, b in enumerate(backward)]


def _activation(name: str, alphas: Iterator[float], betas: Iterator[float], clip: float | None) -> _Activation:
    if name not in _FUNCTIONS:
        raise ValueError(f"activations has {name!r}, expected one of {', '.join(_FUNCTIONS)}")
    given = [next(given, default) for given, default in zip((alphas, betas), _DEFAULTS.get(name, ()), strict=False)]
    parameters = [value for value in given if value is not None]
    if len(parameters) < len(given):
        raise ValueError(f"{name} has no default parameters, expected activation_alpha and activation_beta for it")
    alpha, beta = (*parameters, 0.0, 0.0)[:2]
    return _Activation(name, alpha, beta, clip)


@dataclass(frozen=True, slots=True)
class _Sequences:
    """The steps of the sequences: `active` is (time, batch), None where every sequence is as long as X."""

    time: int
    active: Array | None

    def steps(self, backward: bool) -> range:
        """Count the time in the order in which a direction reads it."""
        return range(self.time - 1, -1, -1) if backward else range(self.time)

    def choose(self, t: int, new: Array, old: Array) -> Array:
        """`new` for the sequences that step `t` belongs to, else `old`"""
        return new if self.active is None else np.where(self.active[t, :, None], new, old)

    def kept(self, values: Array) -> Array:
        """`values` (time, batch, n), zero after the end of each sequence"""
        return values if self.active is None else np.where(self.active[:, :, None], values, values.dtype.type(0))

    def last(self, state: Array) -> Array:
        """`state` (batch, hidden), zero for a sequence without a step, which has no last state"""
        if self.active is None:
            return state if self.time else np.zeros_like(state)
        return np.where(np.any(self.active, 0, keepdims=True).T, state, state.dtype.type(0))

    def before(self, states: Array, initial: Array, backward: bool) -> Array:
        """For each step the state that it starts from"""
        if not backward:
            return self.kept(np.concatenate((initial[None], states))[:-1])
        if self.active is not None:
            states = np.where(self.active[:, :, None], states, initial)
        return self.kept(np.concatenate((states, initial[None]))[1:])


def _sequences(X: Array, lengths: Array | None) -> _Sequences:
    time = len(X)
    if lengths is None:
        return _Sequences(time, None)
    if ((lengths < 0) | (lengths > time)).any():
        raise ValueError(f"sequence_lens is {lengths.tolist()}, expected lengths from 0 to {time}")
    return _Sequences(time, np.asarray(np.arange(time)[:, None] < lengths))


def _read(
    gates: int, default: tuple[str, ...], settings: dict[str, Any], X: Array, W: Array, R: Array, **given: Any
) -> tuple[Directions, _Sequences, int]:
    """Read the directions with their functions, the steps and the number of hidden units, and check all shapes."""
    ways = directions_of(default, **{name: value for name, value in settings.items() if name != "hidden_size"})
    _check(gates, len(ways), settings["hidden_size"], X, W, R, **given)
    return ways, _sequences(X, given["sequence_lens"]), R.shape[2]


def _check(gates: int, directions: int, hidden_size: int | None, X: Array, W: Array, R: Array, **others: Any) -> None:
    """Raise ValueError unless all shapes go together; `others` by the names in `expected`."""
    if X.ndim != 3 or R.ndim != 3:
        raise ValueError(f"X has shape {X.shape} and R {R.shape}, expected three axes each")
    time, batch, inputs = X.shape
    hidden = R.shape[2] if hidden_size is None else hidden_size
    state, steps = (directions, batch, hidden), (time, directions, batch)
    expected = {
        "W": (directions, gates * hidden, inputs),
        "R": (directions, gates * hidden, hidden),
        "B": (directions, 2 * gates * hidden),
        "P": (directions, 3 * hidden),
        "sequence_lens": (batch,),
        **dict.fromkeys(("initial_h", "initial_c", "dHt", "dCt"), state),
        **dict.fromkeys(("HAll", "CAll", "dHAll"), (*steps, hidden)),
        **dict.fromkeys(("zrh", "iofc"), (*steps, gates * hidden)),
    }
    for name, value in {"W": W, "R": R, **others}.items():
        if value is not None and value.shape != expected[name]:
            raise ValueError(f"{name} has shape {value.shape}, expected {expected[name]} (hidden_size {hidden})")


def _time_first(layout: int, *values: Array | None) -> Any:
    """X or initial states with time or direction first; in layout 1 the batch is."""
    if layout not in (0, 1):
        raise ValueError(f"layout is {layout}, expected 0 or 1")
    return tuple(v.swapaxes(0, 1) if layout and v is not None and v.ndim > 1 else v for v in values)


def _laid_out(layout: int, Y: Array, *states: Array) -> tuple[Array, ...]:
    """Y (time, direction, batch, hidden) and states (direction, batch, hidden); in layout 1 with the batch first."""
    if not layout:
        return Y, *states
    return Y.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in states)


def _start(initial: Array | None, k: int, X: Array, R: Array) -> Array:
    """The initial state of direction `k`, zero if it is not given"""
    return np.zeros((X.shape[1], R.shape[2]), X.dtype) if initial is None else initial[k]


def _rows(x: Array) -> Array:
    """(..., n) to (product of the others, n)"""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _from_inputs(X: Array, W: Array, bias: Array | None) -> Array:
    """X·Wᵀ + bias of every step: (time, batch, gates·hidden)"""
    product = np.asarray(_rows(X) @ W.T).reshape(*X.shape[:2], len(W))
    if bias is not None:
        product += bias
    return product


def _to_inputs(X: Array, W: Array, da: Array) -> tuple[Array, Array, Array]:
    """The gradients of X, W and the bias from the gates' arguments' gradients, (direction, time, batch, gates·hidden)"""
    da = da.reshape(len(da), math.prod(da.shape[1:3]), da.shape[3])
    return (da @ W).sum(0).reshape(X.shape), da.swapaxes(1, 2) @ _rows(X), da.sum(1)


def _product(da: Array, states: Array) -> Array:
    """The gradient Σ daᵀ·H of R (gates·hidden, hidden), over time and batch"""
    return np.asarray(_rows(da).T @ _rows(states))


def _gates_memory(X: Array, W: Array, *_: Any, **__: Any) -> None:
    """Take the memory of the gates of all steps and of the products of one step."""
    need((math.prod(W.shape[:2]) * X.shape[0] + _OF_A_STEP * W.shape[1]) * X.shape[1] * X.itemsize)


def _lstm_memory(X: Array, W: Array, R: Array, *_: Any, **__: Any) -> None:
    """Take the memory of the gates of all steps, the cells, and the products of one step."""
    of_sequence = W.shape[0] * (W.shape[1] + R.shape[2]) * X.shape[0]
    need((of_sequence + 2 * W.shape[1]) * X.shape[1] * X.itemsize)  # the sum takes the place of the gates


@kernel("RNN", in_float32=True, fresh=True, attributes=_SETTINGS, abstract=_gates_memory)
def rnn(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    layout: int = 0,
    output_sequence: int = 1,
    **settings: Any,
) -> tuple[Array, ...]:
    """H = f(X·Wᵀ + H₋₁·Rᵀ + b)"""
    if settings["activations"] == ["Tanh", "Tanh"]:
        settings["activations"] = None  # the schema's default, for one direction too
    X, initial_h = _time_first(layout, X, initial_h)
    given = {"B": B, "sequence_lens": sequence_lens, "initial_h": initial_h}
    directions, sequences, n = _read(1, ("Tanh",), settings, X, W, R, **given)
    Y = np.empty((len(X), len(directions), X.shape[1], n), X.dtype)
    Y_h = np.empty(Y.shape[1:], X.dtype)
    for k, (backward, (f,)) in enumerate(directions):
        h, Rt = _start(initial_h, k, X, R), R[k].T
        gates = _from_inputs(X, W[k], None if B is None else B[k, :n] + B[k, n:])
        for t in sequences.steps(backward):
            h = sequences.choose(t, f(gates[t] + h @ Rt), h)
            Y[t, k] = h
        Y[:, k], Y_h[k] = sequences.kept(Y[:, k]), sequences.last(h)
    return _laid_out(layout, Y, Y_h)


@kernel("GRU", in_float32=True, fresh=True, attributes=_SETTINGS, abstract=_gates_memory)
@kernel("GRUTraining", domain=MICROSOFT, in_float32=True, fresh=True, attributes=_SETTINGS)
def gru(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    linear_before_reset: int = 0,
    layout: int = 0,
    output_sequence: int = 1,
    _wanted: tuple[bool, ...] = (True, True),
    **settings: Any,
) -> tuple[Array, ...]:
    """z, r = f(X·Wᵀ + H₋₁·Rᵀ + b), H = (1 − z)·h + z·H₋₁

    h = g(X·Whᵀ + (r·H₋₁)·Rhᵀ + b), or with linear_before_reset g(X·Whᵀ + Wb + r·(H₋₁·Rhᵀ + Rb)). GRUTraining, which has no
    layout, has a third result (time, direction, batch, 3·hidden): z, r and h of every step.
    """
    X, initial_h = _time_first(layout, X, initial_h)
    given = {"B": B, "sequence_lens": sequence_lens, "initial_h": initial_h}
    directions, sequences, n = _read(3, _GRU, settings, X, W, R, **given)
    Y = np.empty((len(X), len(directions), X.shape[1], n), X.dtype)
    Y_h = np.empty(Y.shape[1:], X.dtype)
    zrh = []
    for k, (backward, (f, g)) in enumerate(directions):
        # Before the reset, H₋₁·Rᵀ is one product for all gates.
        H, Rt, Rht = _start(initial_h, k, X, R), R[k, : 3 * n if linear_before_reset else 2 * n].T, R[k, 2 * n :].T
        bias, Rb = None, X.dtype.type(0)
        if B is not None:
            bias, Rb = B[k, : 3 * n].copy(), B[k, 5 * n :]
            bias[: 2 * n] += B[k, 3 * n : 5 * n]
            if not linear_before_reset:
                bias[2 * n :] += Rb
        gates = _from_inputs(X, W[k], bias)
        for t in sequences.steps(backward):
            zr, h = gates[t, :, : 2 * n], gates[t, :, 2 * n :]
            product = H @ Rt
            zr[...] = f(zr + product[:, : 2 * n])
            z, r = zr[:, :n], zr[:, n:]
            h[...] = g(h + (r * (product[:, 2 * n :] + Rb) if linear_before_reset else (r * H) @ Rht))
            H = sequences.choose(t, (1 - z) * h + z * H, H)
            Y[t, k] = H
        Y[:, k], Y_h[k] = sequences.kept(Y[:, k]), sequences.last(H)
        if len(_wanted) > 2:
            zrh.append(sequences.kept(gates))
    return *_laid_out(layout, Y, Y_h), *([np.stack(zrh, 1)] if zrh else [])


@kernel("GRUGrad", domain=MICROSOFT, in_float32=True, fresh=True, attributes=_SETTINGS)
def gru_grad(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None,
    sequence_lens: Array | None,
    initial_h: Array | None,
    HAll: Array,
    zrh: Array,
    dHAll: Array | None = None,
    dHt: Array | None = None,
    *,
    linear_before_reset: int = 0,
    **settings: Any,
) -> tuple[Array, ...]:
    """The gradients of X, W, R, B and initial_h, from the results of GRUTraining and the gradients of the first two

    dz = dH·(H₋₁ − h), dh = dH·(1 − z); times the slopes of f and g they are da, the gradients of the gates' arguments, and
    dH₋₁ = dH·z + da·R, where what h reads is r·H₋₁, or with linear_before_reset r·q, q = H₋₁·Rhᵀ + Rb.
    """
    given = {"B": B, "sequence_lens": sequence_lens, "initial_h": initial_h}
    results = {"HAll": HAll, "zrh": zrh, "dHAll": dHAll, "dHt": dHt}
    directions, sequences, n = _read(3, _GRU, settings, X, W, R, **given, **results)
    da = np.empty((len(directions), *X.shape[:2], 3 * n), X.dtype)
    dR, dRb = np.empty_like(R), np.empty((len(R), 3 * n), X.dtype)
    dH0 = np.empty((len(R), X.shape[1], n), X.dtype)
    for k, (backward, (f, g)) in enumerate(directions):
        gates = zrh[:, k]
        z, r, h = gates[..., :n], gates[..., n : 2 * n], gates[..., 2 * n :]
        before = sequences.before(HAll[:, k], _start(initial_h, k, X, R), backward)
        slopes, slope = f.slope(gates[..., : 2 * n]), (1 - z) * g.slope(h)
        Rzr, Rh = R[k, : 2 * n], R[k, 2 * n :]
        q = _from_inputs(before, Rh, None if B is None else B[k, 5 * n :]) if linear_before_reset else None
        dH = sequences.last(_start(dHt, k, X, R))
        for t in reversed(sequences.steps(backward)):
            dz, dr, dh = da[k, t, :, :n], da[k, t, :, n : 2 * n], da[k, t, :, 2 * n :]
            d = dH if dHAll is None else dH + dHAll[t, k]
            dz[...] = d * (before[t] - h[t])
            dh[...] = d * slope[t]
            d = d * z[t]
            if q is not None:
                dr[...] = dh * q[t]
                d += (dh * r[t]) @ Rh
            else:
                product = dh @ Rh
                dr[...] = product * before[t]
                d += product * r[t]
            da[k, t, :, : 2 * n] *= slopes[t]
            d += da[k, t, :, : 2 * n] @ Rzr
            dH = sequences.choose(t, d, dH)
        da[k], dH0[k] = sequences.kept(da[k]), dH
        dzr, dh = da[k, ..., : 2 * n], da[k, ..., 2 * n :]
        dq = dh * r if linear_before_reset else dh
        dR[k, : 2 * n], dRb[k, : 2 * n] = _product(dzr, before), _rows(dzr).sum(0)
        dR[k, 2 * n :], dRb[k, 2 * n :] = _product(dq, before if linear_before_reset else r * before), _rows(dq).sum(0)
    dX, dW, dWb = _to_inputs(sequences.kept(X), W, da)
    return dX, dW, dR, np.concatenate((dWb, dRb), 1), dH0


@kernel("LSTM", in_float32=True, fresh=True, attributes=_SETTINGS, abstract=_lstm_memory)
@kernel("LSTMTraining", domain=MICROSOFT, in_float32=True, fresh=True, attributes=_SETTINGS)
def lstm(
    X: Array,
    W: Array,
    R: Array,
    B: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    P: Array | None = None,
    *,
    input_forget: int = 0,
    layout: int = 0,
    output_sequence: int = 1,
    _wanted: tuple[bool, ...] = (True, True, True),
    **settings: Any,
) -> tuple[Array, ...]:
    """i, o, f = f(X·Wᵀ + H₋₁·Rᵀ + P·C₋₁ + b), c = g(X·Wᵀ + H₋₁·Rᵀ + b), C = f·C₋₁ + i·c, H = o·h(C)

    o sees C where i and f see C₋₁; with input_forget f = 1 − i. LSTMTraining, which has no layout, has two more results
    (time, direction, batch, ...): C, and i, o, f, c, of every step.
    """
    X, initial_h, initial_c = _time_first(layout, X, initial_h, initial_c)
    given = {"B": B, "sequence_lens": sequence_lens, "initial_h": initial_h, "initial_c": initial_c, "P": P}
    directions, sequences, n = _read(4, _LSTM, settings, X, W, R, **given)
    Y = np.empty((len(X), len(directions), X.shape[1], n), X.dtype)
    Y_h, Y_c = np.empty(Y.shape[1:], X.dtype), np.empty(Y.shape[1:], X.dtype)
    cells, iofc = [], []
    for k, (backward, (f, g, hidden)) in enumerate(directions):
        H, C, Rt = _start(initial_h, k, X, R), _start(initial_c, k, X, R), R[k].T
        gates = _from_inputs(X, W[k], None if B is None else B[k, : 4 * n] + B[k, 4 * n :])
        every_C = np.empty((*X.shape[:2], n), X.dtype)
        for t in sequences.steps(backward):
            a = gates[t]
            a += H @ Rt
            i, o, forget, c = (a[:, j : j + n] for j in range(0, 4 * n, n))
            if P is None:
                a[:, : 3 * n] = f(a[:, : 3 * n])
            else:
                i[...] = f(i + P[k, :n] * C)
                forget[...] = f(forget + P[k, 2 * n :] * C)
            if input_forget:
                forget[...] = 1 - i
            c[...] = g(c)
            new = forget * C + i * c
            if P is not None:
                o[...] = f(o + P[k, n : 2 * n] * new)
            H = sequences.choose(t, o * hidden(new), H)
            C = sequences.choose(t, new, C)
            Y[t, k], every_C[t] = H, C
        Y[:, k], Y_h[k], Y_c[k] = sequences.kept(Y[:, k]), sequences.last(H), sequences.last(C)
        if len(_wanted) > 3:
            cells.append(sequences.kept(every_C))
            iofc.append(sequences.kept(gates))
    steps = [np.stack(cells, 1), np.stack(iofc, 1)] if cells else []
    return *_laid_out(layout, Y, Y_h, Y_c), *steps


@kernel("LSTMGrad", domain=MICROSOFT, in_float32=True, fresh=True, attributes=_SETTINGS)
def lstm_grad(
    X: Array,
    W: Array,
    R: Array,
    sequence_lens: Array | None,
    initial_h: Array | None,
    initial_c: Array | None,
    HAll: Array,
    CAll: Array,
    iofc: Array,
    dHAll: Array | None = None,
    dHt: Array | None = None,
    dCt: Array | None = None,
    *,
    input_forget: int = 0,
    **settings: Any,
) -> tuple[Array, ...]:
    """The gradients of X, W, R, B, initial_h, initial_c and P, from LSTMTraining's results and the first three's gradients

    dC += dH·o·h'(C), do = dH·h(C), di = dC·c, df = dC·C₋₁, dc = dC·i; times the slopes of f and g they are da, the gradients
    of the gates' arguments; dH₋₁ = da·R and dC₋₁ = dC·f. The operator does not read P: the gradients are taken at P = 0.
    """
    given = {"sequence_lens": sequence_lens, "initial_h": initial_h, "initial_c": initial_c}
    results = {"HAll": HAll, "CAll": CAll, "iofc": iofc, "dHAll": dHAll, "dHt": dHt, "dCt": dCt}
    directions, sequences, n = _read(4, _LSTM, settings, X, W, R, **given, **results)
    da = np.empty((len(directions), *X.shape[:2], 4 * n), X.dtype)
    dR, dP = np.empty_like(R), np.empty((len(R), 3 * n), X.dtype)
    dH0 = np.empty((len(R), X.shape[1], n), X.dtype)
    dC0 = np.empty_like(dH0)
    for k, (backward, (f, g, hidden)) in enumerate(directions):
        gates, C = iofc[:, k], CAll[:, k]
        i, o, forget, c = (gates[..., j : j + n] for j in range(0, 4 * n, n))
        H_before = sequences.before(HAll[:, k], _start(initial_h, k, X, R), backward)
        C_before = sequences.before(C, _start(initial_c, k, X, R), backward)
        hC = hidden(C)
        slopes, through_C = f.slope(gates[..., : 3 * n]), o * hidden.slope(hC)
        by_C = np.concatenate((c - C_before if input_forget else c, np.zeros_like(c), C_before, i * g.slope(c)), 2)
        by_C[..., : 3 * n] *= slopes
        if input_forget:
            by_C[..., 2 * n : 3 * n] = 0
        by_H = hC * slopes[..., n : 2 * n]
        dH, dC = sequences.last(_start(dHt, k, X, R)), sequences.last(_start(dCt, k, X, R))
        for t in reversed(sequences.steps(backward)):
            d = dH if dHAll is None else dH + dHAll[t, k]
            cell = dC + d * through_C[t]
            step = da[k, t]
            np.multiply(by_C[t].reshape(-1, 4, n), cell[:, None], out=step.reshape(-1, 4, n))
            step[:, n : 2 * n] = d * by_H[t]
            dH = sequences.choose(t, step @ R[k], dH)
            dC = sequences.choose(t, cell * forget[t], dC)
        da[k], dH0[k], dC0[k] = sequences.kept(da[k]), dH, dC
        dR[k] = _product(da[k], H_before)
        for j, state in enumerate((C_before, C, C_before)):
            dP[k, j * n : (j + 1) * n] = (da[k, ..., j * n : (j + 1) * n] * state).sum((0, 1))
    dX, dW, db = _to_inputs(sequences.kept(X), W, da)
    return dX, dW, dR, np.concatenate((db, db), 1), dH0, dC0, dP
