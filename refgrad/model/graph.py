"""The model as the sweep sees it: a read-only view of the protobuf, in which values are names and nodes are `Node`s.

Large initializers stay in the caller's model. In its normal form they are graph inputs, so no large tensor is copied or
serialised, and external data is never read.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from refgrad.errors import InvalidModelError
from refgrad.model.checks.malformed import not_text
from refgrad.model.external import array_of
from refgrad.model.inference.completion import infer_completely
from refgrad.model.inference.infer import CorrectedType, infer
from refgrad.model.inlining.kept import Functions
from refgrad.notices import notice
from refgrad.protos.metadata import is_number
from refgrad.protos.traverse import attribute_value, captured, names_of, nested, subgraphs, versions_of
from refgrad.protos.types import FLOATS, Shape, element_type, type_of, type_text
from refgrad.tables.finiteness import preserves_finite
from refgrad.tables.registry import CALLS, CONTROL_FLOW_RULES, ControlFlowRule
from refgrad.tables.schemas import find_schema

MIN_OPSET = 16  # the first opset in which ScatterND and ScatterElements add duplicates
_DIFFERENTIABLE = FLOATS | {0}  # element types; 0 is unknown
_INSERTS_ELEMENTS = frozenset((("", "SequenceConstruct"), ("", "SequenceInsert")))


class Node(NamedTuple):
    """A forward node, copied from its protobuf once: protobuf's accessors would take longer than the rest of the sweep."""

    proto: NodeProto
    key: tuple[str, str]  # the domain and the operator, as in the tables of rules
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[str, ...]  # the inputs, then the outer values that the node's subgraphs read
    attributes: dict[str, Any]  # the attributes that the node sets

    @property
    def domain(self) -> str:
        """The operator's domain, "" for ai.onnx."""
        return self.key[0]

    @property
    def op_type(self) -> str:
        """The operator."""
        return self.key[1]


