"""ONNX Runtime's LSTM with attention, and its training forms of GRU and LSTM and their gradients, in ai.onnx operators.

Every array of the training forms has the axes time, direction, batch, hidden unit, or no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.formulas.indexing import END
from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.forms import form
from refgrad.microsoft.results import like, typed
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import Floats, Strings, UnsupportedFormError, operator

_BOTH: dict[str, Any] = {
    "activation_alpha": None,
    "activation_beta": None,
    "activations": None,
    "clip": None,
    "direction": "forward",
    "hidden_size": None,
}
_GRU = _BOTH | {"linear_before_reset": 0}
_LSTM = _BOTH | {"input_forget": 0}
BACKWARD = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
PARAMETERS: dict[str, tuple[float | None, ...]] = {
    "affine": (None, None),
    "leakyrelu": (0.01,),
    "thresholdedrelu": (1.0,),
    "scaledtanh": (None, None),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0,),
    **dict.fromkeys(("relu", "tanh", "sigmoid", "softsign", "softplus"), ()),
}


def _with_rank(op: Emitter, *values: str | None) -> None:
    """Declare that these values, which hold every step, have 4 axes."""
    for value in values:
        if value is not None and op.rank(value) is None:
            op.assume(value, (None,) * 4)


def _until(op: Emitter, values: str, sequence_lens: str | None) -> str:
    """`values`, 0 after the end of each sequence"""
    if sequence_lens is None:
        return values
    count = op.Cast(op.Squeeze(op.Shape(values, end=1), [0]), to=op.type(sequence_lens))
    zero, one = (op.const(number, like=sequence_lens) for number in (0, 1))
    inside = op.Less(op.Unsqueeze(op.Range(zero, count, one), [1]), sequence_lens)
    return op.Where(op.Unsqueeze(inside, [1, 3]), values, 0.0)


def _is_special(attributes: Mapping[str, Any]) -> bool:
    """True if the gates alone do not tell the slopes."""
    return attributes["activations"] is not None or attributes["clip"] is not None


def _forward(op: Emitter, op_type: str, inputs: Sequence[str | None], outputs: int, attributes: dict[str, Any]) -> Any:
    """The forward operator; what it returns first is Y"""
    made = op.emit(op_type, "", inputs, outputs, attributes)
    _with_rank(op, made[0])
    return made


@form("GRUTraining", results=[typed("X"), typed("X"), typed("X")], attributes=_GRU)
def gru_training(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None = None,
    sequence_lens: str | None = None,
    initial_h: str | None = None,
    *,
    output_sequence: int = 1,
    **attributes: Any,
) -> tuple[str, ...]:
    """GRU, and the gates of every step"""
    inputs = X, W, R, B, sequence_lens, initial_h
    Y, Y_h = _forward(op, "GRU", inputs, 2, attributes)
    zrh, _ = op.grad.GRUGates(*inputs, Y, layout=0, **attributes)
    return Y, Y_h, _until(op, zrh, sequence_lens)


@form("GRUGrad", results=[like("X"), like("W"), like("R"), like("B"), like("initial_h")], attributes=_GRU)
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
    dHAll: str | None = None,
    dHt: str | None = None,
    **attributes: Any,
) -> tuple[str, ...]:
    _with_rank(op, HAll, zrh, dHAll)
    given, arguments = (X, W, R, B, sequence_lens, initial_h, HAll), None
    if _is_special(attributes):
        _, arguments = op.grad.GRUGates(*given, layout=0, **attributes)
    return op.grad.GRUGrad(*given, zrh, dHAll, dHt, arguments, **attributes)


@form("LSTMTraining", results=[typed("X"), typed("X"), typed("X"), typed("X"), typed("X")], attributes=_LSTM)
def lstm_training(
    op: Emitter,
    X: str,
    W: str,
    R: str,
    B: str | None = None,
    sequence_lens: str | None = None,
    initial_h: str | None = None,
    initial_c: str | None = None,
    P: str | None = None,
    *,
    output_sequence: int = 1,
    **attributes: Any,
) -> tuple[str, ...]:
    """LSTM, and the cells and gates of every step"""
    inputs = X, W, R, B, sequence_lens, initial_h, initial_c, P
    Y, Y_h, Y_c = _forward(op, "LSTM", inputs, 3, attributes)
    CAll, iofc, _ = op.grad.LSTMGates(*inputs, Y, layout=0, **attributes)
    return Y, Y_h, Y_c, CAll, _until(op, iofc, sequence_lens)


@form(
    "LSTMGrad",
    results=[like("X"), like("W"), like("R"), typed("X"), like("initial_h"), like("initial_c"), typed("X")],
    attributes=_LSTM,
)
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
    dHAll: str | None = None,
    dHt: str | None = None,
    dCt: str | None = None,
    **attributes: Any,
) -> tuple[str, ...]:
    _with_rank(op, HAll, CAll, iofc, dHAll)
    arguments = None
    if _is_special(attributes):
        forward = op.graph.producer.get(iofc)
        if forward is None or forward.op_type != "LSTMTraining":
            raise UnsupportedFormError("with activations or clip it needs the LSTMTraining that made iofc beside it")
        inputs = [name or None for name in forward.inputs] + [None] * (8 - len(forward.inputs))
        _, _, arguments = op.grad.LSTMGates(*inputs, HAll, layout=0, **attributes)
    starts, results = (initial_h, initial_c), (HAll, CAll, iofc, dHAll, dHt, dCt)
    return op.grad.LSTMGrad(X, W, R, sequence_lens, *starts, *results, None, arguments, **attributes)


@operator("AttnLSTM", optional=["Y", "Y_h", "Y_c"], others=("sequence_lens", "memory_seq_lens"))
def attn_lstm(
    op: FunctionEmitter,
    X: str,
    W: str,
    R: str,
    B: str | None = None,
    sequence_lens: str | None = None,
    initial_h: str | None = None,
    initial_c: str | None = None,
    P: str | None = None,
    QW: str | None = None,
    MW: str | None = None,
    V: str | None = None,
    M: str | None = None,
    memory_seq_lens: str | None = None,
    AW: str | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[str, str, str]:
    """LSTM of (X_t, a_(t−1)), a = (h, softmax(V·tanh(M·MW + h·QW))·M)·AW, where h is what it has computed"""
    if direction not in BACKWARD:
        raise UnsupportedFormError(f"its direction {direction!r} is not known; there are {', '.join(BACKWARD)}")
    if QW is None or MW is None or V is None or M is None:
        raise UnsupportedFormError("it needs its inputs QW, MW, V and M, without which there is nothing to attend to")
    names = list(activations or ("Sigmoid", "Tanh", "Tanh") * len(BACKWARD[direction]))
    if len(names) != 3 * len(BACKWARD[direction]):
        raise UnsupportedFormError(f"it has {len(names)} activations; direction={direction} has three for each way")
    alphas, betas = iter(activation_alpha or ()), iter(activation_beta or ())
    functions = [_activation(name, alphas, betas, clip) for name in names]
    X, W, R, QW, MW, M = (_of_rank(op, x, 3) for x in (X, W, R, QW, MW, M))
    initial_h, initial_c, AW = (None if x is None else _of_rank(op, x, 3) for x in (initial_h, initial_c, AW))
    B, P, V = (None if x is None else _of_rank(op, x, 2) for x in (B, P, V))
    length, batch = op.Shape(X, end=1), op.Shape(X, start=1, end=2)
    hidden, width = op.Shape(R, start=2), op.Shape(X, start=2)
    gates = [op.Mul(hidden, [k]) for k in range(9)]
    active = None
    if sequence_lens is not None:
        place, ends = op.Unsqueeze(op.up_to(length), [1]), _of_rank(op, sequence_lens, 1)
        active = op.Unsqueeze(op.Less(place, op.Cast(ends, to=TensorProto.INT64)), [2])
    values, seen = M, None
    if memory_seq_lens is not None:
        place = op.up_to(op.Shape(M, start=1, end=2))
        seen = op.Less(place, op.Unsqueeze(op.Cast(_of_rank(op, memory_seq_lens, 1), to=TensorProto.INT64), [1]))
        values = op.Where(op.Unsqueeze(seen, [2]), M, 0.0)
    found = []
    for way, backward in enumerate(BACKWARD[direction]):
        f, g, h = functions[3 * way : 3 * way + 3]
        own = [
            None if x is None else op.Gather(x, op.const(np.array(way)), axis=0)
            for x in (W, R, B, initial_h, initial_c, P, QW, MW, V, AW)
        ]
        w, r, bias, h0, c0, peephole, query, memory, scores, layer = own
        assert w is not None
        w_x, w_a = op.Slice(w, [0], width, [1]), op.Slice(w, width, [END], [1])
        driven = op.MatMul(X, op.Transpose(w_x, perm=[1, 0]))
        if bias is not None:
            driven = op.Add(driven, op.Add(op.Slice(bias, [0], gates[4], [0]), op.Slice(bias, gates[4], gates[8], [0])))
        keys = op.MatMul(values, memory)
        nothing = op.Expand(op.const(0.0, like=X), op.Concat(batch, hidden, axis=0))
        of_a = op.Expand(op.const(0.0, like=X), op.Concat(batch, op.Shape(w_a, start=1), axis=0))
        to_a, to_h = op.Transpose(w_a, perm=[1, 0]), op.Transpose(r, perm=[1, 0])

        def step(
            inner: FunctionEmitter,
            states: Sequence[str],
            parts: Sequence[str],
            functions: Any = (f, g, h),
            weights: Any = (to_a, to_h, peephole, query, scores, layer, keys),
        ) -> list[str]:
            """One step of one direction"""
            (f, g, h), (to_a, to_h, peephole, query, scores, layer, keys) = functions, weights
            (H, C, a), (z, *active) = states, parts
            z = inner.Add(z, inner.Add(inner.MatMul(a, to_a), inner.MatMul(H, to_h)))
            i, o, forget, c = (inner.Slice(z, gates[k], gates[k + 1], [1]) for k in range(4))

            def looked(z: str, cell: str, k: int) -> str:
                """`z` with what its peephole lets it see of a cell"""
                if peephole is None:
                    return z
                return str(inner.Add(z, inner.Mul(inner.Slice(peephole, gates[k], gates[k + 1], [0]), cell)))

            i = f(inner, looked(i, C, 0))
            forget = inner.Sub(1.0, i) if input_forget else f(inner, looked(forget, C, 2))
            cell = inner.Add(inner.Mul(forget, C), inner.Mul(i, g(inner, c)))
            after = inner.Mul(f(inner, looked(o, cell, 1)), h(inner, cell))
            asked = inner.Tanh(inner.Add(keys, inner.Unsqueeze(inner.MatMul(after, query), [1])))
            score = inner.ReduceSum(inner.Mul(asked, scores), [2], keepdims=0)
            score = score if seen is None else inner.Where(seen, score, -math.inf)
            context = inner.Squeeze(inner.MatMul(inner.Unsqueeze(inner.Softmax(score, axis=1), [1]), values), [1])
            attention = context if layer is None else inner.MatMul(inner.Concat(after, context, axis=1), layer)
            next_states = [after, cell, attention]
            if not active:
                return [*next_states, after]
            kept = [inner.Where(active[0], new, old) for new, old in zip(next_states, states, strict=True)]
            return [*kept, inner.Where(active[0], after, 0.0)]

        starts = [op.ranked(x, 2) for x in (h0 or nothing, c0 or nothing, of_a)]
        slices = [op.ranked(x, 3) for x in (driven, active) if x is not None]
        last_h, last_c, _, every = op.scan(step, starts, slices, backward=backward)
        found.append((op.Unsqueeze(every, [1]), op.Unsqueeze(last_h, [0]), op.Unsqueeze(last_c, [0])))
    if len(found) == 1:
        return found[0]
    Y, Y_h, Y_c = (
        op.Concat(*parts, axis=axis) for parts, axis in zip(zip(*found, strict=True), (1, 0, 0), strict=True)
    )
    return Y, Y_h, Y_c


def _of_rank(op: FunctionEmitter, x: str, rank: int) -> str:
    """`x`, whose rank anyone can tell: ONNX Runtime asks for it where a step reads the value."""
    return x if op.rank(x) == rank else str(op.Reshape(x, [0] * rank))


def _activation(
    name: str, alphas: Iterator[float], betas: Iterator[float], clip: float | None
) -> Callable[[FunctionEmitter, str], str]:
    """A function of a gate, which takes the next alpha and the next beta where it has such parameters."""
    key = name.lower()
    if key not in PARAMETERS:
        raise UnsupportedFormError(f"its activation {name!r} is not known; there are {', '.join(PARAMETERS)}")
    own = [next(given, usual) for given, usual in zip((alphas, betas), PARAMETERS[key], strict=False)]
    if None in own:
        raise UnsupportedFormError(f"its activation {name} needs an activation_alpha and an activation_beta")

    def apply(op: FunctionEmitter, x: str) -> str:
        if clip is not None:
            x = op.Clip(x, op.const(-clip, like=x), op.const(clip, like=x))
        if key == "affine":
            return str(op.Add(op.Mul(x, own[0]), own[1]))
        if key == "scaledtanh":
            return str(op.Mul(op.Tanh(op.Mul(x, own[1])), own[0]))
        if key == "thresholdedrelu":
            return str(op.Where(op.Less(x, own[0]), 0.0, x))
        operator = {"leakyrelu": "LeakyRelu", "hardsigmoid": "HardSigmoid"}.get(key, name.capitalize())
        attributes = dict(zip(("alpha", "beta"), own, strict=False))
        return str(op.emit(operator, "", (x,), 1, attributes))

    return apply
