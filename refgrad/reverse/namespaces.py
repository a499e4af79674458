"""The groups in which viewers show the nodes of a gradient: the forward model's, below `forward` and `backward`.

A group is a path in the node's metadata `namespace`, as torch's exporter writes it and Model Explorer reads it. Where a node
has none, its name is taken as a path, the last part of which is its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import NodeProto

from refgrad.builder.nodes import NAMESPACE, Entries, entry
from refgrad.model.graph import Node

_FORWARD, _BACKWARD = "forward", "backward"


class Namespaces:
    """The groups of the nodes of a model, as entries of the metadata of nodes."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        """:param nodes: the nodes of the model."""
        self._groups: dict[str, str] = {}
        self._given: set[str] = set()  # the nodes that say their group themselves
        self._entries: dict[tuple[str, str], Entries] = {}
        for node in nodes:
            name = node.name
            if props := node.proto.metadata_props:
                for prop in props:
                    if prop.key == NAMESPACE:
                        self._groups[name] = prop.value
                        self._given.add(name)
                        break
            if "/" in name and name not in self._groups:
                self._groups[name] = name.rpartition("/")[0]

    def put_forward(self, nodes: Iterable[NodeProto]) -> None:
        """Put copies of nodes of the model into their groups below `forward`."""
        known, groups, given = self._entries, self._groups, self._given
        for node in nodes:
            name = node.name
            group = groups.get(name, "")
            if name in given:
                for prop in node.metadata_props:
                    if prop.key == NAMESPACE:
                        prop.value = _joined(_FORWARD, group)
            else:
                node.metadata_props.extend(known.get((_FORWARD, group)) or self._entry(_FORWARD, group))

    def of_backward(self, name: str) -> Entries:
        """The group, as metadata, of the backward nodes that belong to the node or value `name`."""
        group = self._groups.get(name)
        if group is None:  # a value, or a node whose name is no path
            group = name.rpartition("/")[0] if "/" in name else ""
        return self._entries.get((_BACKWARD, group)) or self._entry(_BACKWARD, group)

    def _entry(self, first: str, group: str) -> Entries:
        made = self._entries[first, group] = [entry(NAMESPACE, _joined(first, group))]
        return made


def _joined(first: str, path: str) -> str:
    path = path.strip("/")
    return f"{first}/{path}" if path else first
