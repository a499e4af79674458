"""The record of how forward nodes change in the gradient model; `refgrad.reverse.edits` applies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onnx import NodeProto

if TYPE_CHECKING:
    from refgrad.model.graph import Node


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
    """The edits of the forward nodes of one graph, and the nodes that are put before some of them, by the names of nodes."""

    def __init__(self) -> None:
        self.edits: dict[str, Edit] = {}
        self.before: dict[str, list[NodeProto]] = {}

    def of(self, node: Node) -> Edit:
        """The edit of a node, to be changed."""
        if node.name not in self.edits:
            self.edits[node.name] = Edit(list(node.inputs), list(node.outputs))
        return self.edits[node.name]

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

    def insert(self, nodes: Sequence[NodeProto], before: Node) -> None:
        """Put nodes before a forward node."""
        self.before.setdefault(before.name, []).extend(nodes)