@dataclass(frozen=True, eq=False)
class Graph:
    """A checked model of opset >= 16, with the types and shapes of its values."""

    source: ModelProto  # the caller's model
    model: ModelProto  # its normal form, without large initializers
    functions: Functions  # the local functions that are not inlined
    control_flow: Mapping[tuple[str, str], type[ControlFlowRule]]  # the rules by key; calls of `functions` have one too
    opsets: dict[str, int]
    opset: int
    initializers: dict[str, TensorProto]
    large: dict[str, TensorProto]  # the initializers that `model` lacks
    inputs: dict[str, ValueInfoProto]
    outputs: dict[str, ValueInfoProto]
    nodes: list[Node]  # in topological order, with unique names
    producer: dict[str, Node]  # by the names of the node's outputs
    types: dict[str, int]  # the element types of tensors. A value in neither `types` nor `containers` is unknown.
    shapes: dict[str, Shape]  # a dimension is an int, a symbol, or None
    containers: dict[str, TypeProto]  # the types of sequences and optionals
    node_results: dict[str, ValueInfoProto]  # declared or inferred, without graph outputs
    inferred_outputs: dict[str, ValueInfoProto]
    outer: Graph | None = None  # the graph around it, if it is a body
    captures: frozenset[str] = frozenset()  # the values of `outer` that it reads

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all values in the whole model, subgraphs included."""
        return self.outer.names if self.outer is not None else frozenset(names_of(self.model.graph))

    def type_of(self, name: str) -> TypeProto | None:
        """The declared or inferred type of a value; None if it is unknown."""
        if name in self.containers:
            return self.containers[name]
        value = self.node_results.get(name) or self.inputs.get(name) or self.inferred_outputs.get(name)
        if value is not None:
            return value.type
        tensor = self.initializers.get(name)
        return None if tensor is None else helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))

    def readers(self, name: str) -> list[Node]:
        """The nodes that read a value, in order."""
        return self._readers.get(name, [])

    @cached_property
    def _readers(self) -> dict[str, list[Node]]:
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.reads):
                readers.setdefault(name, []).append(node)
        return readers

    def preserves_finite(self, name: str) -> bool:
        """True if finite cotangents of the outputs imply a finite cotangent of this value, except for overflow.

        All operators between the value and the outputs have to preserve finite cotangents. Always False in a body, where the
        operators behind it are not known.
        """
        return name in self._finite

    @cached_property
    def _finite(self) -> frozenset[str]:
        if self.outer is not None or self.functions:
            return frozenset()
        maybe_infinite: set[str] = set()
        for node in reversed(self.nodes):
            if not preserves_finite(node.key, node.attributes) or not maybe_infinite.isdisjoint(node.outputs):
                maybe_infinite.update(node.reads)
        computed = {name for node in self.nodes for name in node.outputs}
        return frozenset(computed - maybe_infinite)

    def is_float(self, name: str) -> bool:
        """True if `name` may carry a derivative: it is a float, a container of floats, or of unknown type."""
        return self.element_type(name) in _DIFFERENTIABLE

    def element_type(self, name: str) -> int:
        """The element type of a tensor, or of the tensors in a container; 0 if it is unknown."""
        container = self.containers.get(name)
        return self.types.get(name, 0) if container is None else element_type(container)

    def is_weight(self, name: str) -> bool:
        """True if a float initializer is a weight of the model, not a constant that refgrad wrote for a rule or a loss."""
        return not is_number(self.initializers[name])

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a small initializer or Constant node; None if `name` is neither, or a caller can override it."""
        if name not in self._constants:
            self._constants[name] = self._constant(name)
        return self._constants[name]

    @cached_property
    def _constants(self) -> dict[str, np.ndarray | None]:
        return {}

    def _constant(self, name: str) -> np.ndarray | None:
        if self.outer is not None and name in self.captures:
            return self.outer.constant(name)
        if name in self.initializers and name not in self.large:
            return array_of(self.initializers[name])
        node = self.producer.get(name)
        if node is None or node.key != ("", "Constant"):
            return None
        attribute = node.proto.attribute[0]
        if attribute.name == "value":
            return array_of(attribute.t)
        if attribute.name in ("value_float", "value_int", "value_floats", "value_ints"):
            kind = np.float32 if "float" in attribute.name else np.int64
            return np.array(helper.get_attribute_value(attribute), dtype=kind)
        return None


