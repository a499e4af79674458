"""Edits of forward nodes: the assembly applies them to the copies of the nodes in the gradient model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from onnx import GraphProto, NodeProto, helper

from refgrad.forward.graph import Node, read_nodes
from refgrad.protos.domains import MICROSOFT


@dataclass
class Edit:
    """How a forward node is written: with these inputs and outputs, and with `attributes` in the place of its own of that name.

    `function` is the function that it calls instead. `form` is an operator of com.microsoft that returns `more` besides; the
    node becomes that one if one of `more` is read, with `form_attributes`, or with its own where they are None.
    """

    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)
    function: str = ""
    form: str = ""
    more: tuple[str, ...] = ()
    form_attributes: Mapping[str, Any] | None = None


class Edits:
    """The edits of the forward nodes of one graph, and the nodes that are put before some of them."""

    def __init__(self) -> None:
        self._edits: dict[str, Edit] = {}  # by the name of the node
        self._before: dict[str, list[NodeProto]] = {}

    def of(self, node: Node) -> Edit:
        """The edit of a node, to be changed."""
        if node.name not in self._edits:
            self._edits[node.name] = Edit(list(node.inputs), list(node.outputs))
        return self._edits[node.name]

    def name_output(self, node: Node, position: int, name: str) -> str:
        """Give the output at `position`, which the node leaves out, a name."""
        outputs = self.of(node).outputs
        outputs.extend([""] * (position + 1 - len(outputs)))
        outputs[position] = name
        return name

    def become(self, node: Node, form: str, more: Sequence[str], attributes: Mapping[str, Any] | None) -> None:
        """Let the node be `form` of com.microsoft, which returns `more` behind its outputs, if one of these is read."""
        edit = self.of(node)
        edit.form, edit.more, edit.form_attributes = form, tuple(more), attributes

    def insert(self, proto: NodeProto, before: Node) -> None:
        """Put a node before a forward node."""
        self._before.setdefault(before.name, []).append(proto)

    def applied(self, nodes: Sequence[Node], live: Set[str]) -> Sequence[Node]:
        """`nodes` as they are written where the values in `live` are read; those without an edit are the same."""
        if not self._edits and not self._before:
            return nodes
        made: list[Node] = []
        for node in nodes:
            if node.name in self._before:
                made += read_nodes(GraphProto(node=self._before[node.name]))
            made.append(_applied(node, self._edits[node.name], live) if node.name in self._edits else node)
        return made


def _applied(node: Node, edit: Edit, live: Set[str]) -> Node:
    proto, outputs = NodeProto(), edit.outputs
    proto.CopyFrom(node.proto)
    if edit.form and live.isdisjoint(edit.more):
        outputs = _trimmed(outputs[: -len(edit.more)])
    elif edit.form:
        proto.op_type, proto.domain = edit.form, MICROSOFT
        if edit.form_attributes is not None:
            _set_attributes(proto, edit.form_attributes, keep=False)
    if edit.function:
        proto.op_type = edit.function
    proto.input[:], proto.output[:] = edit.inputs, outputs
    if edit.attributes:
        _set_attributes(proto, edit.attributes, keep=True)
    reads = (*node.reads, *edit.inputs[len(node.inputs) :])
    return Node(proto, node.key, node.name, tuple(edit.inputs), tuple(outputs), reads, node.attributes)


def _trimmed(outputs: list[str]) -> list[str]:
    while outputs and not outputs[-1]:
        outputs = outputs[:-1]
    return outputs


def _set_attributes(proto: NodeProto, attributes: Mapping[str, Any], keep: bool) -> None:
    """Set attributes in the order of the node's own; those that it lacks follow."""
    order: Iterable[str] = (*(a.name for a in proto.attribute), *attributes) if keep else attributes
    own = {a.name: a for a in proto.attribute}
    made = [
        helper.make_attribute(name, attributes[name]) if name in attributes else own[name]
        for name in dict.fromkeys(order)
    ]
    del proto.attribute[:]
    proto.attribute.extend(made)
