"""Names that collide: bodies beside each other, functions and the main graph have the same ones, as they may."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from refgrad.protos.traverse import subgraphs


def collide(model: ModelProto) -> None:
    """Rename what functions and bodies define, in place. Every name of the model is unique before.

    Functions take the names of the main graph. Bodies take the names of other bodies at their depth: never of outer values.
    """
    for function in model.functions:
        names = dict(zip(_defined(function), (f"v{k}" for k in count(1)), strict=False))
        function.input[:] = [names[name] for name in function.input]
        function.output[:] = [names[name] for name in function.output]
        _rename_nodes(function.node, names, 1)
    _rename_nodes(model.graph.node, {}, 1)


def _rename_nodes(nodes: Sequence[NodeProto], names: dict[str, str], depth: int) -> None:
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for graph in (graph for attribute in node.attribute for graph in subgraphs(attribute)):
            own = names | dict(zip(_defined(graph), (f"b{depth}_{k}" for k in count()), strict=False))
            for value in (*graph.input, *graph.output, *graph.value_info):
                value.name = own.get(value.name, value.name)
            for tensor in graph.initializer:
                tensor.name = own[tensor.name]
            _rename_nodes(graph.node, own, depth + 1)


def _defined(body: FunctionProto | GraphProto) -> list[str]:
    given = [one if isinstance(one, str) else one.name for one in body.input]
    if isinstance(body, GraphProto):
        given += [tensor.name for tensor in body.initializer]
    return list(dict.fromkeys([*given, *(name for node in body.node for name in node.output if name)]))
