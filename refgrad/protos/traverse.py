"""Helpers for onnx's protobufs: every graph, node and name of a model, imported versions by domain, plain attributes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, TypeAlias

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    SparseTensorProto,
    TensorProto,
    ValueInfoProto,
    helper,
)

from refgrad.protos.domains import ASSUMED_OPSET


def subgraphs(attribute: AttributeProto) -> Sequence[GraphProto]:
    """The graphs in an attribute."""
    if attribute.type == AttributeProto.GRAPH:
        return [attribute.g]
    return attribute.graphs if attribute.type == AttributeProto.GRAPHS else ()


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """`graph` and every subgraph in it."""
    every_graph = [graph]
    while every_graph:
        graph = every_graph.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                every_graph += subgraphs(attribute)


def op_types(graph: GraphProto) -> tuple[set[str], bool]:
    """The operators of the nodes of `graph` and of its subgraphs, without their domains, and whether it has subgraphs."""
    types: set[str] = set()
    pending = [graph]
    count = 0
    while pending:
        count += 1
        for node in pending.pop().node:
            types.add(node.op_type)
            for attribute in node.attribute:
                pending += subgraphs(attribute)
    return types, count > 1


def nested(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """`nodes`, and every node in their subgraphs."""
    bodies = [nodes]
    while bodies:
        for node in bodies.pop():
            yield node
            bodies += [g.node for attribute in node.attribute for g in subgraphs(attribute)]


def every_node(model: ModelProto) -> Iterator[NodeProto]:
    """Every node of a model: in its graph, its subgraphs and its functions."""
    yield from nested(model.graph.node)
    for function in model.functions:
        yield from nested(function.node)


def tensors_without_initializers(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model except the initializers of its graph.

    These are the parts of sparse tensors, the tensors in attributes, in bodies and in functions, and those for training. What
    an attribute holds counts, and not what it says that it holds.
    """
    yield from _parts(model.graph.sparse_initializer)
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    attributes = [a for function in model.functions for a in function.attribute_proto]
    bodies = [g for training in model.training_info for g in (training.initialization, training.algorithm)]
    while nodes or attributes or bodies:
        for body in bodies:
            yield from body.initializer
            yield from _parts(body.sparse_initializer)
            nodes += body.node
        attributes += [attribute for node in nodes for attribute in node.attribute]
        nodes, bodies = [], []
        for attribute in attributes:
            for field, value in attribute.ListFields():
                match field.name:
                    case "t":
                        yield value
                    case "tensors":
                        yield from value
                    case "sparse_tensor":
                        yield from _parts([value])
                    case "sparse_tensors":
                        yield from _parts(value)
                    case "g":
                        bodies.append(value)
                    case "graphs":
                        bodies += value
        attributes = []


def _parts(tensors: Iterable[SparseTensorProto]) -> Iterator[TensorProto]:
    for tensor in tensors:
        yield tensor.values
        yield tensor.indices


def versions_of(model: ModelProto) -> dict[str, int]:
    """The imported version by domain; ai.onnx is "" here."""
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}


def import_onnx(model: ModelProto) -> int:
    """Import ai.onnx where `model` does not, in place, in the newest version that a function of it imports.

    Return the version that `model` imports.
    """
    if "" not in (versions := versions_of(model)):
        used = [opset.version for function in model.functions for opset in function.opset_import if not opset.domain]
        versions[""] = max(used, default=ASSUMED_OPSET)
        model.opset_import.append(helper.make_opsetid("", versions[""]))
    return versions[""]


def one_per_domain(imports: Iterable[OperatorSetIdProto]) -> list[OperatorSetIdProto]:
    """The imports, one per domain. Where a domain is imported twice the last import counts, as for ONNX Runtime.

    ai.onnx has the name "" there, which nodes of it have.
    """
    kept = []
    for opset in {"" if o.domain == "ai.onnx" else o.domain: o for o in imports}.values():
        kept.append(OperatorSetIdProto())
        kept[-1].CopyFrom(opset)
        if opset.domain == "ai.onnx":
            kept[-1].domain = ""
    return kept


