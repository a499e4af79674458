"""Sequences and optionals.

A sequence has a sequence of cotangents, one per element. An optional has the cotangent of its content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto, TypeProto

from refgrad.builder.op import Emitter, each, replace, sequence_type, shift, where_erased
from refgrad.errors import NoGradientError
from refgrad.model.graph import Graph, Node
from refgrad.protos.types import held_by
from refgrad.reverse.bodies import Body, Swept, formal
from refgrad.reverse.path import ControlFlowRules
from refgrad.tables.registry import ControlFlowRule, Route, VaryingValues, control_flow_rule, rule


@rule("SequenceConstruct", wrt=["inputs"])
def sequence_construct(op: Emitter, d_output_sequence: str, inputs: list[str]) -> Any:
    """dx_k = dy at k"""
    return ([op.SequenceAt(d_output_sequence, _scalar(op, k)) for k in range(len(inputs))],)


@rule("SequenceInsert", wrt=["input_sequence", "tensor"])
def sequence_insert(op: Emitter, d_output_sequence: str, position: str | None) -> Any:
    """ds = dy without the element at the position, dx = that element"""
    at = None if position is None else shift(op, position, -1, 0)  # from the back the result has one more
    return op.SequenceErase(d_output_sequence, at), op.SequenceAt(d_output_sequence, _last(op, at))


@rule("SequenceErase", wrt=["input_sequence"])
def sequence_erase(op: Emitter, d_output_sequence: str, input_sequence: str, position: str | None) -> Any:
    """ds = dy with zeros put back at the position"""
    place = _last(op, position)
    zeros = op.zeros_like(op.before("SequenceAt", input_sequence, place))
    at = where_erased(op, d_output_sequence, place)
    made = op.SequenceInsert(d_output_sequence, zeros, at)
    op.values.sparse.widened[made] = place, d_output_sequence, at
    return made


@rule("SequenceAt", wrt=["input_sequence"])
def sequence_at(op: Emitter, d_tensor: str, input_sequence: str, position: str) -> Any:
    """ds = dy at the position, 0 elsewhere"""
    made = replace(op, op.zeros_like(input_sequence), position, d_tensor)
    op.values.sparse.placed[made] = position, d_tensor
    return made


@rule("SplitToSequence", wrt=["input"])
def split_to_sequence(
    op: Emitter, d_output_sequence: str, input: str, split: str | None, axis: int, keepdims: int
) -> Any:
    """dx = the elements of dy side by side"""
    stacked = int(split is None and not keepdims)
    shape = op.shape(input)
    size = None if shape is None else shape[axis]
    if isinstance(size, int) and size > 0:
        return op.ConcatFromSequence(d_output_sequence, axis=axis, new_axis=stacked)
    # ConcatFromSequence needs an element where there may be none: an empty tensor or, where it stacks, one more.
    whole = op.shape_of(input)
    if not stacked:
        nothing = op.Slice(op.zeros_like(input), [0], [0], [axis])
        return op.ConcatFromSequence(op.SequenceInsert(d_output_sequence, nothing), axis=axis, new_axis=0)
    others = [op.Slice(whole, [0], [axis])] if axis else []
    if axis != -1:
        others.append(op.Slice(whole, [axis + 1], [np.iinfo(np.int64).max]))
    one = op.full(others[0] if len(others) == 1 else op.Concat(*others, axis=0), 0.0, like=input)
    more = op.ConcatFromSequence(op.SequenceInsert(d_output_sequence, one), axis=axis, new_axis=1)
    return op.Slice(more, [0], op.Gather(whole, [axis]), [axis])


@rule("ConcatFromSequence", wrt=["input_sequence"])
def concat_from_sequence(op: Emitter, d_concat_result: str, input_sequence: str, axis: int, new_axis: int) -> Any:
    """ds = dy cut where the elements meet"""
    if new_axis:
        return op.SplitToSequence(d_concat_result, axis=axis, keepdims=0)
    size = partial(op.Shape, start=axis, end=axis + 1 or None)
    sizes = each(op, TensorProto.INT64, size, input_sequence)
    return op.SplitToSequence(d_concat_result, op.ConcatFromSequence(sizes, axis=0), axis=axis)


@rule("Optional", wrt=["input"])
def optional(op: Emitter, d_output: str) -> Any:
    """dx = dy"""
    return d_output


@rule("OptionalGetElement", wrt=["input"])
def optional_get_element(op: Emitter, d_output: str) -> Any:
    """dx = dy"""
    return d_output


def _scalar(op: Emitter, position: int) -> str:
    return op.const(np.asarray(position, np.int64))


def _last(op: Emitter, position: str | None) -> str:
    """The position where SequenceInsert and SequenceErase act if none is given."""
    return _scalar(op, -1) if position is None else position


@control_flow_rule("SequenceMap")
class SequenceMap(ControlFlowRule):
    """dx of every element by the body; an input that all elements share gets the sum"""

    def __init__(self, graph: Graph, node: Node, body: Body) -> None:
        self.graph, self.node, self.body = graph, node, body
        self.inputs = list(zip(node.inputs, body.inputs, strict=True))
        self.outputs = list(zip(node.outputs, body.outputs, strict=False))

    @classmethod
    def read(cls, control_flow: ControlFlowRules, node: Node) -> SequenceMap:
        """The body, whose formal inputs are elements of the inputs."""
        graph, proto = control_flow.graph, node.attributes["body"]
        kinds = (graph.type_of(name) for name in node.inputs)
        given = [formal(v, None if k is None else held_by(k)) for v, k in zip(proto.input, kinds, strict=True)]
        return cls(graph, node, Body.read(control_flow, proto, given))

    def _inner(self, varied: Set[str]) -> set[str]:
        return {inner for outer, inner in self.inputs if outer in varied} | (varied & set(self.body.captures))

    def outputs_of(self, varying: VaryingValues) -> frozenset[str]:
        """The outputs whose elements depend on a value that varies."""
        path = self.body.path(varying, self._inner(varying.names), ())
        return frozenset(o for o, inner in self.outputs if o and inner in path.varied and self.graph.is_float(o))

    def route(self, varying: VaryingValues, needed: Set[str]) -> Route:
        """The way through the body, which every element goes."""
        outputs = {inner for outer, inner in self.outputs if outer in needed}
        path = self.body.path(varying, self._inner(varying.names), outputs)
        reads = {outer for outer, inner in self.inputs if inner in path.needed}
        reads.update(name for name in self.body.captures if name in path.needed)
        return Route(self, frozenset(reads), (path,))

    def differentiate(
        self, op: Emitter, route: Route, cotangents: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None]]:
        """The cotangents by a SequenceMap over the cotangents and what the forward one stores."""
        [path] = route.paths
        swept = self.body.swept(op, path)
        sub = swept.op
        sub.mapped = True
        read: list[str] = []  # by the backward node
        inputs: list[tuple[str, TypeProto]] = []
        for outer, inner in self.outputs:
            if outer in cotangents and inner in path.needed:
                name = sub.fresh(f"{inner}_grad")
                swept.sweep.seed(inner, name)
                read.append(cotangents[outer])
                inputs.append((name, sub.values.adjoint_proto(inner)))
        swept.sweep.run()
        sub.enter(op.rule, op.node)
        needed = [(outer, inner) for outer, inner in self.inputs if inner in path.needed]
        needed += [(name, name) for name in self.body.captures if name in path.needed]
        results = []
        for _, inner in needed:
            if sub.is_sequence(inner):
                raise self._captured(inner)
            value = swept.result(swept.sweep.adjoint(inner) or sub.zeros_like(inner))
            results.append((value, sub.values.adjoint_proto(inner)))
        swept.plan(stacked=False, mapped=True)
        stored = self._stored(op, swept)
        read += stored.values()
        inputs += [(name, sub.values.adjoint_proto(name)) for name in stored]
        made = op.emit_all("SequenceMap", "", read, len(results), {"body": swept.backward(inputs, results)})
        for (name, _), value in zip(needed, made, strict=True):
            op.describe(value, like=name)
            yield name, value if op.is_sequence(name) else self._total(op, value, name)

    def _stored(self, op: Emitter, swept: Swept) -> dict[str, str]:
        """The sequences with the residuals of the elements; the node gets some of them as new outputs."""
        found = {inner: outer for outer, inner in (*self.outputs, *self.inputs) if outer}
        new = {name: op.fresh(f"{self.node.name}_{name}") for name in swept.residuals if name not in found}
        for name, outer in new.items():
            op.values.add(outer, sequence_type(swept.op.type(name)))
        edit = op.edits.of(self.node)
        edit.attributes["body"] = swept.forward(list(new))
        edit.outputs += new.values()
        return {name: (found | new)[name] for name in swept.residuals}

    def _total(self, op: Emitter, parts: str, like: str) -> str:
        """The sum of the cotangents that the elements give to a shared input; there may be no element."""
        stack = op.ConcatFromSequence(op.SequenceInsert(parts, op.zeros_like(like)), axis=0, new_axis=1)
        return op.ReduceSum(stack, [0], keepdims=0)

    def _captured(self, name: str) -> NoGradientError:
        node = self.node.name
        return NoGradientError(
            f"The body of SequenceMap {node!r} captures the sequence {name!r}, whose cotangent no element can return: give it "
            "to the node as an input, or choose other inputs or outputs: wrt=[...] or outputs=[...].",
            (node,),
        )
