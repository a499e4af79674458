"""The builder: it gives nodes and constants free names, and writes them into a graph.

An emitted node is an `EmittedNode` until it is written. Nodes that nothing needs are never written, and values may get other
names when the others are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    NodeProto,
    StringStringEntryProto,
    TensorProto,
    ValueInfoProto,
    numpy_helper,
)

from refgrad.protos.metadata import CONSTANT
from refgrad.protos.traverse import attribute_of, captured, fresh, subgraphs

Entries = Sequence[StringStringEntryProto]  # metadata
Owner = (
    tuple[str, str] | None
)  # the rule that emits a node, and the name of the forward node that the rule differentiates
COTANGENT_OF = "refgrad.cotangent_of"  # metadata key of a cotangent: its primals, as a list in JSON
NAMESPACE = "namespace"  # metadata key of a node: torch's exporter writes its module there, and viewers group by it


@dataclass(slots=True, eq=False)
class AttributeSet:
    """The attributes of an emitted node. Nodes with equal attributes share one object."""

    by_name: dict[str, Any]
    captured: tuple[str, ...]  # the values that attributes of type graph read from outside

    @classmethod
    def of(cls, attributes: dict[str, Any]) -> Self:
        """The set of these attributes."""
        return cls(
            attributes, tuple([n for g in attributes.values() if isinstance(g, GraphProto) for n in captured(g)])
        )


NO_ATTRIBUTES = AttributeSet({}, ())


class EmittedNode(NamedTuple):
    """A node before it is written. Its values do not have their final names yet."""

    op_type: str
    domain: str | None  # None and "" are ai.onnx; None leaves the field unset
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attribute_set: AttributeSet
    name: str
    owner: Owner = None
    optional_outputs: bool = False  # outputs that nothing reads are left out

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the node sets."""
        return self.attribute_set.by_name


def needed_emitted(nodes: Sequence[EmittedNode], live: set[str]) -> list[EmittedNode]:
    """The emitted nodes that the values in `live` need. Adds the values that these nodes read to `live`."""
    needed = []
    for emitted in reversed(nodes):
        if live.isdisjoint(emitted.outputs):
            continue
        if emitted.optional_outputs:
            emitted = emitted._replace(outputs=tuple([name if name in live else "" for name in emitted.outputs]))
        live.update(emitted.inputs)
        if emitted.attribute_set.captured:
            live.update(emitted.attribute_set.captured)
        needed.append(emitted)
    needed.reverse()
    return needed


class NodeWriter:
    """Adds emitted nodes to a graph, and renames their values."""

    def __init__(
        self, graph: GraphProto, rename: Mapping[str, str], namespace: Callable[[str], Entries] | None = None
    ) -> None:
        """Write into `graph`.

        :param rename: the final names of values, by the names that the nodes were emitted with.
        :param namespace: takes the name of a forward node and returns its metadata for viewers.
        """
        self._graph = graph
        self._rename = rename
        self._namespace = namespace
        self._attributes: dict[AttributeSet, list[AttributeProto]] = {}
        # The last owner and its metadata: the next node mostly has the same owner.
        self._owner: Owner = None
        self._metadata: list[StringStringEntryProto] = []

    def add(self, node: EmittedNode) -> None:
        """Add the node with final names, and its owner as `metadata_props`."""
        final = self._rename.get
        proto = self._graph.node.add(op_type=node.op_type, domain=node.domain, name=node.name or None)
        proto.input.extend([final(name, name) for name in node.inputs])
        proto.output.extend([final(name, name) for name in node.outputs])
        if node.attributes:
            proto.attribute.extend(self._attributes.get(node.attribute_set) or self._protos(node.attribute_set))
        proto.metadata_props.extend(self._metadata if node.owner is self._owner else self._description(node.owner))

    def _protos(self, attribute_set: AttributeSet) -> list[AttributeProto]:
        attributes = [attribute_of(name, value) for name, value in attribute_set.by_name.items()]
        if attribute_set.captured:  # the graphs' own values are never in `rename`, so all reads can be renamed
            pending = [graph for attribute in attributes for graph in subgraphs(attribute)]
            while pending:
                for node in pending.pop().node:
                    node.input[:] = [self._rename.get(name, name) for name in node.input]
                    pending += [graph for inner in node.attribute for graph in subgraphs(inner)]
        self._attributes[attribute_set] = attributes
        return attributes

    def _description(self, owner: Owner) -> list[StringStringEntryProto]:
        self._owner, self._metadata = owner, []
        if owner is not None:
            rule, node = owner
            self._metadata = [entry("refgrad.rule", rule), entry("refgrad.node", node)]
            if self._namespace is not None:
                self._metadata += self._namespace(node)
        return self._metadata

    def declare(self, name: str, like: ValueInfoProto, primals: Sequence[str]) -> None:
        """Declare a cotangent.

        :param name: its final name.
        :param like: a value of the same type.
        :param primals: the values that it is the cotangent of.
        """
        declared = self._graph.value_info.add(name=name, type=like.type)
        declared.metadata_props.add(key=COTANGENT_OF, value=json.dumps(primals))


