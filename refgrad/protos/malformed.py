"""What is wrong with a model, where reading it raised: looked for only then, so that a sound model costs nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import onnx
from onnx import ModelProto

from refgrad.errors import InvalidModelError, RefgradError
from refgrad.protos.reading import read
from refgrad.protos.walk import checkable, every_node, graphs, nested

P = ParamSpec("P")
R = TypeVar("R")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, one of whose arguments is a model. Where it raises by what onnx refuses of the model, that is the error.

    An exception by a model that onnx accepts stays as it is: it is a bug of refgrad.
    """

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*arguments, **keywords)
        except (RefgradError, OSError, MemoryError):
            raise
        except Exception as error:
            if reason := _reason((*arguments, keywords.get("model"))):
                raise InvalidModelError(reason) from error
            raise

    return call


def _reason(arguments: Iterable[Any]) -> str:
    """What is wrong with the first model among `arguments`."""
    for given in arguments:
        if isinstance(given, ModelProto | str | os.PathLike):
            return fault_of(read(given, weights=False))
    return ""


def fault_of(model: ModelProto) -> str:
    """What onnx refuses of `model`, as a sentence; "" where it accepts it."""
    for place, text in _texts(model):
        if isinstance(text, bytes):  # so protobuf returns it where it is not UTF-8
            return f"{place} has the text {text[:40]!r}, which is not UTF-8. Export the model again."
    for node in nested(model.graph.node):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                return (
                    f"Node {_called(node)!r} ({node.op_type}) takes {attribute.name} from the attribute "
                    f"{attribute.ref_attr_name!r} of a function, and lies in none. Give it a value."
                )
    try:
        onnx.checker.check_model(checkable(model))
    except Exception as error:  # the checker, or what converts the model for it: either refuses it
        return f"onnx.checker refuses the model: {' '.join(str(error).split())}"
    return ""


def _called(node: Any) -> str:
    return node.name or next(filter(None, node.output), "")


def _texts(model: ModelProto) -> Iterator[tuple[str, Any]]:
    """Every text of the model, bytes where it is not UTF-8, and where it stands."""
    for node in every_node(model):
        place = f"Node {_called(node)!r}"
        for text in (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output):
            yield place, text
        for attribute in node.attribute:
            yield place, attribute.name
            yield place, attribute.ref_attr_name
    for graph in graphs(model.graph):
        for what, values in (
            ("An input", graph.input),
            ("An output", graph.output),
            ("A declared value", graph.value_info),
            ("An initializer", graph.initializer),
        ):
            for value in values:
                yield what, value.name
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                yield f"An axis of {value.name!r}", dim.dim_param
    for function in model.functions:
        for text in (function.name, function.domain, *function.input, *function.output, *function.attribute):
            yield "A function", text
    for imported in model.opset_import:
        yield "An opset import", imported.domain
