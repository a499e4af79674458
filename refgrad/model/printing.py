"""A model in ONNX's text. No name begins a line, and no terminal or editor obeys one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import FunctionProto, GraphProto, ModelProto

from refgrad.escaping import printable
from refgrad.model import native

_NUMBERS = "raw_data"  # bytes that are no text


def onnx_text(proto: ModelProto | GraphProto | FunctionProto, written: Callable[[str], str] = printable) -> str:
    """Return the text that `onnx.printer` writes for `proto`, with `written` applied to every name and string.

    :param written: the function of `refgrad.escaping` for the medium that shows the text.
    """
    return native.to_text(_with_texts(proto, written))


def _with_texts(proto: Any, written: Callable[[str], str]) -> Any:
    """A copy with `written` applied to every text."""
    made = type(proto)()
    made.CopyFrom(proto)

    def said(text: str | bytes) -> str | bytes:
        return written(text) if isinstance(text, str) else written(text.decode(errors="replace")).encode()

    waiting: list[Message] = [made]
    while waiting:
        message = waiting.pop()
        for field, value in message.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                waiting += [value] if isinstance(value, Message) else value
            elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES) and field.name != _NUMBERS:
                if isinstance(value, str | bytes):
                    setattr(message, field.name, said(value))
                else:
                    value[:] = [said(one) for one in value]
    return made