def import_domain(model: ModelProto | FunctionProto, domain: str) -> None:
    """Make `model`, or a function, import version 1 of `domain`, unless it imports `domain` already."""
    if all(o.domain != domain for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, 1))


def forget_domain(model: ModelProto | FunctionProto, domain: str) -> None:
    """Take the import of `domain` away."""
    refill(model.opset_import, [o for o in model.opset_import if o.domain != domain])


def refill(field: Any, messages: Iterable[Any]) -> None:
    """Replace the content of a repeated field by `messages`, which may be messages of the field itself."""
    new = list(messages)
    del field[:]
    field.extend(new)


def attribute_of(name: str, value: Any) -> AttributeProto:
    """The attribute; a list without elements is one of integers, and a text need not be UTF-8."""
    is_empty = isinstance(value, list | tuple) and not value
    return helper.make_attribute(name, _bytes(value), attr_type=AttributeProto.INTS if is_empty else None)


def _bytes(value: Any) -> Any:
    """A text, or texts, as the bytes that a model has; another value as it is."""
    if isinstance(value, str):
        return value.encode(errors="surrogateescape")
    return list(map(_bytes, value)) if isinstance(value, list | tuple) else value


def attribute_value(attribute: AttributeProto) -> Any:
    """The value of an attribute, strings decoded."""
    value = helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.STRINGS:
        return [text.decode(errors="surrogateescape") for text in value]
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def names_of(graph: GraphProto) -> set[str]:
    """Every name of a value in `graph` and its subgraphs."""
    names: set[str] = set()
    for inner in graphs(graph):
        names.update(value.name for value in (*inner.input, *inner.output, *inner.value_info))
        names.update(tensor.name for tensor in (*inner.initializer, *(t.values for t in inner.sparse_initializer)))
        for node in inner.node:
            names.update((*node.input, *node.output))
    return names