def view(
    source: ModelProto,
    model: ModelProto,
    large: dict[str, TensorProto],
    functions: Functions,
    outer: Graph | None = None,
    captures: frozenset[str] = frozenset(),
) -> Graph:
    """The view of `model`, the normal form of `source`, with the types and shapes that onnx infers.

    :param large: the initializers that `model` has as graph inputs.
    :param functions: the functions that are not inlined.
    :param outer: the graph around a body.
    :param captures: the values of `outer` that the body reads.
    :raises InvalidModelError: a name is not UTF-8, a sequence mixes element types, or a container is used as a tensor.
    """
    graph = model.graph
    opsets = versions_of(model)
    tensors = {t.name: t for t in graph.initializer} | large
    order = (t.name for t in source.graph.initializer if t.name in tensors)
    initializers = {name: tensors[name] for name in order} | tensors
    overridable = overridable_names(source)
    inputs = {v.name: v for v in graph.input if v.name not in large or v.name in overridable}
    nodes = read_nodes(graph)
    producer = {name: node for node in nodes for name in node.outputs}
    producer.pop("", None)
    without_functions = functions.inlined(model)
    corrections: dict[str, CorrectedType] = {}
    inferred = infer(without_functions, corrections)
    if corrections:
        _correct_declarations(graph, corrections)
    node_results, types, shapes, containers = _types_and_shapes(inferred, producer if functions else None)
    if producer.keys() - types.keys() - containers.keys():
        inferred = infer_completely(without_functions, inferred)
        node_results, types, shapes, containers = _types_and_shapes(inferred, producer if functions else None)
    for name, tensor in initializers.items():
        types[name] = tensor.data_type
        if name not in inputs:
            shapes[name] = tuple(tensor.dims)
    viewed = Graph(
        source=source,
        model=model,
        functions=functions,
        control_flow=CONTROL_FLOW_RULES | dict.fromkeys(functions.protos, CALLS[0])
        if functions
        else CONTROL_FLOW_RULES,
        opsets=opsets,
        opset=opsets.get("", MIN_OPSET),
        initializers=initializers,
        large=large,
        inputs=inputs,
        outputs={v.name: v for v in graph.output},
        nodes=nodes,
        producer=producer,
        types=types,
        shapes=shapes,
        containers=containers,
        node_results=node_results,
        inferred_outputs={value.name: value for value in inferred.output},
        outer=outer,
        captures=captures,
    )
    names_and_symbols = {
        *types,
        *containers,
        *(node.name for node in nodes),
        *(name for node in nodes if node.attributes for name in node.attributes),
        *(size for shape in set(shapes.values()) for size in shape),
    }
    if bytes in set(map(type, names_and_symbols)):  # protobuf returns bytes where text is not UTF-8
        raise InvalidModelError(not_text(source))
    for node in nodes:
        if node.key == ("", "Attention"):
            _drop_wrong_shapes(node, shapes)
        elif node.key in _INSERTS_ELEMENTS:
            _check_elements(viewed, node)
        if containers and node.key not in functions.protos:
            _refuse_containers(viewed, node)
    return viewed


def overridable_names(model: ModelProto) -> frozenset[str]:
    """The names of the graph inputs, whose initializers a feed may override. None before IR version 4."""
    return frozenset(v.name for v in model.graph.input if model.ir_version >= 4)


def _correct_declarations(graph: GraphProto, corrections: Mapping[str, CorrectedType]) -> None:
    """Declare the inferred types in `graph`, and warn that the model declares others."""
    for value in (*graph.value_info, *graph.output):
        if value.name in corrections:
            value.type.CopyFrom(corrections[value.name].inferred)
    for name, (declared, inferred) in corrections.items():
        declared_text, inferred_text = (type_text(kind) for kind in (declared, inferred))
        notice(
            f"The model declares {name!r} as {declared_text}, and shape inference finds {inferred_text}, which is taken. "
            "Correct its declaration, or leave it out."
        )


def _types_and_shapes(
    inferred: GraphProto, of_graph: Container[str] | None
) -> tuple[dict[str, ValueInfoProto], dict[str, int], dict[str, Shape], dict[str, TypeProto]]:
    """The fields `node_results`, `types`, `shapes` and `containers` of `Graph`.

    :param of_graph: the node results of the graph, if `inferred` has the results of inlined functions too.
    """
    values = {value.name: value for value in inferred.value_info if of_graph is None or value.name in of_graph}
    declared = (*values.items(), *((v.name, v) for v in (*inferred.output, *inferred.input)))
    types: dict[str, int] = {}
    shapes: dict[str, Shape] = {}
    containers: dict[str, TypeProto] = {}
    parsed: dict[bytes, tuple[int, Shape | None]] = {}  # a few types recur many times
    for name, value in declared:
        if not value.type.HasField("tensor_type"):
            if element_type(value.type):
                containers[name] = value.type
            continue
        text = value.type.SerializeToString()
        if text not in parsed:
            parsed[text] = type_of(value)
        kind, shape = parsed[text]
        if kind:
            types[name] = kind
        if shape is not None:
            shapes[name] = shape
    return values, types, shapes, containers


