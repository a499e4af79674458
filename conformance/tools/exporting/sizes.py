"""Every size of a model as a number: what it is for given feeds. Compilers plan memory from these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, TensorShapeProto, TypeProto, ValueInfoProto, helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.case import Case
from refgrad.protos.traverse import graphs, nested, subgraphs


def sized(case: Case) -> Case:
    """The case with the size of every value of its model declared as a number."""
    return replace(case, model=with_sizes(case.model, case.feeds))


def with_sizes(model: ModelProto, feeds: Mapping[str, Any]) -> ModelProto:
    """A copy of the model that declares the size of each value of its graph as a number: what it is for these feeds.

    A body has the numbers that hold in every step. A value of a body that it declares with a symbol or without a size has
    its type alone, because its size may differ from step to step; so has a value that is a sequence or an optional.

    :raises RefgradError: the interpreter does not run the model.
    """
    found = NumpyBackend().prepare(model).run(dict(feeds), trace=True) | dict(feeds)
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for value in (*graph.input, *graph.output):
        _declare(value, found.get(value.name))
    listed = {value.name for value in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    inner = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name in dict.fromkeys(output for node in graph.node for output in node.output)
        if name not in listed and isinstance(array := found.get(name), np.ndarray | np.generic)
    ]
    del graph.value_info[:]
    graph.value_info.extend(inner)
    for body in _bodies(graph):
        for value in (*body.input, *body.output):
            _forget(value.type)
        numbers = [value for value in body.value_info if _numbers(value.type)]
        del body.value_info[:]
        body.value_info.extend(numbers)
    return made


def types_in(model: ModelProto) -> tuple[str, ...]:
    """The element types of what a model declares, in its bodies too, sorted."""
    kinds = {tensor.data_type for graph in graphs(model.graph) for tensor in graph.initializer}
    for graph in graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            kinds |= {tensor.elem_type for tensor in _tensors(value.type)}
    return tuple(sorted(helper.tensor_dtype_to_np_dtype(kind).name for kind in kinds if kind))


def symbols(model: ModelProto) -> Iterator[str]:
    """The values with a size that is not a number; an input or output that is a tensor must have sizes."""
    graph = model.graph
    for value in (*graph.input, *graph.output):
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            yield value.name
    for one in (graph, *_bodies(graph)):
        yield from (value.name for value in (*one.input, *one.output, *one.value_info) if not _numbers(value.type))


def _bodies(graph: GraphProto) -> Iterator[GraphProto]:
    for node in nested(graph.node):
        for attribute in node.attribute:
            yield from subgraphs(attribute)


def _declare(value: ValueInfoProto, found: Any) -> None:
    """Declare a tensor with its sizes; a sequence or an optional without."""
    if value.type.HasField("tensor_type"):
        shape = TensorShapeProto(dim=[TensorShapeProto.Dimension(dim_value=size) for size in np.shape(found)])
        value.type.tensor_type.shape.CopyFrom(shape)
    else:
        _forget(value.type)


def _forget(kind: TypeProto) -> None:
    """Take away the shapes that are not numbers."""
    for shaped in _tensors(kind):
        if shaped.HasField("shape") and not _whole(shaped.shape.dim):
            shaped.ClearField("shape")


def _numbers(kind: TypeProto) -> bool:
    """True if every size that a type declares is a number."""
    return all(_whole(tensor.shape.dim) for tensor in _tensors(kind))


def _whole(dims: Iterable[TensorShapeProto.Dimension]) -> bool:
    return all(dim.HasField("dim_value") for dim in dims)


def _tensors(kind: TypeProto) -> Iterator[TypeProto.Tensor]:
    """The tensor that a type is, or that a sequence or an optional holds."""
    match kind.WhichOneof("value"):
        case "tensor_type":
            yield kind.tensor_type
        case "sequence_type":
            yield from _tensors(kind.sequence_type.elem_type)
        case "optional_type":
            yield from _tensors(kind.optional_type.elem_type)
