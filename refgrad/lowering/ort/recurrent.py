"""ONNX Runtime's kernels for recurrent operators, each with the condition under which it is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import TensorProto

from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitter
from refgrad.tables.registry import lowering

_DEFAULTS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}


@lowering("LSTMGates", dialect="ort")
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
    layout: int,
    **attributes: Any,
) -> tuple[str, str, None] | None:
    """The forward node becomes LSTMTraining; its gates tell the slopes of Sigmoid and Tanh."""
    if layout or not _has_lstm_kernel(op, X, sequence_lens, P, input_forget, attributes):
        return None
    settings = _recurrent_settings(attributes, input_forget=input_forget)
    CAll, iofc = op.training_form("LSTMTraining", ("CAll", "iofc"), settings)
    return CAll, iofc, None


@lowering("LSTMGrad", dialect="ort")
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
    **attributes: Any,
) -> tuple[str | None, ...] | None:
    """The kernel writes to every output, so all have names; it has no input P."""
    if not _has_lstm_kernel(op, X, sequence_lens, P, input_forget, attributes):
        return None
    inputs = X, W, R, None, initial_h, initial_c, HAll, CAll, iofc, dHAll, dHt, dCt
    settings = _recurrent_settings(attributes, input_forget=input_forget)
    return *op.emit("LSTMGrad", MICROSOFT, inputs, 6, settings), None


def _has_lstm_kernel(
    op: Emitter, X: str, sequence_lens: str | None, P: str | None, input_forget: int, attributes: dict[str, Any]
) -> bool:
    return P is None and not input_forget and _has_recurrent_kernel(op, "LSTM", X, sequence_lens, **attributes)


@lowering("GRUGates", dialect="ort")
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
    layout: int,
    **attributes: Any,
) -> tuple[str, None] | None:
    """The forward node becomes GRUTraining; its gates tell the slopes of Sigmoid and Tanh."""
    if layout or not _has_recurrent_kernel(op, "GRU", X, sequence_lens, **attributes):
        return None
    settings = _recurrent_settings(attributes, linear_before_reset=linear_before_reset)
    [zrh] = op.training_form("GRUTraining", ("zrh",), settings)
    return zrh, None


@lowering("GRUGrad", dialect="ort")
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
    **attributes: Any,
) -> tuple[str, ...] | None:
    """The kernel writes to every output, so all have names."""
    if not _has_recurrent_kernel(op, "GRU", X, sequence_lens, **attributes):
        return None
    inputs = X, W, R, B, None, initial_h, HAll, zrh, dHAll, dHt
    settings = _recurrent_settings(attributes, linear_before_reset=linear_before_reset)
    made: tuple[str, ...] = op.emit("GRUGrad", MICROSOFT, inputs, 5, settings)
    return made


def _recurrent_settings(attributes: dict[str, Any], **others: int) -> dict[str, Any]:
    """Every attribute that the kernels take: activations has to be left out, even where it names the defaults."""
    return {"direction": attributes["direction"], "hidden_size": attributes["hidden_size"], **others}


def _has_recurrent_kernel(
    op: Emitter,
    operator: str,
    X: str,
    sequence_lens: str | None,
    hidden_size: int | None,
    direction: str,
    activations: Sequence[str] | None,
    clip: float | None,
    **scales: Any,
) -> bool:
    """In float, one direction, forwards, all sequences of one length; the process ends where X is empty."""
    names = [name.lower() for name in activations or _DEFAULTS[operator]]
    plain = direction == "forward" and names == _DEFAULTS[operator] and clip is None and sequence_lens is None
    return plain and hidden_size is not None and op.type(X) == TensorProto.FLOAT and 0 not in (op.shape(X) or ())