def _drop_wrong_shapes(attention: Node, shapes: dict[str, Shape]) -> None:
    """Forget two wrong inferences of onnx for Attention.

    If the channels of V are unknown, onnx infers 0 channels for Y. If an input has unknown rank, it infers a scalar for the
    scores.
    """
    names, v = attention.outputs, shapes.get(attention.inputs[2])
    y = shapes.get(names[0])
    if y and y[-1] == 0 and (v is None or v[-1] != 0):
        shapes[names[0]] = (*y[:-1], None)
    if len(names) > 3 and shapes.get(names[3]) == ():
        del shapes[names[3]]


def _refuse_containers(graph: Graph, node: Node) -> None:
    """Refuse a sequence or an optional as an input or output that has to be a tensor. onnx accepts it."""
    schema = find_schema(node.op_type, node.domain, graph.opsets.get(node.domain, 1))
    if schema is None:
        return
    for names, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for k, name in enumerate(names):
            kind = graph.containers.get(name)
            if kind is None or not formals:
                continue
            formal = formals[min(k, len(formals) - 1)]
            wrapper, words = ("seq", "a sequence") if kind.HasField("sequence_type") else ("optional", "an optional")
            if not any(text.startswith(wrapper) for text in formal.types):
                raise InvalidModelError(
                    f"{name!r} is {words}, and {formal.name} of {node.op_type} {node.name!r} is a tensor. Take it out with "
                    "SequenceAt or OptionalGetElement, or declare it as a tensor."
                )


def _check_elements(graph: Graph, node: Node) -> None:
    """Refuse a sequence of tensors of different types. onnx accepts it."""
    kinds = {name: graph.element_type(name) for name in node.inputs[:2] if node.op_type == "SequenceInsert"}
    kinds = kinds or {name: graph.element_type(name) for name in node.inputs}
    named = [f"{n!r} of type {helper.tensor_dtype_to_string(k)[12:].lower()}" for n, k in kinds.items() if k]
    if len(set(kinds.values()) - {0}) > 1:
        raise InvalidModelError(
            f"{node.op_type} {node.name!r} makes a sequence of mixed element types: {', '.join(named)}. "
            "Cast them to one type."
        )


def read_nodes(graph: GraphProto) -> list[Node]:
    """The nodes of a graph. A node without a unique name gets one, since gradient nodes are named after their forward node."""
    taken: set[str] = set()
    nodes = []
    for position, proto in enumerate(graph.node):
        op_type, name, domain = proto.op_type, proto.name, proto.domain
        if not name or name in taken:
            name = f"{name or op_type}_{position}"
            while name in taken:
                name += "_"
            proto.name = name
        taken.add(name)
        inputs = reads = tuple(proto.input)
        by_name = {}
        if attributes := proto.attribute:
            by_name = {a.name: attribute_value(a) for a in attributes}
            if inner := [name for attribute in attributes for g in subgraphs(attribute) for name in captured(g)]:
                reads = (*inputs, *inner)
        key = "" if domain == "ai.onnx" else domain, op_type
        nodes.append(Node(proto, key, name, inputs, tuple(proto.output), reads, by_name))
    return nodes


def taken_names(graph: Graph) -> set[str]:
    """All names in the model, of values and of nodes, subgraphs included."""
    taken = {*graph.inputs, *graph.initializers, *graph.outputs, *graph.producer}
    taken.update(tensor.values.name for tensor in graph.model.graph.sparse_initializer)
    for node in graph.nodes:
        taken.add(node.name)
        taken.update(node.reads)
        for attribute in node.proto.attribute if node.attributes else ():
            for body in subgraphs(attribute):
                taken |= names_of(body)
                taken.update(inner.name for inner in nested(body.node))
    return taken


def needed_nodes(nodes: Sequence[Node], live: set[str]) -> list[Node]:
    """The nodes that the values in `live` need. Adds the values that these nodes read to `live`."""
    needed = []
    for node in reversed(nodes):
        if not live.isdisjoint(node.outputs):
            live.update(node.reads)
            needed.append(node)
    needed.reverse()
    return needed
