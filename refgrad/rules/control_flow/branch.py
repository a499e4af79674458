"""The derivative of If."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.builder.nodes import NodeBuilder
from refgrad.builder.op import Emitter, nothing_like
from refgrad.builder.values import tensor_type
from refgrad.model.graph import Graph, Node
from refgrad.protos.types import Shape, element_type, unname
from refgrad.reverse.bodies import Body
from refgrad.reverse.path import ControlFlowRules, Path
from refgrad.rules.control_flow.iteration import name_outputs
from refgrad.tables.registry import ControlFlowRule, Route, VaryingValues, control_flow_rule

_RANK = 64  # more axes has no tensor


@control_flow_rule("If")
class If(ControlFlowRule):
    """dy through the branch that was taken; 0 for what the other one reads"""

    def __init__(self, graph: Graph, node: Node, branches: dict[str, Body]) -> None:
        self.graph, self.node, self.branches = graph, node, branches

    @classmethod
    def read(cls, control_flow: ControlFlowRules, node: Node) -> If:
        """Both branches."""
        names = "then_branch", "else_branch"
        return cls(control_flow.graph, node, {n: Body.read(control_flow, node.attributes[n], []) for n in names})

    def outputs_of(self, varying: VaryingValues) -> frozenset[str]:
        """The outputs that depend on a value that varies in one of the branches."""
        found: set[str] = set()
        for body in self.branches.values():
            path = body.path(varying, varying.names.intersection(body.captures), ())
            found.update(o for o, inner in zip(self.node.outputs, body.outputs, strict=False) if inner in path.varied)
        return frozenset(name for name in found if name and self.graph.is_float(name))

    def route(self, varying: VaryingValues, needed: Set[str]) -> Route:
        """The paths through both branches."""
        paths: list[Path] = []
        reads: set[str] = set()
        for body in self.branches.values():
            outputs = {inner for o, inner in zip(self.node.outputs, body.outputs, strict=False) if o in needed}
            path = body.path(varying, varying.names.intersection(body.captures), outputs)
            reads.update(name for name in body.captures if name in path.needed)
            paths.append(path)
        return Route(self, frozenset(reads), tuple(paths))

    def differentiate(
        self, op: Emitter, route: Route, cotangents: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None]]:
        """The cotangents of the captured values, from an If that takes the same branch."""
        both = list(zip(self.branches.values(), route.paths, strict=True))
        primals = list(dict.fromkeys(n for body, path in both for n in body.captures if n in path.needed))
        sweeps, results = [], []
        for body, path in both:
            swept = body.swept(op, path)
            for place, (outer, inner) in enumerate(zip(self.node.outputs, body.outputs, strict=False)):
                if outer in cotangents and inner in path.needed:
                    seed = cotangents[outer]
                    if self._may_differ(place, body, op.shape(seed)):  # it may be declared as the other branch has it
                        swept.op.enter(op.rule, op.node)
                        seed = swept.op.reshape_like(seed, inner)
                    swept.sweep.seed(inner, seed)
            swept.sweep.run()
            swept.op.enter(op.rule, op.node)
            adjoints = [swept.sweep.adjoint(name) if name in path.needed else None for name in primals]
            for name in primals:
                swept.op.values.copy(name, op.values)
            empty = self._empty_in(body)
            results.append(
                [
                    swept.result(a or (nothing_like(swept.op, n) if n == empty else swept.op.zeros_like(n)))
                    for n, a in zip(primals, adjoints, strict=True)
                ]
            )
            swept.plan(stacked=False, recompute=self.node.name in op.repeated)
            sweeps.append(swept)
        slots = [{name: op.fresh(f"{self.node.name}_{name}") for name in swept.residuals} for swept in sweeps]
        then, other = sweeps
        in_then, in_other = ([_nothing(s.op, name) for name in s.residuals] for s in sweeps)
        forward = {
            "then_branch": then.forward([*then.residuals, *in_other]),
            "else_branch": other.forward([*in_then, *other.residuals]),
        }
        for swept, slot in zip(sweeps, slots, strict=True):
            for name, outer in slot.items():
                shape = swept.op.shape(name)
                whole = swept.op.static(name) or (None if shape is None else (None,) * len(shape))
                op.values.add(outer, swept.op.values.containers.get(name) or swept.op.type(name), whole)
        name_outputs(op, self.node, len(self.node.attributes["then_branch"].output))
        edit = op.edits.of(self.node)
        edit.attributes |= forward
        edit.outputs += [name for slot in slots for name in slot.values()]
        kinds = [op.values.adjoint_proto(name) for name in primals]
        graphs = [
            swept.backward([], list(zip(values, kinds, strict=True)), rename=slot)
            for swept, values, slot in zip(sweeps, results, slots, strict=True)
        ]
        condition = self.node.inputs[0]
        known = op.constant(condition)
        if (
            known is not None
        ):  # the other is never run, and a runtime may find that its shapes do not fit those of this one
            graphs = [graphs[0 if known.all() else 1]] * 2
        branches = {"then_branch": graphs[0], "else_branch": graphs[1]}
        made = op.emit_all("If", "", [condition], len(primals), branches)
        for name, value in zip(primals, made, strict=True):
            op.describe(value, like=name)
            yield name, value

    def _may_differ(self, place: int, body: Body, seed: Shape | None) -> bool:
        """True if the cotangent of the output at `place` may have another declared shape than the result of the branch.

        The cotangent has the shape of the output, which is declared or inferred once for both branches.
        """
        if self.node.outputs[place] in self.graph.containers:
            return False
        own, *others = (one.graph.shapes.get(one.outputs[place]) for one in (body, *self.branches.values()))
        return own is None or any(_leaves_open(own, other) for other in others) or _contradict(own, seed)

    def _empty_in(self, body: Body) -> str | None:
        """The optional that is empty whenever the branch is taken, if the condition tests one."""
        asks, empty = self.graph.producer.get(self.node.inputs[0]), "else_branch"
        while asks is not None and asks.key == ("", "Not"):
            asks = self.graph.producer.get(asks.inputs[0])
            empty = "then_branch" if empty == "else_branch" else "else_branch"
        if asks is None or asks.key != ("", "OptionalHasElement") or body is not self.branches[empty]:
            return None
        return asks.inputs[0] if asks.inputs else None


def _contradict(one: Shape | None, other: Shape | None) -> bool:
    """True if no tensor has both shapes."""
    if one is None or other is None:
        return False
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or any(a != b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _leaves_open(own: Shape, other: Shape | None) -> bool:
    """True if `other` does not fix the rank and the known sizes of `own`."""
    if other is None or len(own) != len(other):
        return True
    return any(isinstance(a, int) and a != b for a, b in zip(own, other, strict=True))


def _nothing(op: Emitter, name: str) -> tuple[list[NodeProto], ValueInfoProto]:
    """A stand-in for `name` in the branch that lacks it. Nothing reads it; it has the same size if that is known."""
    shape, kind = op.shape(name), op.type(name)
    container = op.values.containers.get(name)
    if container is not None:
        return _empty(op, name, container)
    sizes = op.static(name)
    if sizes is None:
        sizes = (0,) * len(shape or ())  # a scalar where the rank is unknown: it may be a condition
    builder = NodeBuilder(op.emission.taken)
    made, measured = (op.fresh(f"{op.node}_{what}_{name}") for what in ("no", "shape_of"))
    value = ValueInfoProto(name=made, type=tensor_type(kind, sizes if shape is not None else None))
    if kind == TensorProto.INT64 and len(sizes) == 1 and 1 < sizes[0] <= _RANK:
        # They may be axes, which ONNX Runtime wants to differ where it infers the branch that is not taken.
        numbers = numpy_helper.from_array(np.arange(sizes[0]))
        builder.add_as("Constant", [], made, value=numbers)
        return builder.take(), value
    size = np.array(sizes, np.int64)
    nothing = helper.make_tensor("value", kind, [1], b"" if kind == TensorProto.STRING else np.zeros(1))
    builder.add_as("Constant", [], measured, value=numpy_helper.from_array(size))
    builder.add_as("ConstantOfShape", [measured], made, value=nothing)
    return builder.take(), value


def _empty(op: Emitter, name: str, kind: TypeProto) -> tuple[list[NodeProto], ValueInfoProto]:
    """An empty sequence or optional."""
    builder = NodeBuilder(op.emission.taken)
    made = op.fresh(f"{op.node}_no_{name}")
    value = ValueInfoProto(name=made, type=unname(kind))
    if kind.HasField("sequence_type"):
        builder.add_as("SequenceEmpty", [], made, dtype=element_type(kind))
    else:
        builder.add_as("Optional", [], made, type=unname(kind.optional_type.elem_type))
    return builder.take(), value