def rename_values(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename values that a node and its subgraphs read or make, in place."""
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for graph in (graph for attribute in node.attribute for graph in subgraphs(attribute)):
        for value in (*graph.input, *graph.output, *graph.value_info):
            value.name = names.get(value.name, value.name)
        for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
            tensor.name = names.get(tensor.name, tensor.name)
        for inner in graph.node:
            rename_values(inner, names)


def rename_shadows(graph: GraphProto) -> None:
    """Rename the values of a subgraph that have the name of an outer value, since nodes move from one graph to another."""
    _rename(graph, set(), {}, names_of(graph), siblings=False)


def rename_repeats(graph: GraphProto, names: Iterable[str] = ()) -> None:
    """Rename the values of a subgraph that have the name of an outer value, or of a value in an earlier subgraph.

    onnx propagates numbers by name: the number of a name in one subgraph replaces it in every other subgraph.

    :param names: the names of further outer values. No earlier subgraph has one of them.
    """
    _rename(graph, set(names), {}, names_of(graph) | {*names}, siblings=True)


def _rename(graph: GraphProto, seen: set[str], names: dict[str, str], taken: set[str], *, siblings: bool) -> None:
    """Give the values of `graph` and its subgraphs that are in `seen` fresh names, in place.

    :param names: the new names of outer values.
    :param siblings: `seen` gets the names that are defined here, for the graphs that follow.
    """
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own.update(tensor.values.name for tensor in graph.sparse_initializer)
    own.update(name for node in graph.node for name in node.output if name)
    names = {name: new for name, new in names.items() if name not in own}
    names.update((name, fresh(name, taken)) for name in sorted(own & seen))
    if siblings:
        seen |= own
    else:
        seen = seen | own
    tensors = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    named: list[ValueInfoProto | TensorProto] = [*graph.input, *graph.output, *graph.value_info, *tensors]
    for place in named if names else ():
        place.name = names.get(place.name, place.name)
    for node in graph.node:
        if names:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in subgraphs(attribute):
                _rename(inner, seen, names, taken, siblings=siblings)


def fresh(name: str, taken: set[str], start: int = 1) -> str:
    """`name`, or the next free one, `name_1`, `name_2`, ...: it is taken from now on. `start` is the first number."""
    if name in taken:
        k = start
        while f"{name}_{k}" in taken:
            k += 1
        name = f"{name}_{k}"
    taken.add(name)
    return name


def lacks_shape(value: ValueInfoProto) -> bool:
    """True if `value` is declared as a tensor of unknown rank."""
    return value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")


def with_shapes(model: ModelProto) -> ModelProto:
    """`model` for onnx's checker, which asks inputs and outputs for a shape: a copy where one declares none."""
    if not any(map(lacks_shape, (*model.graph.input, *model.graph.output))):
        return model
    checked = ModelProto()
    checked.CopyFrom(model)
    for value in filter(lacks_shape, (*checked.graph.input, *checked.graph.output)):
        value.type.tensor_type.shape.SetInParent()
    return checked


def checkable(model: ModelProto) -> ModelProto:
    """A copy for onnx's checker, which asks every input and output for a type and a shape."""
    checked = ModelProto()
    checked.CopyFrom(model)
    for value in (*checked.graph.input, *checked.graph.output):
        if value.type.HasField("tensor_type") or not value.type.WhichOneof("value"):
            value.type.tensor_type.shape.SetInParent()
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or TensorProto.FLOAT
    return checked


def captured(graph: GraphProto) -> Iterator[str]:
    """The outer values that `graph`, a subgraph, reads."""
    inner = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    inner.update(tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield from (name for name in reads_of(node) if name not in inner)
        inner.update(node.output)
    yield from (v.name for v in graph.output if v.name not in inner)


def captures_of(node: NodeProto) -> list[str]:
    """The outer values that the subgraphs of a node read."""
    return [name for attribute in node.attribute for graph in subgraphs(attribute) for name in captured(graph)]


def reads_of(node: NodeProto) -> list[str]:
    """The values that a node needs: its inputs, and the outer values that its subgraphs read."""
    return [name for name in (*node.input, *captures_of(node)) if name]


ReadsAndWrites: TypeAlias = tuple[
    Collection[str], Collection[str]
]  # the values that a node reads, and those that it writes


def signatures(nodes: Iterable[NodeProto]) -> list[ReadsAndWrites]:
    """The names that each node reads, and the names that it writes."""
    return [(reads_of(node), node.output) for node in nodes]


def positions_needed(nodes: Sequence[ReadsAndWrites], wanted: Iterable[str]) -> list[int]:
    """The positions of the nodes that the values `wanted` need. `nodes` are in topological order, and so is the result."""
    needed, kept = set(wanted) - {""}, []
    for position in reversed(range(len(nodes))):
        reads, writes = nodes[position]
        if not needed.isdisjoint(writes):
            needed.update(name for name in reads if name)
            kept.append(position)
    return kept[::-1]


def topological_positions(nodes: Sequence[ReadsAndWrites]) -> list[int]:
    """The positions of the nodes in topological order: the given order where that is one. Nodes of a cycle are missing."""
    writer = {name: position for position, (_, writes) in enumerate(nodes) for name in writes if name}
    readers: list[list[int]] = [[] for _ in nodes]
    missing = []
    for position, (reads, _) in enumerate(nodes):
        before = {writer[name] for name in reads if name in writer}
        missing.append(len(before))
        for other in before:
            readers[other].append(position)
    ready = [position for position, count in enumerate(missing) if not count]
    ordered = []
    while ready:
        position = heappop(ready)
        ordered.append(position)
        for reader in readers[position]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    return ordered
