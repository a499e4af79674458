"""Backpropagation through time: the gradients of RNN, GRU and LSTM.

What a step needs of the forward pass is computed for all steps at once: the arguments of the gates from X and from Y, which
holds the state before every step, and the factors by which the cotangent of a state is multiplied. A Scan carries that
cotangent from the last step to the first, and nothing else; the cotangents of X, W, R, B and P are one product or
sum each, after it.

The arrays of one direction have the axes time, batch, and gate times hidden unit, with n units. A direction that reads
backwards is scanned the other way round. A sequence that is shorter than X keeps its state through the padding, where every
factor is 0: so nothing reaches the cotangents from there.

In the formulas H, C are the states after a step and H₋₁, C₋₁ those before it; a_z is the argument of gate z.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from refgrad.builder.op import Emitter
from refgrad.errors import RuleError, choices
from refgrad.formulas.indexing import WRITTEN_OUT, up_to
from refgrad.protos.traverse import attribute_value
from refgrad.tables.registry import RULES, lowering

Numbers = Sequence[float] | None
Step = Callable[..., tuple[Sequence[str], Sequence[str]]]  # states and elements to states and elements
_BACKWARD = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_LAST = np.iinfo(np.int64).max

# The functions that `activations` may name: the operator of that name, or its own, and their parameters.
_FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "relu": ("Relu", ()),
    "tanh": ("Tanh", ()),
    "sigmoid": ("Sigmoid", ()),
    "affine": ("Affine", ("alpha", "beta")),
    "leakyrelu": ("LeakyRelu", ("alpha",)),
    "thresholdedrelu": ("ThresholdedRelu", ("alpha",)),
    "scaledtanh": ("ScaledTanh", ("alpha", "beta")),
    "hardsigmoid": ("HardSigmoid", ("alpha", "beta")),
    "elu": ("Elu", ("alpha",)),
    "softsign": ("Softsign", ()),
    "softplus": ("Softplus", ()),
}


@dataclass(frozen=True, slots=True)
class GateFunction:
    """One of the functions with its parameters; its argument is clipped to ±clip first."""

    name: str
    parameters: Mapping[str, float]
    clip: float | None

    def of(self, op: Emitter, x: str) -> str:
        """f(x), by the operator's text: ThresholdedRelu is x from α on, unlike the operator of that name."""
        x, p = self._clipped(op, x), self.parameters
        if self.name == "Affine":
            return op.Add(op.Mul(x, p["alpha"]), p["beta"])
        if self.name == "ScaledTanh":
            return op.Mul(op.Tanh(op.Mul(x, p["beta"])), p["alpha"])
        if self.name == "ThresholdedRelu":
            return op.Where(op.Less(x, p["alpha"]), 0.0, x)
        return str(getattr(op, self.name)(x, **p))

    def adjoint(self, op: Emitter, d_y: str, x: str | None, y: str) -> str:
        """d_y·f'(x) where y = f(x), and 0 where x was clipped. At a kink the operator's rule chooses the slope."""
        if x is None:
            if self.clip is not None or self.name not in ("Sigmoid", "Tanh"):
                raise RuleError(
                    f"Node {op.node!r} has what its gates were, not their arguments: these tell the slopes of Sigmoid and "
                    "Tanh without clip, no others. Leave activations and clip out."
                )
            return self._slope(op, d_y, y, y)
        inner = self._clipped(op, x)
        d_x = self._slope(op, d_y, inner, y)
        return d_x if self.clip is None else op.Where(op.Equal(x, inner), d_x, 0.0)

    def _clipped(self, op: Emitter, x: str) -> str:
        return x if self.clip is None else op.Clip(x, -self.clip, self.clip)

    def _slope(self, op: Emitter, d_y: str, x: str, y: str) -> str:
        p = self.parameters
        if self.name == "Affine":
            return op.Mul(d_y, p["alpha"])
        if self.name == "ScaledTanh":
            return op.grad.TanhGrad(op.Mul(d_y, p["alpha"] * p["beta"]), op.Tanh(op.Mul(x, p["beta"])))
        rule = RULES["", self.name]
        given = {"cotangent": d_y, "input": x, "output": y}
        reads, _ = rule.bind(op.opset)
        return str(rule.function(op, *(given.get(r.kind, p.get(r.name, r.default)) for r in reads)))