def write(graph: GraphProto, nodes: Iterable[EmittedNode], rename: Mapping[str, str] | None = None) -> None:
    """Add emitted nodes to a graph, with the names of values that `rename` gives."""
    writer = NodeWriter(graph, rename or {})
    for node in nodes:
        writer.add(node)


def written(nodes: Iterable[EmittedNode], rename: Mapping[str, str] | None = None) -> list[NodeProto]:
    """Emitted nodes as protobufs, with the names of values that `rename` gives."""
    graph = GraphProto()
    write(graph, nodes, rename)
    return list(graph.node)


def constant_tensor(array: np.ndarray, exact: str = "") -> TensorProto:
    """An array as a tensor that is marked as a constant, so that it is not taken for a weight.

    :param exact: the number that the array rounds, if it is rounded.
    """
    tensor = numpy_helper.from_array(array)
    tensor.metadata_props.add(key=CONSTANT, value=exact)
    return tensor


def entry(key: str, value: str) -> StringStringEntryProto:
    """An entry of metadata."""
    return StringStringEntryProto(key=key, value=value)


class NodeBuilder:
    """Nodes in order, and the constants that they read, with free names."""

    def __init__(self, taken: set[str], start: int = 1) -> None:
        """Begin without nodes.

        :param taken: every name that is not free. New names are added to it.
        :param start: the first number that is tried behind a name that is taken.
        """
        self.taken = taken
        self._start = start
        self.nodes: list[EmittedNode] = []
        self.constants: dict[str, TensorProto] = {}
        self._by_content: dict[tuple[str, bytes], str] = {}

    def fresh(self, name: str) -> str:
        """`name`, or the next free one."""
        return fresh(name, self.taken, self._start)

    def add(self, op_type: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add a node with one result. Both get the name that is returned: `name`, or the next free one."""
        return self.add_as(op_type, inputs, self.fresh(name), **attributes)

    def add_as(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a node with one result. Both get the name `output`, which is returned."""
        return self.append(op_type, inputs, (output,), output, attributes=attributes)[0]

    def append(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str = "",
        *,
        domain: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        """Add a node, and return `outputs`.

        :param attributes: written in alphabetical order. An attribute that is None is left out.
        """
        present = {key: value for key, value in sorted((attributes or {}).items()) if value is not None}
        attribute_set = AttributeSet.of(present) if present else NO_ATTRIBUTES
        self.nodes.append(EmittedNode(op_type, domain, tuple(inputs), tuple(outputs), attribute_set, name))
        return self.nodes[-1].outputs

    def initializer(self, tensor: TensorProto, name: str) -> str:
        """Add an initializer, and return its name. Equal tensors that ask for the same `name` become one initializer."""
        key = name, tensor.SerializeToString(deterministic=True)
        final = self._by_content.get(key)
        if final is None:
            final = self._by_content[key] = self.fresh(name)
            initializer = self.constants[final] = TensorProto()
            initializer.CopyFrom(tensor)
            initializer.name = final
        return final

    def take(self, rename: Mapping[str, str] | None = None, metadata: Entries = ()) -> list[NodeProto]:
        """The nodes so far as protobufs. The builder forgets them.

        :param rename: new names of values, by their names in the builder.
        :param metadata: added to every node.
        """
        nodes = written(self.nodes, rename)
        self.nodes.clear()
        for node in nodes if metadata else ():
            node.metadata_props.extend(metadata)
        return nodes

    def put_into(self, graph: GraphProto) -> None:
        """Add the nodes and the initializers at the end of `graph`."""
        write(graph, self.nodes)
        graph.initializer.extend(self.constants.values())
