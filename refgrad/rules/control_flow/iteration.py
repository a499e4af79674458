"""The common part of Loop and Scan: a body that runs once per step, and carries states."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from onnx import GraphProto, NodeProto, TypeProto, ValueInfoProto, helper

from refgrad.builder.op import Emitter
from refgrad.builder.values import tensor_type
from refgrad.errors import InvalidModelError
from refgrad.model.graph import Graph, Node
from refgrad.protos.types import SIZE_OF, Dim, held_by, is_container, is_unnamed, type_of
from refgrad.reverse.bodies import Body, Swept
from refgrad.reverse.path import ControlFlowRules, Path
from refgrad.rules.control_flow.contraction import Contractions
from refgrad.tables.registry import ControlFlowRule, Route, VaryingValues


@dataclass(frozen=True)
class State:
    """A value carried from step to step: its names outside, at the start and the end, and inside, before and after a step."""

    start: str
    read: str
    made: str
    end: str


@dataclass(frozen=True)
class Slices:
    """An outer tensor of which each step reads or writes one slice, and the name of the slice within."""

    outer: str
    inner: str
    axis: int = 0
    backward: int = 0  # 1: the first step has the last slice


@dataclass(frozen=True)
class StateLayout:
    """The states of an iteration, the slices that a step reads, and those that it writes.

    `sliced` are captured outer values of which the body reads only slices.
    """

    states: list[State]
    elements: list[Slices]
    stacks: list[Slices]
    sliced: frozenset[str] = frozenset()


@dataclass
class Steps:
    """The values that the backward node carries, reads and returns, without the residuals."""

    starts: list[str] = field(default_factory=list)  # the states before the first step
    states: list[tuple[str, TypeProto]] = field(default_factory=list)  # the states inside the body, with their types
    slices: list[Slices] = field(default_factory=list)  # slices of the cotangents of stacks that Scan reads
    number: str = ""  # of the step, with which Loop reads them
    results: list[tuple[str, TypeProto]] = field(default_factory=list)  # of a step: the states, then the rows
    rows: list[Slices] = field(default_factory=list)  # slices of the forward node whose cotangents are stacked
    factors: list[str] = field(
        default_factory=list
    )  # values of the forward steps that are read after the backward node
    stored: dict[str, Slices] = field(default_factory=dict)  # the tensors with the values of the forward steps


class Iteration(ControlFlowRule):
    """A node whose body runs once per step."""

    listing = False  # whether the states may be sequences
    returns_last_step_first = False  # the order of the stacks that the backward node returns
    ranked = False  # whether ONNX Runtime has to know the rank of every state

    def __init__(self, graph: Graph, node: Node, body: Body, layout: StateLayout, moved: Mapping[str, str]) -> None:
        self.graph, self.node, self.body = graph, node, body
        self.states, self.elements, self.stacks = layout.states, layout.elements, layout.stacks
        self._sliced = layout.sliced
        self._moved = moved  # states whose shape changes, and how

    @classmethod
    def read(cls, control_flow: ControlFlowRules, node: Node) -> Self:
        """The iteration of a node. A state keeps the sizes that are the same in all steps."""
        graph, proto = control_flow.graph, node.attributes["body"]
        moved: dict[str, str] = {}
        inputs = cls.inputs_of(graph, node, proto)
        while True:
            body, again = Body.read(control_flow, proto, inputs, cls.steady(proto)), False
            for k, position in cls.carried(node, proto).items():
                type_after = body.graph.type_of(body.outputs[position])
                joined = None if type_after is None else _joined(node, inputs[k], type_after, moved)
                if joined is not None:
                    inputs[k], again = joined, True
            if not again:
                return cls(graph, node, body, cls.layout(graph, node, body), moved)

    @classmethod
    def layout(cls, graph: Graph, node: Node, body: Body) -> StateLayout:
        """The states, the slices that are read, and those that are made."""
        raise NotImplementedError

    @classmethod
    def inputs_of(cls, graph: Graph, node: Node, proto: GraphProto) -> list[ValueInfoProto]:
        """The formal inputs of the body before the first step."""
        raise NotImplementedError

    @classmethod
    def carried(cls, node: Node, proto: GraphProto) -> dict[int, int]:
        """For every state, its position among the formal inputs of the body and among its results."""
        raise NotImplementedError

    @classmethod
    def steady(cls, proto: GraphProto) -> list[str]:
        """The formal inputs whose shape the specification keeps the same in all steps."""
        return []

    def outputs_of(self, varying: VaryingValues) -> frozenset[str]:
        """The final states and stacks that depend, after some number of steps, on a value that varies."""
        inner = self._varied(varying)
        path = self.body.path(varying, inner, ())
        names = {s.end for s in self.states if s.read in inner}
        names.update(s.outer for s in self.stacks if s.inner in path.varied)
        return frozenset(name for name in names if name and self.graph.is_float(name))

    def _varied(self, varying: VaryingValues) -> set[str]:
        """The inputs and the captures of the body that vary in some step."""
        inner = {s.read for s in self.states if s.start in varying.names}
        inner.update(e.inner for e in self.elements if e.outer in varying.names)
        inner.update(name for name in self.body.captures if name in varying.names and name not in self._sliced)
        while True:
            path = self.body.path(varying, inner, ())
            more = {s.read for s in self.states if s.made in path.varied} - inner
            if not more:
                return inner
            inner |= more

    def route(self, varying: VaryingValues, needed: Set[str]) -> Route:
        """The path through the body, for any number of steps."""
        inner = self._varied(varying)
        outputs = {s.made for s in self.states if s.end in needed}
        outputs.update(s.inner for s in self.stacks if s.outer in needed)
        while True:
            path = self.body.path(varying, inner, outputs)
            more = {s.made for s in self.states if s.read in path.needed} - outputs
            if not more:
                break
            outputs |= more
        active = self._active(path, needed)
        names = {s.start for s in active}
        names.update(e.outer for e in self.elements if e.inner in path.needed)
        names.update(name for name in self.body.captures if name in path.needed)
        moving = [f"its state {s.read!r} has {self._moved[s.read]}" for s in active if s.read in self._moved]
        return Route(self, frozenset(names & varying.names), (path,), "; ".join(moving))

    def _active(self, path: Path, ends: Container[str]) -> list[State]:
        """The states that have a cotangent. One that no step reads has it too: without steps, its start is its end."""
        return [s for s in self.states if s.end in ends or s.made in path.needed or s.read in path.needed]

    def differentiate(
        self, op: Emitter, route: Route, cotangents: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None]]:
        """The cotangents of the states, the slices and the captures, from a node that runs the steps backwards."""
        [path] = route.paths
        active = self._active(path, cotangents)
        swept = self.body.swept(op, path)
        sub, sweep = swept.op, swept.sweep
        steps = Steps()
        after = Contractions(op, swept, {} if self.node.name in op.repeated else self._invariants())
        of: list[str] = []  # the values whose cotangents the final states are
        folded: dict[
            tuple[str, str], int
        ] = {}  # the slices that are stacked flat, since their rank is not known: their axis
        flat: set[int] = set()  # the places of those that are carried along one axis, since their rank is not known

        def carry(name: str, like: str, start: str) -> str:
            sub.describe(name, like)
            steps.starts.append(start)
            steps.states.append((name, sub.values.adjoint_proto(like)))
            return name

        def give(value: str, like: str) -> None:
            steps.results.append((swept.result(value), sub.values.adjoint_proto(like)))

        before = [
            carry(sub.fresh(f"{s.made}_grad"), s.made, cotangents.get(s.end) or self._zeros(op, s)) for s in active
        ]
        for state, name in zip(active, before, strict=True):
            if state.made in path.needed:
                sweep.seed(state.made, name)
        stacks = [s for s in self.stacks if s.outer in cotangents and s.inner in path.needed]
        self.seed(swept, stacks, cotangents, steps)
        sweep.run()
        sub.enter(op.rule, op.node)
        for state, name in zip(active, before, strict=True):
            adjoint = sweep.adjoint(state.read) if state.read in path.needed else None
            alike = state.read if sub.is_sequence(state.read) else name  # a sequence may have grown
            give(adjoint or sub.zeros_like(alike), state.read)
            of.append(state.start)
        for name in self.body.captures:
            adjoint = sweep.adjoint(name) if name in path.needed else None
            if adjoint is None:
                continue
            of.append(name)
            total = sub.fresh(f"{name}_grad_before")
            if self.ranked and op.shape(name) is None and not op.is_sequence(name):
                flat.add(len(of) - 1)
                kind = op.values.adjoint_type(name)
                row = tensor_type(kind, (None,))
                steps.starts.append(op.full(op.Reshape(op.Size(name), [1]), 0.0, like=name))
                steps.states.append((sub.values.record(total, kind, (None,)), row))
                steps.results.append((swept.result(sub.Add(total, sub.Reshape(adjoint, [-1]))), row))
                continue
            carry(total, name, op.zeros_like(name))
            give(sub.sum([total, adjoint], like=name), name)
        for element in self.elements:
            adjoint = sweep.adjoint(element.inner) if element.inner in path.needed else None
            if adjoint is None:
                continue
            if self.ranked and sub.shape(element.inner) is None:
                row = tensor_type(op.values.adjoint_type(element.outer), (None,))
                steps.results.append((swept.result(sub.Reshape(adjoint, [-1])), row))
                steps.rows.append(replace(element, axis=0))
                folded[element.outer, element.inner] = element.axis
                continue
            give(adjoint, element.inner)
            steps.rows.append(element)
        for name in after.rows:
            give(sweep.adjoint(name) or sub.zeros_like(name), name)
            steps.rows.append(Slices("", name))
        steps.factors = after.factors
        swept.plan(stacked=True, listed=self.listing, recompute=self.node.name in op.repeated)
        results, count = self.backward(op, swept, steps)
        summed = [
            op.Reshape(v, op.Shape(of[k]), allowzero=1) if k in flat else v for k, v in enumerate(results[: len(of)])
        ]
        adjoints = list(zip(of, summed, strict=True))
        cotangents_of: dict[str, str] = {}
        for value, element in zip(results[len(of) :], steps.rows, strict=True):
            if not element.outer:
                returned = Slices(value, element.inner, backward=int(self.returns_last_step_first))
                cotangents_of[element.inner] = self._in_order(op, swept, returned, count)
                continue
            axis = folded.get((element.outer, element.inner), 0)
            rows = _unfolded(op, value, element.outer, axis) if axis else value
            adjoints.append((element.outer, self.whole(op, rows, element, count)))
        values_of = {name: self._in_order(op, swept, steps.stored[name], count) for name in after.factors}
        adjoints += after.contributions(op, cotangents_of, values_of)
        for name, value in adjoints:
            op.describe(value, like=name)
            yield name, value

    def _invariants(self) -> dict[str, str]:
        """The values that the body reads and that are the same in every step, with their names outside: captures and states."""
        invariants = {name: name for name in self.body.captures}
        for state in self.states:
            made: str | None = state.made
            while made != state.read and (node := self.body.graph.producer.get(made or "")) is not None:
                made = node.inputs[0] if node.key == ("", "Identity") else None
            if made == state.read:
                invariants[state.read] = state.start
        return invariants

    def _in_order(self, op: Emitter, swept: Swept, slices: Slices, count: str) -> str:
        """The stack of the slices of all steps: the first axis counts the steps, from the first to the last."""
        stack, axis = slices.outer, slices.axis
        if count and any(element.outer == stack for element in self.elements):  # it may be longer than the loop
            stack = op.Slice(stack, [0], op.Reshape(count, [1]), [axis])
        if slices.backward:
            stack = op.Slice(stack, [-1], [np.iinfo(np.int64).min], [axis], [-1])
        inner = swept.op.shape(slices.inner) or ()
        if axis:
            stack = op.Transpose(stack, perm=[axis, *(k for k in range(len(inner) + 1) if k != axis)])
        if stack == slices.outer:
            if op.shape(stack) is not None:
                return stack
            stack = op.Identity(stack)
        sizes = (dim if isinstance(dim, int) else None for dim in inner)  # the names of others hold in the body alone
        return op.values.record(stack, swept.op.type(slices.inner), (None, *sizes))

    def whole(self, op: Emitter, stacked: str, element: Slices, count: str) -> str:
        """The cotangent of the sliced tensor, from the cotangents of the slices; `count` is the number of steps."""
        if not is_sized(op.shape(element.outer), element.axis):  # without steps, no slice shows its size
            stacked = op.Reshape(stacked, op.Shape(element.outer), allowzero=1)
        return stacked

    def _zeros(self, op: Emitter, state: State) -> str:
        """Zeros like the final state."""
        container, shape = self.body.graph.containers.get(state.made), None
        if container is None:
            before, after = (self.body.graph.shapes.get(name) for name in (state.read, state.made))
            if before is not None and before == after and not any(map(is_unnamed, before)):
                return op.zeros_like(state.start)
            shape = None if before is None else (None,) * len(before)
        end = state.end
        if not end:
            end = op.values.add(op.fresh(f"{self.node.name}_{state.made}"), container or op.type(state.start), shape)
            op.edits.name_output(self.node, self.states.index(state), end)
        return op.zeros_like(end)

    def seed(self, swept: Swept, stacks: list[Slices], cotangents: Mapping[str, str], steps: Steps) -> None:
        """Seed the sweep with a step's slices of the cotangents of `stacks`; note in `steps` what a step reads for that."""
        raise NotImplementedError

    def backward(self, op: Emitter, swept: Swept, steps: Steps) -> tuple[tuple[str, ...], str]:
        """Let the forward node store the residuals, and emit the backward node. Return its results and the number of steps.

        The number is "" where `whole` does not need it.
        """
        raise NotImplementedError

    def trips(self) -> Dim:
        """The number of steps, where it is known before the model runs."""
        raise NotImplementedError

    def stored(
        self,
        op: Emitter,
        swept: Swept,
        residuals: Sequence[str],
        more: Sequence[tuple[list[NodeProto], ValueInfoProto]] = (),
    ) -> dict[str, Slices]:
        """The tensors with the residuals of the steps: tensors that the node reads or returns, or new outputs.

        :param more: further results of the body, after all others, with the nodes that make them.
        """
        slices = {e.inner: e for e in self.elements}
        copied = {n.output[0]: n.input[0] for n in self.body.proto.node if n.op_type == "Identity" and not n.domain}
        for stack in self.stacks:
            if stack.outer:
                slices.setdefault(stack.inner, stack)
                slices.setdefault(copied.get(stack.inner, stack.inner), stack)
        new = [name for name in residuals if name not in slices]
        name_outputs(op, self.node, len(self.states) + len(self.stacks))
        outer = [op.fresh(f"{self.node.name}_{name}") for name in new]
        slices.update((name, Slices(value, name)) for name, value in zip(new, outer, strict=True))
        for name, value in zip(new, outer, strict=True):
            shape = swept.op.shape(name)
            op.values.add(value, swept.op.type(name), None if shape is None else (self.trips(), *shape))
        edit = op.edits.of(self.node)
        edit.attributes["body"] = swept.forward([*new, *more])
        edit.outputs += outer
        return {name: slices[name] for name in residuals}


