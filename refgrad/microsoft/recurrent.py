"""ONNX Runtime's training forms of GRU and LSTM, and their gradients, in ai.onnx operators.

Every array has the axes time, direction, batch, hidden unit, or no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refgrad.microsoft.forms import form
from refgrad.microsoft.results import like, typed
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import UnsupportedFormError

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


def _with_rank(op: Emitter, *values: str | None) -> None:
    """What a step has, of every step."""
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
    """Whether the gates alone do not tell the slopes."""
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
