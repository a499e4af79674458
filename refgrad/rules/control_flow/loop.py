"""The derivative of Loop."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from refgrad.builder.nodes import NodeBuilder
from refgrad.builder.op import Emitter, sequence_type
from refgrad.model.graph import Graph, Node
from refgrad.protos.types import Dim, type_of
from refgrad.reverse.bodies import Body, Swept, formal
from refgrad.rules.control_flow.iteration import Iteration, Slices, State, StateLayout, Steps, is_sized
from refgrad.tables.registry import control_flow_rule


@control_flow_rule("Loop")
class Loop(Iteration):
    """dy in reverse, as many steps as were made; what all steps read is summed from step to step"""

    listing = True
    returns_last_step_first = True

    @classmethod
    def inputs_of(cls, graph: Graph, node: Node, proto: GraphProto) -> list[ValueInfoProto]:
        """The formal inputs of the body: the number of the step, the condition, and the states."""
        scalars = [
            formal(declared, helper.make_tensor_type_proto(kind, type_of(declared)[1] or ()))
            for declared, kind in zip(proto.input, (TensorProto.INT64, TensorProto.BOOL), strict=False)
        ]
        states = zip(list(proto.input)[2:], node.inputs[2:], strict=True)
        return [*scalars, *(formal(declared, graph.type_of(name)) for declared, name in states)]

    @classmethod
    def carried(cls, node: Node, proto: GraphProto) -> dict[int, int]:
        """The inputs start with the number of the step and the condition, the results with the condition alone."""
        return {k: k - 1 for k in range(2, len(proto.input))}

    @classmethod
    def layout(cls, graph: Graph, node: Node, body: Body) -> StateLayout:
        """The states, what is read in slices, and what is stacked."""
        outer = [*node.outputs, *[""] * (len(body.outputs) - 1 - len(node.outputs))]
        count = len(node.inputs) - 2
        inner = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], outer, strict=False)
        stacks = zip(outer[count:], body.outputs[1 + count :], strict=True)
        elements = _slices_read(graph, body)
        sliced = frozenset(element.outer for element in elements)
        return StateLayout([State(*names) for names in inner], elements, [Slices(*names) for names in stacks], sliced)

    def whole(self, op: Emitter, made: str, element: Slices, count: str) -> str:
        """The slices in the order of the steps, and zeros for those that no step reads."""
        shape, axis = self.graph.shapes[element.outer], element.axis
        rank, trips, sizes = len(shape), op.Reshape(count, [1]), op.Shape(element.outer)
        if not is_sized(shape, axis):
            others = [k for k in range(rank) if k != axis]
            made = op.Reshape(
                made, op.Concat(trips, op.Gather(sizes, others), axis=0) if others else trips, allowzero=1
            )
        made = op.Slice(made, [-1], [np.iinfo(np.int64).min], [0], [-1])
        if axis:
            made = op.Transpose(made, perm=[*range(1, axis + 1), 0, *range(axis + 1, rank)])
        if isinstance(shape[axis], int) and shape[axis] == self.trips():
            return made
        left = op.Sub(op.Gather(sizes, [axis]), trips)
        pads: list[str | list[int]] = [[0] * (rank + axis), left, [0] * (rank - axis - 1)]
        return op.Pad(made, op.Concat(*(pad for pad in pads if pad), axis=0))

    def trips(self) -> Dim:
        """The trip count, where the condition is known to stay true."""
        count, condition = (self.graph.constant(name) if name else None for name in self.node.inputs[:2])
        started = not self.node.inputs[1] or (condition is not None and bool(condition.all()))
        goes = self.body.outputs[0]
        made = self.body.graph.producer.get(goes)
        known = self.body.graph.constant(goes)
        kept = made is not None and made.key == ("", "Identity") and made.inputs[0] == self.body.inputs[1]
        if count is None or not started or not (kept or (known is not None and bool(known.all()))):
            return None
        return int(count.item())

    def seed(self, swept: Swept, stacks: list[Slices], cotangents: Mapping[str, str], steps: Steps) -> None:
        """A step gathers its part of the cotangent of each stack."""
        steps.number = swept.op.fresh(f"{swept.op.node}_step")
        for stack in stacks:
            swept.sweep.seed(stack.inner, swept.op.Gather(cotangents[stack.outer], steps.number, axis=0))

    def backward(self, op: Emitter, swept: Swept, steps: Steps) -> tuple[tuple[str, ...], str]:
        """The results of a Loop from the last step to the first, which gathers a step's residuals, and the number of steps."""
        counter, step = self.body.inputs[0], steps.number
        residuals = list(dict.fromkeys((*swept.residuals, counter)))
        listed = [name for name in residuals if not swept.is_stackable(name)]
        stacked = [name for name in residuals if name not in listed]
        stored, lists = self._listed(op, swept, list(dict.fromkeys((*stacked, *steps.factors))), listed)
        steps.stored = stored
        trips = op.Size(stored[counter].outer)
        sub = swept.op
        left, going, goes = (sub.fresh(f"{op.node}_{name}") for name in ("left", "going", "goes"))
        first = NodeBuilder(sub.emission.taken)
        first.add_as("Sub", [op.Sub(trips, 1), left], step)
        first.add_as("Identity", [going], goes)
        for name in swept.residuals:
            if name in lists:
                continue
            s = stored[name]
            first.append("Gather", [s.outer, step], [name], f"{step}_{name}", attributes={"axis": s.axis})
        for name, outer in lists.items():
            first.append("SequenceAt", [outer, step], [name], f"{step}_{name}")
        formals = [
            (left, helper.make_tensor_type_proto(TensorProto.INT64, [])),
            (going, helper.make_tensor_type_proto(TensorProto.BOOL, [])),
            *steps.states,
        ]
        body = swept.backward(formals, [(goes, formals[1][1]), *steps.results], first.take())
        always = None if steps.starts else op.const(np.array(True))  # a node cannot leave out its last input
        return op.emit_all("Loop", "", [trips, always, *steps.starts], len(steps.results), {"body": body}), trips

    def _listed(
        self, op: Emitter, swept: Swept, residuals: list[str], names: list[str]
    ) -> tuple[dict[str, Slices], dict[str, str]]:
        """The residuals, and for each of `names` the sequence of its values in all steps, which is a new state."""
        node, edit, values = self.node, op.edits.of(self.node), op.values
        kinds = [sequence_type(swept.op.type(name)) for name in names]
        builder = NodeBuilder(op.emission.taken)
        states = []
        for name, kind in zip(names, kinds, strict=True):
            state = State(*(op.fresh(f"{node.name}_{name}_{what}") for what in ("none", "before", "after", "all")))
            dtype = swept.op.type(name)
            builder.add_as("SequenceEmpty", [], state.start, dtype=dtype)
            op.edits.insert(builder.take(), before=node)
            edit.inputs.append(state.start)
            values.add(state.start, kind)
            values.add(state.end, kind)
            states.append(state)
        longer = []
        for s, name, kind in zip(states, names, kinds, strict=True):
            builder.add_as("SequenceInsert", [s.read, name], s.made)
            longer.append((builder.take(), helper.make_value_info(s.made, kind)))
        stored = self.stored(op, swept, residuals, longer)
        body = edit.attributes["body"]
        body.input.extend(helper.make_value_info(s.read, kind) for s, kind in zip(states, kinds, strict=True))
        results = list(body.output)
        place, rest = 1 + len(self.states), len(results) - len(states)
        del body.output[:]
        body.output.extend([*results[:place], *results[rest:], *results[place:rest]])
        edit.outputs[place - 1 : place - 1] = [s.end for s in states]
        return stored, {name: s.end for name, s in zip(names, states, strict=True)}


def _slices_read(graph: Graph, body: Body) -> list[Slices]:
    """The captures that a step reads only at its own number: its cotangent is then only as large as a slice."""
    found, counter = [], body.inputs[0]
    for name in body.captures if body.graph.shapes.get(counter) == () else ():
        shape, readers = graph.shapes.get(name), body.graph.readers(name)
        if shape and all(node.key == ("", "Gather") and node.inputs == (name, counter) for node in readers):
            found += [Slices(name, n.outputs[0], n.attributes.get("axis", 0) % len(shape)) for n in readers]
    return found