def functions(
    op: Emitter,
    default: tuple[str, ...],
    *,
    direction: str,
    activations: Sequence[str] | None,
    activation_alpha: Numbers,
    activation_beta: Numbers,
    clip: float | None,
    **_: Any,
) -> list[tuple[bool, list[GateFunction]]]:
    """For each direction whether it reads backwards, and its functions: each takes the next α and β if it has one."""
    if direction not in _BACKWARD:
        raise RuleError(f"Node {op.node!r} has direction {direction!r}; there are {choices(_BACKWARD)}.")
    backward = _BACKWARD[direction]
    names = list(activations or default * len(backward))
    if default == ("Tanh",) and names == ["Tanh", "Tanh"]:
        names = names[: len(backward)]  # the default of RNN in its schema, for one direction too
    if len(names) != len(default) * len(backward):
        expected = len(default) * len(backward)
        raise RuleError(f"Expected {expected} activations for node {op.node!r}, got {len(names)}: {choices(names)}.")
    alpha, beta = iter(activation_alpha or ()), iter(activation_beta or ())
    made = [_function(op, name, alpha, beta, clip) for name in names]
    return [(b, made[k * len(default) : (k + 1) * len(default)]) for k, b in enumerate(backward)]


def _function(
    op: Emitter, name: str, alphas: Iterator[float], betas: Iterator[float], clip: float | None
) -> GateFunction:
    if name.lower() not in _FUNCTIONS:
        there_are = choices(known for known, _ in _FUNCTIONS.values())
        raise RuleError(f"An activation of node {op.node!r} is {name!r}; there are {there_are}.")
    known, parameters = _FUNCTIONS[name.lower()]
    values = {}
    for parameter in parameters:
        value = next(alphas if parameter == "alpha" else betas, None)
        if value is None and not onnx.defs.has(known):
            raise RuleError(
                f"{known}, an activation of node {op.node!r}, has no default {parameter}: give it in "
                f"activation_{parameter}."
            )
        values[parameter] = (
            attribute_value(onnx.defs.get_schema(known).attributes[parameter].default_value) if value is None else value
        )
    return GateFunction(known, values, clip)