def _unfolded(op: Emitter, rows: str, like: str, axis: int) -> str:
    """The elements of slices along `axis`, each slice one of `rows`, in the order in which `like` has them."""
    before = op.ReduceProd(op.Shape(like, end=axis), keepdims=1)
    after = op.const([1]) if axis == -1 else op.ReduceProd(op.Shape(like, start=axis + 1), keepdims=1)
    parts = op.Reshape(rows, op.Concat(op.Shape(rows, end=1), before, after, axis=0), allowzero=1)
    return op.Transpose(parts, perm=[1, 0, 2])


def _joined(node: Node, read: ValueInfoProto, computed: TypeProto, moved: dict[str, str]) -> ValueInfoProto | None:
    """The type that a state has both before and after a step; None where that is the type before.

    `moved` gets the states whose shape changes.
    """
    if is_container(computed):
        return _joined_elements(read, computed)
    (kind, before), (result, after) = type_of(read), type_of(ValueInfoProto(type=computed))
    if kind and result and kind != result:
        was, now = (helper.tensor_dtype_to_string(k).removeprefix("TensorProto.").lower() for k in (kind, result))
        raise InvalidModelError(
            f"{node.op_type} {node.name!r} changes the type of its state {read.name!r}, which is {was} before a "
            f"step and {now} after it. Cast one to the other."
        )
    if (
        before is None and after is not None and node.op_type == "Scan" and read.name not in moved
    ):  # it may not change it
        return helper.make_tensor_value_info(read.name, kind, [d if isinstance(d, int) else None for d in after])
    if before is None or after is None:  # inference could not tell: it is assumed to stay
        return None
    if len(before) != len(after):
        moved[read.name] = f"{len(before)} axes before a step and {len(after)} after it"
        return helper.make_tensor_value_info(read.name, kind, None)
    sizes = [_size(read.name, k, *pair) for k, pair in enumerate(zip(before, after, strict=True))]
    if sizes == list(before):
        return None
    for axis, pair in enumerate(zip(before, after, strict=True)):
        if sizes[axis] is None and pair[0] is not None:
            moved[read.name] = f"size {pair[0]} along axis {axis} before a step and {pair[1]} after it"
    return helper.make_tensor_value_info(read.name, kind, sizes)


