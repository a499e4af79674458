"""Find the fault of a model for which a function raised: only then, so that a sound model costs nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto, NodeProto

from refgrad.errors import BrokenRuleError, InvalidModelError, RefgradError
from refgrad.model import native
from refgrad.model.external import external_tensors
from refgrad.model.reading import read
from refgrad.protos.traverse import checkable, nested

P = ParamSpec("P")
R = TypeVar("R")

_MOST = 2**63 - 1  # elements


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, one of whose arguments is a model. Where it raises by what onnx refuses of the model, that is the error.

    An exception by a model that onnx accepts stays as it is: it is a bug of refgrad.
    """

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            is_raised = isinstance(error, BrokenRuleError) and error.__cause__ is not None
            overflows = isinstance(error.__cause__, OverflowError)  # a declaration that no tensor has says more
            if isinstance(error, RefgradError | OSError | MemoryError | Warning) and not (is_raised or overflows):
                raise
            if reason := _reason((*arguments, keywords.get("model"))):
                raise InvalidModelError(reason) from error
            raise

    return call


def _reason(arguments: Iterable[Any]) -> str:
    """The fault of the first model among `arguments`, or ""."""
    for given in arguments:
        if isinstance(given, ModelProto | str | os.PathLike):
            model = read(given, weights=False)
            return fault_of(model) or _mismatch_of(model)
    return ""


def fault_of(model: ModelProto) -> str:
    """The fault of `model` for onnx's checker, or for a reader of its texts, as a sentence; "" where there is none."""
    return not_text(model) or refusal_of(model)


def refusal_of(model: ModelProto) -> str:
    """The reason why onnx's checker refuses `model`, as a sentence; "" where it accepts it."""
    if lost := lost_reference(model):
        return lost
    checked = checkable(model)
    for tensor in external_tensors(checked):  # the reader of the data reports its faults
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.dims[:] = [0]
    try:
        native.check_model(checked)
    except InvalidModelError as error:
        return str(error)
    except Exception as error:  # the checker, or what converts the model for it: either refuses it
        return f"onnx.checker refuses the model: {_said(error)}"
    return ""


def lost_reference(model: ModelProto) -> str:
    """The node of the graph that takes an attribute from a function, and lies in none, in a sentence; "" where none does."""
    for node in nested(model.graph.node):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                return (
                    f"Node {_called(node)!r} ({node.op_type}) takes {attribute.name} from the attribute "
                    f"{attribute.ref_attr_name!r} of a function, and lies in none. Give it a value."
                )
    return ""


def _mismatch_of(model: ModelProto) -> str:
    """A fault that the checker accepts and schemas forbid: types, numbers of axes, contradicting sizes; or ""."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        if min(sizes, default=0) < 0 or math.prod(filter(None, sizes)) > _MOST:
            return f"{value.name!r} is declared with the sizes {sizes}, which no tensor has. Correct the declaration."
    try:
        native.infer_shapes(model, check_type=True, strict_mode=True)
    except InvalidModelError as error:
        return str(error)
    except Exception as error:
        return f"onnx's inference refuses the model: {_said(error)}"
    return ""


def _said(error: Exception) -> str:
    return " ".join(str(error).split())


def _called(node: Any) -> str:
    return node.name or next(filter(None, node.output), "")


def not_text(model: ModelProto) -> str:
    """The name or other text of `model` that is not UTF-8, in a sentence; "" where all are."""
    place = _not_text(model)
    return place and f"{place}, which is not UTF-8. Export the model again."


def _not_text(message: Message, place: str = "The model") -> str:
    """The place of a text in a message that is not UTF-8, which protobuf returns as bytes; "" where there is none."""
    for field, content in message.ListFields():
        if field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE):
            continue
        for value in content if field.is_repeated else (content,):
            if isinstance(value, bytes):
                return f"{place} has the {field.name} {value[:40]!r}"
            if isinstance(value, Message):
                called = f"{field.name.replace('_', ' ')} {_name_of(value)!r}" if _name_of(value) else place
                if found := _not_text(value, f"{called[:1].upper()}{called[1:]}"):
                    return found
    return ""


def _name_of(message: Message) -> str:
    return _called(message) if isinstance(message, NodeProto) else getattr(message, "name", "")