class _ActiveSteps:
    """The steps that belong to a sequence: `active` is (time, batch, 1), None if all sequences are as long as X.

    A Scan needs a step: ONNX Runtime runs none without, and what it returned would have no shape. So where only the run
    tells the number of steps, one more is read that belongs to no sequence.
    """

    def __init__(self, op: Emitter, X: str, lengths: str | None) -> None:
        self.op = op
        self.active: str | None = None
        self.some: str | None = None
        self.read: str | None = None  # what a Scan has in place of `active`
        time = (op.shape(X) or (None,))[0]
        self.surplus = not isinstance(time, int)
        if lengths is None and not self.surplus:
            return
        steps = time if isinstance(time, int) else op.Gather(op.Shape(X), np.array(0))
        ends = steps if lengths is None else op.Unsqueeze(op.Cast(lengths, to=onnx.TensorProto.INT64), [1])
        self.some = op.Greater(ends, 0)
        if lengths is not None:
            self.active = self.read = op.Less(self._count(steps), ends)
        if not isinstance(steps, int):
            self.read = op.Less(self._count(op.Add(steps, 1)), ends)

    def _count(self, steps: str | int) -> str:
        """0, 1, 2, ... as (steps, 1, 1)"""
        if isinstance(steps, int) and steps <= WRITTEN_OUT:
            return self.op.const(np.arange(steps)[:, None, None])
        numbers = up_to(self.op, steps) if isinstance(steps, int) else self.op.Range(0, steps, 1)
        return self.op.Unsqueeze(numbers, [1, 2])

    def kept(self, values: str) -> str:
        """`values`, 0 in the padding."""
        return values if self.active is None else self.op.Where(self.active, values, 0.0)

    def last(self, state: str) -> str:
        """The cotangent of a last state, 0 for a sequence without a step: it has no last state."""
        return state if self.some is None else self.op.Where(self.some, state, 0.0)

    def before(self, states: str, initial: str, backward: bool) -> str:
        """The state that each step starts from."""
        op, first = self.op, self.op.Unsqueeze(initial, [0])
        if backward:
            padded = states if self.active is None else op.Where(self.active, states, first)
            return self.kept(op.Slice(op.Concat(padded, first, axis=0), [1], [_LAST], [0]))
        return self.kept(op.Slice(op.Concat(first, states, axis=0), [0], [-1], [0]))

    def scan(
        self,
        step: Step,
        states: Sequence[str],
        backward: bool,
        **sequences: str | None,
    ) -> tuple[list[str], list[str]]:
        """Run `step(*states, **elements)` over time; in the padding a state stays what it is.

        `step` returns the new states and what becomes a sequence again. A sequence that is None is no argument of it.
        """
        op, count = self.op, len(states)
        given = {name: value for name, value in sequences.items() if value is not None}
        inputs = list(given.values())
        if self.surplus:
            inputs = [op.Pad(value, [0, 0, 0, 1, 0, 0]) for value in inputs]
        if self.read is not None:
            inputs.append(self.read)

        def body(*reads: str) -> list[str]:
            old, elements = reads[:count], reads[count:]
            new, rows = step(*old, **dict(zip(given, elements, strict=False)))
            if self.read is not None:
                new = [op.Where(elements[-1], value, kept) for value, kept in zip(new, old, strict=True)]
            for value in (*new, *rows):
                op.assume(value, (None, None))
            return [*new, *rows]

        graph = op.subgraph(body, *states, *inputs)
        attributes = {
            "body": graph,
            "num_scan_inputs": len(inputs),
            "scan_input_directions": [int(backward)] * len(inputs),
            "scan_output_directions": [int(backward)] * (len(graph.output) - count),
        }
        made = op.emit_all("Scan", "", (*states, *inputs), len(graph.output), attributes)
        rows = [op.Slice(row, [0], [-1], [0]) if self.surplus else row for row in made[count:]]
        return list(made[:count]), rows


def _matrix(op: Emitter, weights: str, k: int) -> str:
    """The weights (gate · hidden, columns) of direction `k`."""
    matrix = op.Gather(weights, np.array(k), axis=0)
    op.assume(matrix, (op.shape(weights) or (None, None, None))[1:])
    return matrix


def _of_direction(op: Emitter, values: str, k: int) -> str:
    """The values (time, batch, n) of direction `k`, from `values` (time, direction, batch, n)."""
    return op.Gather(values, np.array(k), axis=1)


def _state(op: Emitter, state: str | None, k: int, steps: str) -> str:
    """The state (batch, hidden) of direction `k`; 0 where it is absent, and of the size of the states `steps` of all steps."""
    if state is not None:
        return op.Gather(state, np.array(k), axis=0)
    static = op.static(steps)
    return op.full(op.Shape(steps, start=2) if static is None else list(static[2:]), 0.0, like=steps)


def _parts(op: Emitter, values: str, count: int) -> tuple[str, ...]:
    """Equal parts along the last axis."""
    numbered = {"num_outputs": count} if op.opset >= 18 else {}
    parts = op.Split(values, axis=-1, outputs=count, **numbered)
    return tuple(parts)


def _times(op: Emitter, values: str, matrix: str) -> str:
    """values · matrixᵀ"""
    return op.grad.FusedMatMul(values, matrix, transA=0, transB=1)


def _add(op: Emitter, *values: str | None) -> str:
    """The sum of those that are there."""
    total, *others = (value for value in values if value is not None)
    for value in others:
        total = op.Add(total, value)
    return total


def _product(op: Emitter, da: str, values: str) -> str:
    """Σ daᵀ·values over time and batch: the cotangent of the matrix that values are multiplied with."""
    rows = [op.Flatten(value, axis=2) for value in (da, values)]
    for value in rows:
        op.assume(value, (None, None))
    return op.grad.FusedMatMul(*rows, transA=1, transB=0)


