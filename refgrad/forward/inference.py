"""Shape inference: what onnx infers, where it has to be helped."""

from __future__ import annotations

from collections.abc import Set

import onnx
from onnx import GraphProto, ModelProto, helper

from refgrad.errors import InvalidModelError
from refgrad.forward.functions import call_functions
from refgrad.protos.types import UNNAMED, Type, dimension, held_by, is_container, type_of, unname
from refgrad.protos.walk import graphs, subgraphs
from refgrad.tables.definitions import DEFINITIONS

_CUT = "/made"  # what is added to the name of a sequence where a node makes it, for inference


def infer(model: ModelProto) -> GraphProto:
    """The graph with inferred types and shapes.

    An input's dimension without a name gets one first: two values whose shapes were inferred from it are then known to agree.
    """
    anonymous = ModelProto()
    anonymous.CopyFrom(model)
    for value in anonymous.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dimension(dim) is None:
                dim.dim_param = f"{UNNAMED}{value.name}_{axis}"
    for value in (*anonymous.graph.input, *anonymous.graph.output, *anonymous.graph.value_info):
        if is_container(value.type):
            value.type.CopyFrom(unname(value.type))  # the elements may differ in the size
    for graph in graphs(anonymous.graph):
        for node in graph.node:  # where the attribute is absent onnx infers the shape of the two-sided transform
            if (node.domain, node.op_type) == ("", "STFT") and all(a.name != "onesided" for a in node.attribute):
                node.attribute.append(helper.make_attribute("onesided", 1))
    try:
        inferred = _infer_through_bodies(anonymous)
        cut: set[str] = set()
        for looped in (True, False):  # what a Loop makes first: the others follow from it
            if found := _cut_sequences(anonymous.graph, inferred, looped):
                inferred = _infer_through_bodies(anonymous)
                cut |= found
        return _joined_again(inferred, cut) if cut else inferred
    except onnx.shape_inference.InferenceError as error:
        raise InvalidModelError(f"Shape inference refuses the model: {error}") from error


def _joined_again(graph: GraphProto, cut: Set[str]) -> GraphProto:
    """The graph with the sequences in `cut` where nodes make them."""
    for node in graph.node:
        node.output[:] = [name.removesuffix(_CUT) for name in node.output]
    values = [value for value in graph.value_info if not value.name.endswith(_CUT)]
    values += [value for value in graph.input if value.name in cut]
    inputs = [value for value in graph.input if value.name not in cut]
    del graph.value_info[:], graph.input[:]
    graph.value_info.extend(values)
    graph.input.extend(inputs)
    return graph


def _cut_sequences(graph: GraphProto, inferred: GraphProto, looped: bool) -> set[str]:
    """Make inputs of the sequences that nodes make, with what is known of all elements; their names.

    onnx gives all elements one name for a size that it does not know, and those that Loop adds the shape of the first ones.
    """
    kinds = {v.name: v.type for v in (*inferred.value_info, *inferred.output) if is_container(v.type)}
    found = set()
    for node in graph.node if kinds else ():
        inner = (g for attribute in node.attribute for sub in subgraphs(attribute) for g in graphs(sub))
        if looped and node.op_type != "Loop" and all(n.op_type != "Loop" for g in inner for n in g.node):
            continue
        for position, name in enumerate(node.output):
            if name not in kinds or name.endswith(_CUT):
                continue
            found.add(name)
            node.output[position] = f"{name}{_CUT}"
            value = graph.input.add(name=name, type=unname(kinds[name]))
            if looped:
                held_by(value.type).tensor_type.ClearField("shape")
    return found


def _infer_through_bodies(model: ModelProto) -> GraphProto:
    """Operators that only we know are inferred through their bodies, some of which need to know what the others give."""
    known, before = ranks(model.graph), -1
    ours = {domain for domain, _ in DEFINITIONS}.intersection(o.domain for o in model.opset_import)
    waiting = sum((node.domain, node.op_type) in DEFINITIONS for node in model.graph.node) if ours else 0
    while True:
        called, left = model, 0
        if waiting:
            called = ModelProto()
            called.CopyFrom(model)
            left = call_functions(called, known)
        inferred: GraphProto = onnx.shape_inference.infer_shapes(called, data_prop=True).graph
        if left in (0, before):
            return inferred
        before, known = left, ranks(inferred)


def ranks(graph: GraphProto) -> dict[str, Type]:
    """The element types and ranks that a graph declares."""
    found = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind, shape = type_of(value)
        found[value.name] = kind, None if shape is None else len(shape)
    return found
