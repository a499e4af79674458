"""The derivative of Scan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnx import GraphProto, TypeProto, ValueInfoProto, helper

from refgrad.builder.op import Emitter
from refgrad.builder.values import tensor_type
from refgrad.errors import InvalidModelError
from refgrad.model.graph import Graph, Node
from refgrad.protos.types import Dim, type_of
from refgrad.reverse.bodies import Body, Swept, formal
from refgrad.rules.control_flow.iteration import Iteration, Slices, State, StateLayout, Steps
from refgrad.tables.registry import control_flow_rule


@control_flow_rule("Scan")
class ScanRule(Iteration):
    """dy in reverse: each step takes the cotangents of its states and slices; what all steps read is summed step by step"""

    ranked = True

    @classmethod
    def inputs_of(cls, graph: Graph, node: Node, proto: GraphProto) -> list[ValueInfoProto]:
        """The formal inputs of the body: the states, then a slice of each tensor that is scanned."""
        count = _elements(node)
        first = len(node.inputs) - count
        axes, made = _setting(node, "scan_input_axes", count), []
        for k, (declared, name) in enumerate(zip(proto.input, node.inputs, strict=True)):
            kind = graph.type_of(name)
            made.append(formal(declared, kind if k < first or kind is None else _slice(kind, axes[k - first])))
        return made

    @classmethod
    def carried(cls, node: Node, proto: GraphProto) -> dict[int, int]:
        """A state has the same position among the inputs and the results."""
        return {k: k for k in range(len(proto.input) - _elements(node))}

    @classmethod
    def steady(cls, proto: GraphProto) -> list[str]:
        """All of them: the states and the slices."""
        return [value.name for value in proto.input]

    @classmethod
    def layout(cls, graph: Graph, node: Node, body: Body) -> StateLayout:
        """The states, the slices that are read, and those that are made."""
        first = len(node.inputs) - _elements(node)
        states = [
            State(*names) for names in zip(node.inputs[:first], body.inputs, body.outputs, node.outputs, strict=False)
        ]
        elements = _slices(graph, node, node.inputs[first:], body.inputs[first:], "input")
        outer = (*node.outputs, *[""] * (len(body.outputs) - len(node.outputs)))
        return StateLayout(states, elements, _slices(graph, node, outer[first:], body.outputs[first:], "output"))

    def trips(self) -> Dim:
        """The size of a scanned tensor along its axis."""
        for element in self.elements:
            shape = self.graph.shapes.get(element.outer)
            if shape is not None:
                return shape[element.axis]
        return None

    def seed(self, swept: Swept, stacks: list[Slices], cotangents: Mapping[str, str], steps: Steps) -> None:
        """The cotangents of the stacks are scanned too."""
        for stack in stacks:
            name = swept.op.fresh(f"{stack.inner}_grad")
            swept.sweep.seed(stack.inner, name)
            steps.slices.append(Slices(cotangents[stack.outer], name, stack.axis, stack.backward))

    def backward(self, op: Emitter, swept: Swept, steps: Steps) -> tuple[tuple[str, ...], str]:
        """The results of a Scan in the other direction, over the residuals and the cotangents of the stacks."""
        steps.stored = stored = self.stored(op, swept, list(dict.fromkeys((*swept.residuals, *steps.factors))))
        edit = op.edits.of(self.node)
        stacks = len(edit.outputs) - len(self.states)
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in self.node.attributes:
                given = list(self.node.attributes[name])
                edit.attributes[name] = given + [0] * (stacks - len(given))
        read = [*steps.slices, *(replace(stored[name], inner=name) for name in swept.residuals)]
        read = read or self.elements[:1]  # it shows how many steps there are
        sub = swept.op
        formals = [*steps.states, *((s.inner, tensor_type(sub.type(s.inner), sub.shape(s.inner))) for s in read)]
        attributes = {
            "body": swept.backward(formals, steps.results),
            "num_scan_inputs": len(read),
            "scan_input_axes": [s.axis for s in read],
            "scan_input_directions": [1 - s.backward for s in read],
            "scan_output_axes": [e.axis for e in steps.rows] or None,
            "scan_output_directions": [1 - e.backward for e in steps.rows] or None,
        }
        return op.emit_all("Scan", "", [*steps.starts, *(s.outer for s in read)], len(steps.results), attributes), ""


def _elements(node: Node) -> int:
    return int(node.attributes["num_scan_inputs"])


def _setting(node: Node, name: str, count: int) -> list[int]:
    return list(node.attributes.get(name) or [0] * count)


def _slices(graph: Graph, node: Node, outer: tuple[str, ...], inner: list[str], which: str) -> list[Slices]:
    """The tensors that the node reads or writes in slices; `which` is "input" or "output"."""
    axes = _setting(node, f"scan_{which}_axes", len(outer))
    ways = _setting(node, f"scan_{which}_directions", len(outer))
    ranks = [len(graph.shapes.get(name, ())) for name in outer]
    for name, axis, rank in zip(outer, axes, ranks, strict=True):
        if name in graph.shapes and not -rank <= axis < rank:
            raise InvalidModelError(
                f"Scan {node.name!r} has {axis} in scan_{which}_axes, and {name!r} has {rank} axes: {-rank} to "
                f"{rank - 1} are valid."
            )
    axes = [axis + rank if axis < 0 else axis for axis, rank in zip(axes, ranks, strict=True)]
    return [Slices(*one) for one in zip(outer, inner, axes, ways, strict=True)]


def _slice(kind: TypeProto, axis: int) -> TypeProto:
    """The type of a slice along `axis`."""
    elements, shape = type_of(ValueInfoProto(type=kind))
    if shape is None:
        return kind
    axis %= len(shape)
    return helper.make_tensor_type_proto(elements, [*shape[:axis], *shape[axis + 1 :]])
