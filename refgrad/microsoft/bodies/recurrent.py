"""ONNX Runtime's LSTMs with attention and with quantized weights, and its training forms of GRU and LSTM and their gradients.

Every array of the training forms has the axes time, direction, batch, hidden unit, or no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, form
from refgrad.formulas.indexing import END
from refgrad.microsoft.bodies.quantization import BYTES, dequantized
from refgrad.microsoft.declared import Size, check_known, check_shape, product, sizes, total
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import like, typed
from refgrad.tables.definitions import Floats, Shapes, Strings

_BOTH: dict[str, Any] = {
    "activation_alpha": None,
    "activation_beta": None,
    "activations": None,
    "clip": None,
    "direction": "forward",
    "hidden_size": None,
}
_FLOAT, _INT32 = ("tensor(float)",), ("tensor(int32)",)
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


def _check_lstm(shapes: Shapes, args: Arguments, hidden: Size) -> Size:
    """Refuse a direction, functions and inputs of an LSTM that do not fit. Returns the number of directions."""
    check_known(args, "direction", *BACKWARD)
    count = len(BACKWARD[args.direction])
    if args.activations is not None and len(args.activations) != 3 * count:
        raise UnsupportedFormError(
            f"it has {len(args.activations)} activations; direction={args.direction} has three for each way"
        )
    if args.hidden_size is not None and hidden not in (None, args.hidden_size):
        raise UnsupportedFormError(f"hidden_size is {args.hidden_size}, and R has {hidden} hidden units")
    check_shape(shapes, "X", args.X, (None, None, None))
    batch = sizes(shapes, args.X, 3)[1]
    for name, *shape in (
        ("B", count, product(8, hidden)),
        ("sequence_lens", batch),
        ("initial_h", count, batch, hidden),
        ("initial_c", count, batch, hidden),
        ("P", count, product(3, hidden)),
    ):
        check_shape(shapes, name, getattr(args, name), shape)
    return count


def _check_attn_lstm(shapes: Shapes, args: Arguments) -> None:
    if args.QW is None or args.MW is None or args.V is None or args.M is None:
        raise UnsupportedFormError("it needs its inputs QW, MW, V and M, without which there is nothing to attend to")
    hidden = sizes(shapes, args.R, 3)[2]
    count = _check_lstm(shapes, args, hidden)
    (_, batch, width), (_, _, depth), (_, each) = (
        sizes(shapes, x, n) for x, n in ((args.X, 3), (args.M, 3), (args.V, 2))
    )
    of_a = depth if args.AW is None else sizes(shapes, args.AW, 3)[2]
    for name, *shape in (
        ("W", count, product(4, hidden), total(width, of_a)),
        ("R", count, product(4, hidden), hidden),
        ("QW", count, hidden, each),
        ("MW", count, depth, each),
        ("V", count, each),
        ("M", batch, None, depth),
        ("memory_seq_lens", batch),
        ("AW", count, total(depth, hidden), of_a),
    ):
        check_shape(shapes, name, getattr(args, name), shape)


def _check_dynamic_quantize_lstm(shapes: Shapes, args: Arguments) -> None:
    hidden = sizes(shapes, args.R, 3)[1]
    count = _check_lstm(shapes, args, hidden)
    for name, rows in (("W", sizes(shapes, args.X, 3)[2]), ("R", hidden)):
        columns = product(4, hidden)
        check_shape(shapes, name, getattr(args, name), (count, rows, columns))
        for parameter in (f"{name}_scale", f"{name}_zero_point"):
            check_shape(shapes, parameter, getattr(args, parameter), (count,), (count, columns))


@body(
    "AttnLSTM",
    optional=["Y", "Y_h", "Y_c"],
    others=("sequence_lens", "memory_seq_lens"),
    check=_check_attn_lstm,
    domain=MICROSOFT,
)
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
    assert QW is not None
    assert MW is not None
    assert V is not None
    assert M is not None
    names = list(activations or ("Sigmoid", "Tanh", "Tanh") * len(BACKWARD[direction]))
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


@body(
    "DynamicQuantizeLSTM",
    optional=["Y", "Y_h", "Y_c"],
    types={
        "X": _FLOAT,
        "W": BYTES,
        "R": "W",
        "sequence_lens": _INT32,
        **dict.fromkeys(("B", "initial_h", "initial_c", "P", "W_scale", "R_scale", "Y", "Y_h", "Y_c"), "X"),
        **dict.fromkeys(("W_zero_point", "R_zero_point"), "W"),
    },
    check=_check_dynamic_quantize_lstm,
    domain=MICROSOFT,
)
def dynamic_quantize_lstm(
    op: FunctionEmitter,
    X: str,
    W: str,
    R: str,
    B: str | None,
    sequence_lens: str | None,
    initial_h: str | None,
    initial_c: str | None,
    P: str | None,
    W_scale: str,
    W_zero_point: str,
    R_scale: str,
    R_zero_point: str,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[str, ...]:
    """LSTM with the weights that W and R stand for, of DynamicQuantizeLinear(X) and, in each step, DynamicQuantizeLinear(H)

    A step is an LSTM of one step: its initial_h is multiplied with R, and is nothing else. A step quantizes, by their
    range, the states of its sequences and of the sequences that the step before ended.
    """
    names = list(activations or ("Sigmoid", "Tanh", "Tanh") * len(BACKWARD[direction]))
    alphas, betas = iter(activation_alpha or ()), iter(activation_beta or ())
    length, batch = op.Shape(X, end=1), op.Shape(X, start=1, end=2)
    lengths = op.Expand(length, batch) if sequence_lens is None else op.Cast(sequence_lens, to=TensorProto.INT64)
    times = op.up_to(length)
    place = op.Unsqueeze(times, [1])
    active, read = (
        op.ranked(op.Unsqueeze(inside, [2]), 3)
        for inside in (op.Less(place, lengths), op.LessOrEqual(place, lengths))  # (time, batch, 1)
    )
    any_active = op.Less(times, op.ReduceMax(lengths, keepdims=0))
    x = op.Where(op.Unsqueeze(any_active, [1, 2]), X, 0.0) if sequence_lens else X
    x = _as_read_dynamically(op, x)
    w, r = (
        op.Transpose(_of_directions(op, q, scale, zero_point), perm=[0, 2, 1])
        for q, scale, zero_point in ((W, W_scale, W_zero_point), (R, R_scale, R_zero_point))
    )
    nothing = op.Expand(op.const(0.0, like=X), op.Concat(batch, op.Shape(R, start=1, end=2), axis=0))
    found = []
    for way, backward in enumerate(BACKWARD[direction]):
        functions = names[3 * way : 3 * way + 3]
        settings: dict[str, Any] = {
            "activations": functions,
            "activation_alpha": _taken(alphas, functions, 1),
            "activation_beta": _taken(betas, functions, 2),
            "clip": clip,
            "hidden_size": hidden_size,
            "input_forget": input_forget,
        }
        own_w, own_r, own_b, own_p = (v and op.Slice(v, [way], [way + 1], [0]) for v in (w, r, B, P))
        starts = [v and op.Squeeze(op.Slice(v, [way], [way + 1], [0]), [0]) for v in (initial_h, initial_c)]

        def step(
            op: FunctionEmitter,
            states: list[str],
            slices: list[str],
            settings: dict[str, Any] = settings,
            weights: tuple[str | None, ...] = (own_w, own_r, own_b, own_p),
        ) -> list[str]:
            (h, c), (x, active, read), (w, r, b, p) = states, slices, weights
            before = _as_read_dynamically(op, op.Where(read, h, 0.0))
            given = op.Unsqueeze(x, [0]), w, r, b, None, op.Unsqueeze(before, [0]), op.Unsqueeze(c, [0]), p
            _, new_h, new_c = op.LSTM(*given, outputs=3, **settings)
            new_h, new_c = op.Squeeze(new_h, [0]), op.Squeeze(new_c, [0])
            y = op.ranked(op.Where(active, new_h, 0.0), 2)
            return [op.Where(active, new_h, h), op.Where(active, new_c, c), y]

        rows = op.ReverseSequence(x, lengths, time_axis=0, batch_axis=1) if backward else x
        states = [op.ranked(start or op.Identity(nothing), 2) for start in starts]
        h, c, y = op.scan(step, states, [op.ranked(rows, 3), active, read])
        y = op.ReverseSequence(y, lengths, time_axis=0, batch_axis=1) if backward else y
        found.append((op.Unsqueeze(y, [1]), op.Unsqueeze(h, [0]), op.Unsqueeze(c, [0])))
    if len(found) == 1:
        return found[0]
    return tuple(op.Concat(*parts, axis=axis) for parts, axis in zip(zip(*found, strict=True), (1, 0, 0), strict=True))


def _of_directions(op: FunctionEmitter, q: str, scale: str, zero_point: str) -> str:
    """The floats that weights stand for, with a scale and a zero point for each direction, or for each of its columns."""
    laid = (op.Reshape(v, op.Concat(op.Shape(q, end=1), [1, -1], axis=0)) for v in (scale, zero_point))
    return dequantized(op, q, *laid)


def _as_read_dynamically(op: FunctionEmitter, x: str) -> str:
    """DequantizeLinear(DynamicQuantizeLinear(x)), which has a derivative where x is 0 everywhere too"""
    zero = op.const(0.0, like=x)
    every = op.Concat(op.Reshape(x, [-1]), op.Reshape(zero, [1]), axis=0)
    low, high = op.ReduceMin(every, keepdims=0), op.ReduceMax(every, keepdims=0)
    span = op.Sub(high, low)
    scale = op.Div(op.Where(op.Greater(span, zero), span, 255.0), 255.0)
    zero_point = op.Cast(op.Round(op.Div(op.Neg(low), scale)), to=TensorProto.UINT8)
    q = op.QuantizeLinear(x, scale, zero_point)
    op.types[q] = TensorProto.UINT8, op.rank(x)
    y = str(op.DequantizeLinear(q, scale, zero_point))
    op.types[y] = op.type(x), op.rank(x)
    return y


def _taken(given: Iterator[float], functions: list[str], parameters: int) -> list[float] | None:
    """The next numbers, one for each function that has so many parameters; None where there are none."""
    numbers = [next(given, None) for name in functions if len(PARAMETERS.get(name.lower(), ())) >= parameters]
    return [number for number in numbers if number is not None] or None


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
