"""Edits of forward nodes, applied to the copies of the nodes in the gradient model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from onnx import GraphProto, NodeProto, helper

from refgrad.builder.edits import Edit, Edits
from refgrad.model.graph import Node, read_nodes
from refgrad.protos.domains import MICROSOFT


def edited(nodes: Sequence[Node], edits: Edits, live: Set[str]) -> Sequence[Node]:
    """`nodes` as they are written where the values in `live` are read; those without an edit are the same."""
    if not edits.edits and not edits.before:
        return nodes
    made: list[Node] = []
    for node in nodes:
        if node.name in edits.before:
            made += read_nodes(GraphProto(node=edits.before[node.name]))
        made.append(_edited(node, edits.edits[node.name], live) if node.name in edits.edits else node)
    return made


def _edited(node: Node, edit: Edit, live: Set[str]) -> Node:
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
    attribute_protos = [
        helper.make_attribute(name, attributes[name]) if name in attributes else own[name]
        for name in dict.fromkeys(order)
    ]
    del proto.attribute[:]
    proto.attribute.extend(attribute_protos)
