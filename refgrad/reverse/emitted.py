"""Emitted nodes: what they are, which of them are needed, and how they become nodes of a graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from onnx import AttributeProto, GraphProto, StringStringEntryProto, ValueInfoProto

from refgrad.protos.walk import attribute_of, subgraphs

Entries = Sequence[StringStringEntryProto]  # metadata
COTANGENT_OF = "refgrad.cotangent_of"  # the key of the list of the primals that a value is the cotangent of
NAMESPACE = "namespace"  # the key under which torch writes the module of a node, and viewers look for groups


@dataclass(slots=True, eq=False)
class AttributeSet:
    """The attributes of emitted nodes: one object for all nodes that have the same. `captured` is what their graphs read."""

    attributes: dict[str, Any]
    captured: tuple[str, ...]


NO_SETTINGS = AttributeSet({}, ())


class EmittedNode(NamedTuple):
    """A node of the gradient graph before its values have their final names.

    `owner` are the rule that emitted it and the name of the forward node that it belongs to.
    """

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    settings: AttributeSet
    name: str
    owner: tuple[str, str]
    optional_outputs: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the node sets."""
        return self.settings.attributes


def needed_emitted(nodes: Sequence[EmittedNode], live: set[str]) -> list[EmittedNode]:
    """The emitted nodes that the values in `live` need, to which whatever they read is added."""
    kept = []
    for emitted in reversed(nodes):
        if live.isdisjoint(emitted.outputs):
            continue
        if emitted.optional_outputs:
            emitted = emitted._replace(outputs=tuple([name if name in live else "" for name in emitted.outputs]))
        live.update(emitted.inputs)
        if emitted.settings.captured:
            live.update(emitted.settings.captured)
        kept.append(emitted)
    kept.reverse()
    return kept


class NodeWriter:
    """Adds emitted nodes to a graph, values by the names that `rename` gives them."""

    def __init__(
        self, graph: GraphProto, rename: Mapping[str, str], namespace: Callable[[str], Entries] | None = None
    ) -> None:
        """Write into `graph`.

        :param namespace: the function from the name of a forward node to its metadata for viewers; None writes none.
        """
        self._graph = graph
        self._rename = rename
        self._namespace = namespace
        self._attributes: dict[AttributeSet, list[AttributeProto]] = {}
        self._owner = "", ""  # nodes of one owner mostly follow each other
        self._metadata: list[StringStringEntryProto] = []

    def add(self, node: EmittedNode) -> None:
        """Add the node with final names; `metadata_props` tell the rule and the forward node that it comes from."""
        final = self._rename.get
        made = self._graph.node.add(op_type=node.op_type, domain=node.domain, name=node.name)
        made.input.extend([final(name, name) for name in node.inputs])
        made.output.extend([final(name, name) for name in node.outputs])
        if node.settings.attributes:
            made.attribute.extend(self._attributes.get(node.settings) or self._written(node.settings))
        made.metadata_props.extend(self._metadata if node.owner is self._owner else self._description(node.owner))

    def _written(self, settings: AttributeSet) -> list[AttributeProto]:
        attributes = [attribute_of(name, value) for name, value in settings.attributes.items()]
        if settings.captured:  # no name within a graph is among those that are renamed
            pending = [graph for attribute in attributes for graph in subgraphs(attribute)]
            while pending:
                for node in pending.pop().node:
                    node.input[:] = [self._rename.get(name, name) for name in node.input]
                    pending += [graph for inner in node.attribute for graph in subgraphs(inner)]
        self._attributes[settings] = attributes
        return attributes

    def _description(self, owner: tuple[str, str]) -> list[StringStringEntryProto]:
        rule, node = self._owner = owner
        self._metadata = [entry("refgrad.rule", rule), entry("refgrad.node", node)]
        if self._namespace is not None:
            self._metadata += self._namespace(node)
        return self._metadata

    def declare(self, name: str, like: ValueInfoProto, primals: Sequence[str]) -> None:
        """Declare a value, by its name in the result, as another one is.

        :param primals: the values that it is the cotangent of.
        """
        made = self._graph.value_info.add(name=name, type=like.type)
        made.metadata_props.add(key=COTANGENT_OF, value=json.dumps(primals))


def write(graph: GraphProto, nodes: Iterable[EmittedNode], rename: Mapping[str, str] | None = None) -> None:
    """Add emitted nodes to a graph, values by the names that `rename` gives them."""
    writer = NodeWriter(graph, rename or {})
    for node in nodes:
        writer.add(node)


def entry(key: str, value: str) -> StringStringEntryProto:
    """An entry of metadata."""
    return StringStringEntryProto(key=key, value=value)
