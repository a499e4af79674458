"""ONNX Runtime's kernels for recurrent operators, each with the condition under which it is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import TensorProto

from refgrad.builder.op import Emitter
from refgrad.protos.domains import MICROSOFT
from refgrad.tables.primitives import PRIMITIVES
from refgrad.tables.registry import lowering

_DEFAULTS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"]}


@lowering("LSTMGates", dialect="ort")
def lstm_gates(
    op: Emitter, *inputs: str | None, input_forget: int, layout: int, **attributes: Any
) -> tuple[str, str, None] | None:
    """The forward node becomes LSTMTraining; its gates tell the slopes of Sigmoid and Tanh."""
    if layout or not _has_lstm_kernel(op, PRIMITIVES["LSTMGates"].named(inputs), input_forget, attributes):
        return None
    settings = _recurrent_settings(attributes, input_forget=input_forget)
    CAll, iofc = op.training_form("LSTMTraining", ("CAll", "iofc"), settings)
    return CAll, iofc, None


@lowering("LSTMGrad", dialect="ort")
def lstm_grad(op: Emitter, *inputs: str | None, input_forget: int, **attributes: Any) -> tuple[str | None, ...] | None:
    """The kernel writes to every output, so all have names; it has no inputs P and arguments."""
    given = PRIMITIVES["LSTMGrad"].named(inputs)
    if not _has_lstm_kernel(op, given, input_forget, attributes):
        return None
    read = [value for name, value in given.items() if name not in ("P", "arguments")]
    settings = _recurrent_settings(attributes, input_forget=input_forget)
    return *op.emit("LSTMGrad", MICROSOFT, read, 6, settings), None


def _has_lstm_kernel(op: Emitter, given: Mapping[str, Any], input_forget: int, attributes: dict[str, Any]) -> bool:
    return given["P"] is None and not input_forget and _has_recurrent_kernel(op, "LSTM", given, **attributes)


@lowering("GRUGates", dialect="ort")
def gru_gates(
    op: Emitter, *inputs: str | None, linear_before_reset: int, layout: int, **attributes: Any
) -> tuple[str, None] | None:
    """The forward node becomes GRUTraining; its gates tell the slopes of Sigmoid and Tanh."""
    if layout or not _has_recurrent_kernel(op, "GRU", PRIMITIVES["GRUGates"].named(inputs), **attributes):
        return None
    settings = _recurrent_settings(attributes, linear_before_reset=linear_before_reset)
    [zrh] = op.training_form("GRUTraining", ("zrh",), settings)
    return zrh, None


@lowering("GRUGrad", dialect="ort")
def gru_grad(op: Emitter, *inputs: str | None, linear_before_reset: int, **attributes: Any) -> tuple[str, ...] | None:
    """The kernel writes to every output, so all have names; it has no input arguments."""
    given = PRIMITIVES["GRUGrad"].named(inputs)
    if not _has_recurrent_kernel(op, "GRU", given, **attributes):
        return None
    read = [value for name, value in given.items() if name != "arguments"]
    settings = _recurrent_settings(attributes, linear_before_reset=linear_before_reset)
    made: tuple[str, ...] = op.emit("GRUGrad", MICROSOFT, read, 5, settings)
    return made


def _recurrent_settings(attributes: dict[str, Any], **others: int) -> dict[str, Any]:
    """Every attribute that the kernels take: activations has to be left out, even where it names the defaults."""
    return {"direction": attributes["direction"], "hidden_size": attributes["hidden_size"], **others}


def _has_recurrent_kernel(
    op: Emitter,
    operator: str,
    given: Mapping[str, Any],
    hidden_size: int | None,
    direction: str,
    activations: Sequence[str] | None,
    clip: float | None,
    **scales: Any,
) -> bool:
    """In float, one direction, forwards, all sequences of one length; the process ends where X is empty."""
    X = given["X"]
    names = [name.lower() for name in activations or _DEFAULTS[operator]]
    plain = direction == "forward" and names == _DEFAULTS[operator] and clip is None and given["sequence_lens"] is None
    return plain and hidden_size is not None and op.type(X) == TensorProto.FLOAT and 0 not in (op.shape(X) or ())