def _total(op: Emitter, values: str) -> str:
    """The sum over time and batch."""
    return op.ReduceSum(values, [0, 1], keepdims=0)


def _stacked(op: Emitter, values: Sequence[str], axis: int = 0) -> str:
    """The values of each direction along a new axis."""
    return op.Concat(*(op.Unsqueeze(value, [axis]) for value in values), axis=axis)


def _transposed(results: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(zip(*results, strict=True))


def _biases(op: Emitter, B: str | None, k: int) -> tuple[str | None, str | None]:
    """The biases of W and of R for direction `k`, each (gate · hidden); None without `B`."""
    if B is None:
        return None, None
    both = op.Gather(B, np.array(k), axis=0)
    w, r = _parts(op, both, 2)
    return w, r


@lowering("RNNGrad")
def rnn_grad(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    Y: str,
    dY: str | None,
    dY_h: str | None,
    **settings: Any,
) -> tuple[str, ...]:
    """H = f(a), a = X·Wᵀ + H₋₁·Rᵀ + b: da = dH·f'(a), dH₋₁ = da·R, dX = da·W, dW = Σ daᵀ·X, dR = Σ daᵀ·H₋₁, db = Σ da"""
    sequences, results = _ActiveSteps(op, X, sequence_lens), []
    X = sequences.kept(X)
    directions = functions(op, ("Tanh",), **settings)
    for k, (backward, (f,)) in enumerate(directions):
        w, r, H = _matrix(op, W, k), _matrix(op, R, k), _of_direction(op, Y, k)
        before = sequences.before(H, _state(op, initial_h, k, Y), backward)
        a = _add(op, _times(op, X, w), _times(op, before, r), *_biases(op, B, k))
        slope = sequences.kept(f.adjoint(op, op.full(op.Shape(H), 1.0, like=H), a, H))
        last = sequences.last(_state(op, dY_h, k, Y))
        cotangent = None if dY is None else _of_direction(op, dY, k)
        [dH], [da] = sequences.scan(_rnn_step(op, r), [last], not backward, slope=slope, dY=cotangent)
        db = _total(op, da)
        results.append((op.MatMul(da, w), _product(op, da, X), _product(op, da, before), op.Concat(db, db, axis=0), dH))
    dX, *others = _transposed(results)
    return _add(op, *dX), *(_stacked(op, values) for values in others)


def _rnn_step(op: Emitter, R: str) -> Step:
    def step(dH: str, slope: str, dY: str | None = None) -> tuple[Sequence[str], Sequence[str]]:
        da = op.Mul(_add(op, dH, dY), slope)
        return [op.MatMul(da, R)], [da]

    return step


@lowering("GRUGates")
def gru_gates(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    Y: str,
    linear_before_reset: int,
    **settings: Any,
) -> tuple[str, str]:
    """a_z, a_r = X·Wᵀ + H₋₁·Rᵀ + b, a_h = X·W_hᵀ + (r·H₋₁)·R_hᵀ + b, with linear_before_reset X·W_hᵀ + b + r·(H₋₁·R_hᵀ + b)"""
    sequences, results = _ActiveSteps(op, X, sequence_lens), []
    X = sequences.kept(X)
    directions = functions(op, ("Sigmoid", "Tanh"), **settings)
    for k, (backward, (f, g)) in enumerate(directions):
        before = sequences.before(_of_direction(op, Y, k), _state(op, initial_h, k, Y), backward)
        Rzr, Rh = _split_gru(op, R, k)
        Wb, Rb = _biases(op, B, k)
        Rb_zr, Rb_h = (None, None) if Rb is None else _zr_and_h(op, Rb)
        x_zr, x_h = _zr_and_h(op, _add(op, _times(op, X, _matrix(op, W, k)), Wb))
        a_zr = _add(op, x_zr, _times(op, before, Rzr), Rb_zr)
        zr = f.of(op, a_zr)
        _, r = _parts(op, zr, 2)
        if linear_before_reset:
            a_h = op.Add(x_h, op.Mul(r, _add(op, _times(op, before, Rh), Rb_h)))
        else:
            a_h = _add(op, x_h, _times(op, op.Mul(r, before), Rh), Rb_h)
        results.append((op.Concat(zr, g.of(op, a_h), axis=-1), op.Concat(a_zr, a_h, axis=-1)))
    zrh, arguments = (_stacked(op, values, axis=1) for values in _transposed(results))
    return zrh, arguments


def _split_gru(op: Emitter, R: str, k: int) -> tuple[str, str]:
    """The rows of R for z and r, and those for h."""
    z, r, h = op.Split(_matrix(op, R, k), axis=0, outputs=3, **({"num_outputs": 3} if op.opset >= 18 else {}))
    both = op.Concat(z, r, axis=0)
    for matrix in (both, h):
        op.assume(matrix, (None, None))
    return both, h


def _zr_and_h(op: Emitter, values: str) -> tuple[str, str]:
    z, r, h = _parts(op, values, 3)
    return op.Concat(z, r, axis=-1), h


@lowering("GRUGrad")
def gru_grad(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    HAll: str,
    zrh: str,
    dHAll: str | None,
    dHt: str | None,
    arguments: str | None,
    linear_before_reset: int,
    **settings: Any,
) -> tuple[str, ...]:
    """H = (1 − z)·h + z·H₋₁: da_z = dH·(H₋₁ − h)·f'(a_z), da_h = dH·(1 − z)·g'(a_h); then, with p = da_h·R_h,
    da_r = p·H₋₁·f'(a_r), dH₋₁ = dH·z + p·r + da_z·R_z + da_r·R_r;
    with linear_before_reset, where q = H₋₁·R_hᵀ + b, da_r = da_h·q·f'(a_r), dH₋₁ = dH·z + (da_h·r)·R_h + da_z·R_z + da_r·R_r
    """
    sequences, results = _ActiveSteps(op, X, sequence_lens), []
    X = sequences.kept(X)
    directions = functions(op, ("Sigmoid", "Tanh"), **settings)
    for k, (backward, (f, g)) in enumerate(directions):
        before = sequences.before(_of_direction(op, HAll, k), _state(op, initial_h, k, HAll), backward)
        Rzr, Rh = _split_gru(op, R, k)
        zr, h = _zr_and_h(op, _of_direction(op, zrh, k))
        z, r = _parts(op, zr, 2)
        a_zr, a_h = (None, None) if arguments is None else _zr_and_h(op, _of_direction(op, arguments, k))
        if linear_before_reset:
            _, Rb = _biases(op, B, k)
            reset = _add(op, _times(op, before, Rh), None if Rb is None else _zr_and_h(op, Rb)[1])
        else:
            reset = before
        by_zr = sequences.kept(f.adjoint(op, op.Concat(op.Sub(before, h), reset, axis=-1), a_zr, zr))
        by_h = sequences.kept(g.adjoint(op, op.Sub(1.0, z), a_h, h))
        last = sequences.last(_state(op, dHt, k, HAll))
        cotangent = None if dHAll is None else _of_direction(op, dHAll, k)
        elements = {"z": z, "r": r, "by_zr": by_zr, "by_h": by_h, "dY": cotangent}
        step = _gru_step(op, Rzr, Rh, linear_before_reset)
        [dH], [dzr, dh] = sequences.scan(step, [last], not backward, **elements)
        da = op.Concat(dzr, dh, axis=-1)
        dq, read = (op.Mul(dh, r), before) if linear_before_reset else (dh, op.Mul(r, before))
        dR = op.Concat(_product(op, dzr, before), _product(op, dq, read), axis=0)
        dB = op.Concat(_total(op, da), _total(op, dzr), _total(op, dq), axis=0)
        results.append((op.MatMul(da, _matrix(op, W, k)), _product(op, da, X), dR, dB, dH))
    dX, *others = _transposed(results)
    return _add(op, *dX), *(_stacked(op, values) for values in others)


def _gru_step(op: Emitter, Rzr: str, Rh: str, linear_before_reset: int) -> Step:
    def step(
        dH: str, z: str, r: str, by_zr: str, by_h: str, dY: str | None = None
    ) -> tuple[Sequence[str], Sequence[str]]:
        by_z, by_r = _parts(op, by_zr, 2)
        d = _add(op, dH, dY)
        dz, dh = op.Mul(d, by_z), op.Mul(d, by_h)
        if linear_before_reset:
            dr, inner = op.Mul(dh, by_r), op.MatMul(op.Mul(dh, r), Rh)
        else:
            product = op.MatMul(dh, Rh)
            dr, inner = op.Mul(product, by_r), op.Mul(product, r)
        dzr = op.Concat(dz, dr, axis=-1)
        return [_add(op, op.Mul(d, z), inner, op.MatMul(dzr, Rzr))], [dzr, dh]

    return step


@lowering("LSTMGates")
def lstm_gates(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    initial_c: str | None,
    P: str | None,
    Y: str,
    input_forget: int,
    **settings: Any,
) -> tuple[str, str, str]:
    """a = X·Wᵀ + H₋₁·Rᵀ + b, to which i and f add P·C₋₁ and o adds P·C; C = f·C₋₁ + i·c, with input_forget f = 1 − i"""
    sequences, results = _ActiveSteps(op, X, sequence_lens), []
    X = sequences.kept(X)
    directions = functions(op, ("Sigmoid", "Tanh", "Tanh"), **settings)
    for k, (backward, (f, g, _)) in enumerate(directions):
        before = sequences.before(_of_direction(op, Y, k), _state(op, initial_h, k, Y), backward)
        a = _add(op, _times(op, X, _matrix(op, W, k)), _times(op, before, _matrix(op, R, k)), *_biases(op, B, k))
        a_i, a_o, a_f, a_c = _parts(op, a, 4)
        c, C0 = g.of(op, a_c), _state(op, initial_c, k, Y)
        if P is None:
            i, forget = _opened(op, f, input_forget, a_i, a_f)
            _, [C] = sequences.scan(_cell(op), [C0], backward, i=i, forget=forget, c=c)
        else:
            Pi, Po, Pf = _parts(op, op.Gather(P, np.array(k), axis=0), 3)
            step = _seeing_cell(op, f, input_forget, Pi, Pf)
            _, [C] = sequences.scan(step, [C0], backward, a_i=a_i, a_f=a_f, c=c)
            before = sequences.before(C, C0, backward)
            a_i, a_f = op.Add(a_i, op.Mul(before, Pi)), op.Add(a_f, op.Mul(before, Pf))
            a_o = op.Add(a_o, op.Mul(C, Po))
            i, forget = _opened(op, f, input_forget, a_i, a_f)
        values = op.Concat(i, f.of(op, a_o), forget, c, axis=-1)
        results.append((sequences.kept(C), values, op.Concat(a_i, a_o, a_f, a_c, axis=-1)))
    CAll, iofc, arguments = (_stacked(op, values, axis=1) for values in _transposed(results))
    return CAll, iofc, arguments


def _opened(op: Emitter, f: GateFunction, input_forget: int, a_i: str, a_f: str) -> tuple[str, str]:
    """The gates i and f by their arguments."""
    i = f.of(op, a_i)
    return i, op.Sub(1.0, i) if input_forget else f.of(op, a_f)


def _cell(op: Emitter) -> Step:
    def step(C: str, i: str, forget: str, c: str) -> tuple[Sequence[str], Sequence[str]]:
        new = op.Add(op.Mul(forget, C), op.Mul(i, c))
        return [new], [op.Identity(new)]

    return step


def _seeing_cell(op: Emitter, f: GateFunction, input_forget: int, Pi: str, Pf: str) -> Step:
    """The cell whose gates see it through peepholes, so that they open one step after the other."""
    closed = _cell(op)

    def step(C: str, a_i: str, a_f: str, c: str) -> tuple[Sequence[str], Sequence[str]]:
        a_i, a_f = op.Add(a_i, op.Mul(C, Pi)), op.Add(a_f, op.Mul(C, Pf))
        return closed(C, *_opened(op, f, input_forget, a_i, a_f), c)

    return step


@lowering("LSTMGrad")
def lstm_grad(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    sequence_lens: str | None,
    initial_h: str | None,
    initial_c: str | None,
    HAll: str,
    CAll: str,
    iofc: str,
    dHAll: str | None,
    dHt: str | None,
    dCt: str | None,
    P: str | None,
    arguments: str | None,
    input_forget: int,
    **settings: Any,
) -> tuple[str, ...]:
    """H = o·h(C): da_o = dH·h(C)·f'(a_o); the cell gets dC + dH·o·h'(C) + da_o·P_o =: e, and of that
    da_i = e·c·f'(a_i), da_f = e·C₋₁·f'(a_f), da_c = e·i·g'(a_c), dC₋₁ = e·f + da_i·P_i + da_f·P_f; dH₋₁ = da·R.
    With input_forget da_i = e·(c − C₋₁)·f'(a_i), da_f = 0. dP_i = Σ da_i·C₋₁, dP_o = Σ da_o·C, dP_f = Σ da_f·C₋₁.
    """
    sequences, results = _ActiveSteps(op, X, sequence_lens), []
    X = sequences.kept(X)
    directions = functions(op, ("Sigmoid", "Tanh", "Tanh"), **settings)
    for k, (backward, (f, g, h)) in enumerate(directions):
        w, r, C = _matrix(op, W, k), _matrix(op, R, k), _of_direction(op, CAll, k)
        H_before = sequences.before(_of_direction(op, HAll, k), _state(op, initial_h, k, HAll), backward)
        C_before = sequences.before(C, _state(op, initial_c, k, HAll), backward)
        i, o, forget, c = _parts(op, _of_direction(op, iofc, k), 4)
        a_i, a_o, a_f, a_c = (None,) * 4 if arguments is None else _parts(op, _of_direction(op, arguments, k), 4)
        Pi, Po, Pf = (None,) * 3 if P is None else _parts(op, op.Gather(P, np.array(k), axis=0), 3)
        # What the cotangents of a step are multiples of e and, for o, of dH by.
        hC = h.of(op, C)
        by_i = f.adjoint(op, op.Sub(c, C_before) if input_forget else c, a_i, i)
        by_o = f.adjoint(op, hC, a_o, o)
        by_f = op.full(op.Shape(C), 0.0, like=C) if input_forget else f.adjoint(op, C_before, a_f, forget)
        by_c = g.adjoint(op, i, a_c, c)
        by = sequences.kept(op.Concat(by_i, by_o, by_f, by_c, axis=-1))
        seen = h.adjoint(op, o, C, hC)
        if Pi is not None and Po is not None and Pf is not None:
            seen = op.Add(seen, op.Mul(by_o, Po))
            forget = _add(op, forget, op.Mul(by_i, Pi), op.Mul(by_f, Pf))
        last = [sequences.last(_state(op, state, k, HAll)) for state in (dHt, dCt)]
        cotangent = None if dHAll is None else _of_direction(op, dHAll, k)
        elements = {"by": by, "seen": sequences.kept(seen), "kept": forget, "dY": cotangent}
        [dH, dC], [da] = sequences.scan(_lstm_step(op, r), last, not backward, **elements)
        db = _total(op, da)
        da_i, da_o, da_f, _ = _parts(op, da, 4)
        dP = [_total(op, op.Mul(d, state)) for d, state in ((da_i, C_before), (da_o, C), (da_f, C_before))]
        dW, dR = _product(op, da, X), _product(op, da, H_before)
        results.append((op.MatMul(da, w), dW, dR, op.Concat(db, db, axis=0), dH, dC, op.Concat(*dP, axis=0)))
    dX, *others = _transposed(results)
    return _add(op, *dX), *(_stacked(op, values) for values in others)


def _lstm_step(op: Emitter, R: str) -> Step:
    def step(
        dH: str, dC: str, by: str, seen: str, kept: str, dY: str | None = None
    ) -> tuple[Sequence[str], Sequence[str]]:
        d = _add(op, dH, dY)
        e = op.Add(dC, op.Mul(d, seen))
        da = op.Mul(op.Concat(e, d, e, e, axis=-1), by)
        return [op.MatMul(da, R), op.Mul(e, kept)], [da]

    return step