def _joined_elements(read: ValueInfoProto, computed: TypeProto) -> ValueInfoProto | None:
    """The same for a sequence or an optional, whose elements may change their shape."""
    elements = [type_of(ValueInfoProto(type=held_by(kind))) for kind in (read.type, computed)]
    (kind, before), (_, after) = elements
    if before is None or before == after:
        return None
    shape = None
    if after is not None and len(before) == len(after):
        shape = [a if a == b else None for a, b in zip(before, after, strict=True)]
        if shape == list(before):
            return None
    joined = ValueInfoProto()
    joined.CopyFrom(read)
    held_by(joined.type).CopyFrom(helper.make_tensor_type_proto(kind, shape))
    return joined


def is_sized(shape: Sequence[Dim] | None, axis: int) -> bool:
    """True if the sizes of the slices along an axis are known before the model runs."""
    return shape is not None and all(isinstance(dim, int) for k, dim in enumerate(shape) if k != axis)


def _size(name: str, axis: int, before: Dim, after: Dim) -> Dim:
    """The size that the state `name` has before and after a step: None for two numbers, a symbol where they may differ.

    A size that inference lost is assumed to stay.
    """
    if before is None or before == after or is_unnamed(after):
        return before
    return None if isinstance(before, int) and isinstance(after, int) else f"{SIZE_OF}{name}_{axis}"


def name_outputs(op: Emitter, node: Node, count: int) -> None:
    """Give names to the outputs that the node leaves out among its first `count`, so that new ones can follow them."""
    outputs = op.edits.of(node).outputs
    for position in range(count):
        if position >= len(outputs) or not outputs[position]:
            op.edits.name_output(node, position, op.fresh(f"{node.name}_unused"))
