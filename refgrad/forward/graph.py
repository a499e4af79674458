"""The model as the sweep sees it: a read-only view over the protobuf. A value is its name, a node is a `NodeProto`.

Large initializers stay in the caller's model: `model` is a skeleton in which they are mere graph inputs, so nothing large is
copied or serialised, and a model with external data is never read.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from refgrad.errors import InvalidModelError
from refgrad.forward.calls import Functions
from refgrad.forward.completion import infer_completely
from refgrad.forward.inference import Mended, infer
from refgrad.notices import notice
from refgrad.protos.external import array_of
from refgrad.protos.malformed import not_text
from refgrad.protos.reading import is_number
from refgrad.protos.types import FLOATS, Shape, element_type, type_of, type_text
from refgrad.protos.walk import attribute_value, captured, names_of, subgraphs, versions_of
from refgrad.tables.finiteness import preserves_finite
from refgrad.tables.registry import CALLS, STRUCTURES, Structure
from refgrad.tables.schemas import find_schema

MIN_OPSET = 16  # ScatterND and ScatterElements add duplicates from this one on
_MAYBE = FLOATS | {0}  # element types of what may carry a derivative: 0 is unknown
_FILLERS = frozenset((("", "SequenceConstruct"), ("", "SequenceInsert")))


class Node(NamedTuple):
    """A forward node read once: reaching into a protobuf costs more than the rest of the sweep.

    `key` is its domain and operator, as the tables of rules have it; `reads` are its inputs and what its subgraphs take from
    outside, `attributes` those that it sets.
    """

    proto: NodeProto
    key: tuple[str, str]
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[str, ...]
    attributes: dict[str, Any]

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
    """A checked model of opset >= 16, with types and shapes by name. Local functions are inlined, but for those in `functions`.

    `source` is the caller's model, `model` its normal form without large initializers. `nodes` are in topological order,
    uniquely named. `types` maps a tensor to its element type, `shapes` to its dimensions (an int, a symbol, or None),
    `containers` a sequence or an optional to its type; a value that is in none of them is unknown.
    """

    source: ModelProto
    model: ModelProto
    functions: Functions
    structures: Mapping[tuple[str, str], type[Structure]]  # of the operators that have graphs, and of the functions
    opsets: dict[str, int]
    opset: int
    initializers: dict[str, TensorProto]
    large: dict[str, TensorProto]  # the initializers that `model` lacks
    inputs: dict[str, ValueInfoProto]
    outputs: dict[str, ValueInfoProto]
    nodes: list[Node]
    producer: dict[str, Node]
    types: dict[str, int]
    shapes: dict[str, Shape]
    containers: dict[str, TypeProto]
    values: dict[str, ValueInfoProto]  # what is declared or inferred of results of nodes
    results: dict[str, ValueInfoProto]  # what is inferred of outputs
    outer: Graph | None = None  # of a body: the graph that it lies in
    captures: frozenset[str] = frozenset()  # of a body: the values of `outer` that it reads

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name of a value, in the whole model: in its subgraphs too."""
        return self.outer.names if self.outer is not None else frozenset(names_of(self.model.graph))

    def type_of(self, name: str) -> TypeProto | None:
        """The declared or inferred type of a value, None where nothing is known."""
        if name in self.containers:
            return self.containers[name]
        value = self.values.get(name) or self.inputs.get(name) or self.results.get(name)
        if value is not None:
            return value.type
        tensor = self.initializers.get(name)
        return None if tensor is None else helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))

    def readers(self, name: str) -> list[Node]:
        """The nodes that read a value, in order."""
        return self._readers.get(name, [])

    @cached_property
    def _readers(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for read in dict.fromkeys(node.reads):
                found.setdefault(read, []).append(node)
        return found

    def preserves_finite(self, name: str) -> bool:
        """True if finite cotangents of the outputs imply a finite cotangent of this value, except for overflow.

        Every operator between the value and the outputs has to preserve finite cotangents. In a body this is not known.
        """
        return name in self._finite

    @cached_property
    def _finite(self) -> frozenset[str]:
        if self.outer is not None or self.functions:
            return frozenset()
        wild: set[str] = set()
        for node in reversed(self.nodes):
            if not preserves_finite(node.key, node.attributes) or not wild.isdisjoint(node.outputs):
                wild.update(node.reads)
        made = {name for node in self.nodes for name in node.outputs}
        return frozenset(made - wild)

    def is_float(self, name: str) -> bool:
        """True if `name` may carry a derivative: it is a float, or holds some. A value of unknown type may."""
        return self.element_type(name) in _MAYBE

    def element_type(self, name: str) -> int:
        """The element type of a tensor, or of the tensors that a container holds; 0 where it is not known."""
        container = self.containers.get(name)
        return self.types.get(name, 0) if container is None else element_type(container)

    def is_weight(self, name: str) -> bool:
        """True if a float initializer is the model's own, and not a number that refgrad wrote: a rule, or a loss."""
        return not is_number(self.initializers[name])

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a small initializer or Constant node that no caller can override, else None."""
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
    """The view of `model`, the normal form of `source`: its nodes, and the types and shapes that onnx infers."""
    graph = model.graph
    opsets = versions_of(model)
    tensors = {t.name: t for t in graph.initializer} | large
    order = (t.name for t in source.graph.initializer if t.name in tensors)
    initializers = {name: tensors[name] for name in order} | tensors
    overridable = overridable_initializers(source)
    inputs = {v.name: v for v in graph.input if v.name not in large or v.name in overridable}
    nodes = read_nodes(graph)
    producer = {name: node for node in nodes for name in node.outputs}
    producer.pop("", None)
    plain = functions.inlined(model)
    mended: dict[str, Mended] = {}
    inferred = infer(plain, mended)
    if mended:
        _mend_declarations(graph, mended)
    values, types, shapes, containers = _known(inferred, producer if functions else None)
    if producer.keys() - types.keys() - containers.keys():
        inferred = infer_completely(plain, inferred)
        values, types, shapes, containers = _known(inferred, producer if functions else None)
    results = {value.name: value for value in inferred.output}
    for name, tensor in initializers.items():
        types[name] = tensor.data_type
        if name not in inputs:
            shapes[name] = tuple(tensor.dims)
    made = Graph(
        source=source,
        model=model,
        functions=functions,
        structures=STRUCTURES | dict.fromkeys(functions.protos, CALLS[0]) if functions else STRUCTURES,
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
        values=values,
        results=results,
        outer=outer,
        captures=captures,
    )
    texts = {
        *types,
        *containers,
        *(node.name for node in nodes),
        *(name for node in nodes if node.attributes for name in node.attributes),
        *(size for shape in set(shapes.values()) for size in shape),
    }
    if bytes in set(map(type, texts)):
        raise InvalidModelError(not_text(source))
    for node in nodes:
        if node.key == ("", "Attention"):
            _mend(node, shapes)
        elif node.key in _FILLERS:
            _check_elements(made, node)
        if containers and node.key not in functions.protos:
            _refuse_containers(made, node)
    return made


def overridable_initializers(model: ModelProto) -> frozenset[str]:
    """The initializers that are graph inputs too: since IR version 4 the caller may then feed another value."""
    return frozenset(v.name for v in model.graph.input if model.ir_version >= 4)


def _mend_declarations(graph: GraphProto, mended: Mapping[str, Mended]) -> None:
    """Declare what was inferred, and warn of what the model declares instead."""
    for value in (*graph.value_info, *graph.output):
        if value.name in mended:
            value.type.CopyFrom(mended[value.name].inferred)
    for name, (declared, inferred) in mended.items():
        was, found = (type_text(kind) for kind in (declared, inferred))
        notice(
            f"The model declares {name!r} as {was}, and shape inference finds {found}, which is taken. Correct its "
            "declaration, or leave it out."
        )


def _known(
    inferred: GraphProto, among: Container[str] | None
) -> tuple[dict[str, ValueInfoProto], dict[str, int], dict[str, Shape], dict[str, TypeProto]]:
    """The inferred types of results of nodes; the types and the shapes of all tensors, and the types of containers.

    :param among: the results of nodes, where what is inferred has others too: those in functions.
    """
    values = {value.name: value for value in inferred.value_info if among is None or value.name in among}
    declared = (*values.items(), *((v.name, v) for v in (*inferred.output, *inferred.input)))
    types: dict[str, int] = {}
    shapes: dict[str, Shape] = {}
    containers: dict[str, TypeProto] = {}
    known: dict[bytes, tuple[int, Shape | None]] = {}  # few types recur many times
    for name, value in declared:
        if not value.type.HasField("tensor_type"):
            if element_type(value.type):
                containers[name] = value.type
            continue
        text = value.type.SerializeToString()
        if text not in known:
            known[text] = type_of(value)
        kind, shape = known[text]
        if kind:
            types[name] = kind
        if shape is not None:
            shapes[name] = shape
    return values, types, shapes, containers


def _mend(attention: Node, shapes: dict[str, Shape]) -> None:
    """Drop two inferences of onnx: a scalar for the scores of inputs of unknown rank, 0 channels where V's are unknown."""
    names, v = attention.outputs, shapes.get(attention.inputs[2])
    y = shapes.get(names[0])
    if y and y[-1] == 0 and (v is None or v[-1] != 0):
        shapes[names[0]] = (*y[:-1], None)
    if len(names) > 3 and shapes.get(names[3]) == ():
        del shapes[names[3]]


def _refuse_containers(graph: Graph, node: Node) -> None:
    """Refuse a sequence or an optional where the operator takes, or makes, tensors alone. onnx accepts it."""
    schema = find_schema(node.op_type, node.domain, graph.opsets.get(node.domain, 1))
    if schema is None:
        return
    for names, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for k, name in enumerate(names):
            kind = graph.containers.get(name)
            if kind is None or not formals:
                continue
            formal = formals[min(k, len(formals) - 1)]
            wrapper, said = ("seq", "a sequence") if kind.HasField("sequence_type") else ("optional", "an optional")
            if not any(text.startswith(wrapper) for text in formal.types):
                raise InvalidModelError(
                    f"{name!r} is {said}, and {formal.name} of {node.op_type} {node.name!r} is a tensor. Take it out with "
                    "SequenceAt or OptionalGetElement, or declare it as a tensor."
                )


def _check_elements(graph: Graph, node: Node) -> None:
    """A sequence holds tensors of one type; onnx finds others, and says nothing."""
    kinds = {name: graph.element_type(name) for name in node.inputs[:2] if node.op_type == "SequenceInsert"}
    kinds = kinds or {name: graph.element_type(name) for name in node.inputs}
    named = [f"{n!r} of type {helper.tensor_dtype_to_string(k)[12:].lower()}" for n, k in kinds.items() if k]
    if len(set(kinds.values()) - {0}) > 1:
        raise InvalidModelError(
            f"{node.op_type} {node.name!r} makes a sequence of mixed element types: {', '.join(named)}. "
            "Cast them to one type."
        )


def read_nodes(graph: GraphProto) -> list[Node]:
    """The nodes, each with a name of its own: gradient nodes are named after the node that they belong to."""
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
        settings = {}
        if attributes := proto.attribute:
            settings = {a.name: attribute_value(a) for a in attributes}
            if inner := [name for attribute in attributes for g in subgraphs(attribute) for name in captured(g)]:
                reads = (*inputs, *inner)
        key = "" if domain == "ai.onnx" else domain, op_type
        nodes.append(Node(proto, key, name, inputs, tuple(proto.output), reads, settings))
    return nodes


def needed_nodes(nodes: Sequence[Node], live: set[str]) -> list[Node]:
    """The nodes that the values in `live` need, to which whatever they read is added."""
    kept = []
    for node in reversed(nodes):
        if not live.isdisjoint(node.outputs):
            live.update(node.reads)
            kept.append(node)
    kept.reverse()
    return kept
