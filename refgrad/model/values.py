"""Values from .pb files, which may be a stranger's: tensors, sequences and optionals. Their numbers lie in the same file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from onnx import OptionalProto, SequenceProto, TensorProto, numpy_helper

from refgrad.errors import FeedError, RefgradError
from refgrad.model.external import array_of, refuse_external, refuse_mismatch

Value = TypeVar("Value", bound=TensorProto | SequenceProto | OptionalProto)


def read_value(content: bytes, kind: type[Value], file: Path) -> Value:
    """The value in the bytes of a file.

    :raises FeedError: they hold no value.
    """
    value = kind()
    try:
        value.ParseFromString(content)
        _ = value.name  # a name that is no text fails here
    except (DecodeError, ValueError, RecursionError) as error:
        raise FeedError(f"{str(file)!r} is no {value.DESCRIPTOR.name} of onnx: {error}.") from error
    return value


def array_in(value: TensorProto | SequenceProto | OptionalProto, file: Path) -> Any:
    """The array, or the list of arrays, that a value holds; None for an empty optional.

    :raises FeedError: its data does not fit its type and shape, or lies in another file.
    """
    try:
        for tensor in _held(value):
            refuse_external(tensor)
            refuse_mismatch(tensor)
        if isinstance(value, TensorProto):
            return array_of(value)
        return numpy_helper.to_list(value) if isinstance(value, SequenceProto) else numpy_helper.to_optional(value)
    except (RefgradError, TypeError, ValueError, KeyError, OverflowError, AttributeError, RecursionError) as error:
        raise FeedError(f"{str(file)!r} is no {value.DESCRIPTOR.name} of onnx: {error}.") from error


def _held(value: Message) -> Iterator[TensorProto]:
    """The tensors in a value, also within sequences and optionals."""
    if isinstance(value, TensorProto):
        yield value
        return
    for _, content in value.ListFields():
        for one in [content] if isinstance(content, Message) else content if isinstance(content, Iterable) else ():
            if isinstance(one, Message):
                yield from _held(one)
