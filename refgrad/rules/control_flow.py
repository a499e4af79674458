"""If, Loop and Scan: the adjoints of a body, step by step from the last to the first, or of the branch that was taken."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.errors import InvalidModelError
from refgrad.forward.graph import Graph, Node
from refgrad.protos.types import Dim, element_type, held_by, is_container, is_unnamed, type_of, unname
from refgrad.reverse.bodies import Body, Swept, formal
from refgrad.reverse.containers import nothing_like, sequence_type
from refgrad.reverse.emit import Emitter, tensor_type
from refgrad.reverse.path import Path
from refgrad.tables.registry import Passage, Structure, structure


@dataclass(frozen=True)
class _State:
    """A value that is carried from step to step: what it starts from, its names within, and where it ends."""

    start: str
    read: str
    made: str
    end: str


@dataclass(frozen=True)
class _Slices:
    """A value outside of which each step has a slice, read or made."""

    outer: str
    inner: str
    axis: int = 0
    backward: int = 0  # 1: the first step has the last slice


@dataclass
class _Steps:
    """What the backward node carries, reads and returns, but for the residuals."""

    starts: list[str] = field(default_factory=list)  # the states before the first step
    states: list[tuple[str, TypeProto]] = field(default_factory=list)  # the same within, each with its type
    slices: list[_Slices] = field(default_factory=list)  # what is read of the adjoints of stacks
    results: list[tuple[str, TypeProto]] = field(default_factory=list)  # of a step: the states, then the rows
    rows: list[_Slices] = field(default_factory=list)  # what the forward node reads whose adjoints are stacked


class _Iterated(Structure):
    """What Loop and Scan have in common: a body that runs once per step, and carries states."""

    _listing = False  # whether the states may be sequences
    _sliced: frozenset[str] = frozenset()  # what is captured and read in slices only

    def __init__(self, graph: Graph, node: Node, quantization: str) -> None:
        self.graph, self.node, self.quantization = graph, node, quantization
        self._moved: dict[str, str] = {}  # states whose shape changes, and how
        self.body = self._read(node.attributes["body"])
        self.states, self.elements, self.stacks = self._layout()

    def _layout(self) -> tuple[list[_State], list[_Slices], list[_Slices]]:
        """The states, the slices that are read, and those that are made."""
        raise NotImplementedError

    def _inputs(self, proto: GraphProto) -> list[ValueInfoProto]:
        """The formal inputs of the body before the first step."""
        raise NotImplementedError

    def _carried(self, proto: GraphProto) -> dict[int, int]:
        """The positions of the states among the formal inputs, and among the results, of the body."""
        raise NotImplementedError

    def _read(self, proto: GraphProto) -> Body:
        """The body, with the sizes of its states that stay the same from step to step."""
        inputs = self._inputs(proto)
        while True:
            body, again = Body(self.graph, proto, inputs, self.quantization), False
            for k, position in self._carried(proto).items():
                made = body.graph.type_of(body.outputs[position])
                joined = None if made is None else self._joined(inputs[k], made)
                if joined is not None:
                    inputs[k], again = joined, True
            if not again:
                return body

    def _joined(self, read: ValueInfoProto, made: TypeProto) -> ValueInfoProto | None:
        """What is known of a state before and after a step, None where that is no less than what was known before."""
        if is_container(made):
            return self._joined_elements(read, made)
        (kind, before), (result, after) = type_of(read), type_of(ValueInfoProto(type=made))
        if kind and result and kind != result:
            was, now = (helper.tensor_dtype_to_string(k).removeprefix("TensorProto.").lower() for k in (kind, result))
            raise InvalidModelError(
                f"{self.node.op_type} {self.node.name!r} changes the type of its state {read.name!r}, which is {was} before a "
                f"step and {now} after it. Cast one to the other."
            )
        if before is None or after is None:  # inference could not tell; it is taken to stay
            return None
        if len(before) != len(after):
            self._moved[read.name] = f"{len(before)} axes before a step and {len(after)} after it"
            return helper.make_tensor_value_info(read.name, kind, None)
        sizes = [_size(read.name, k, *pair) for k, pair in enumerate(zip(before, after, strict=True))]
        if sizes == list(before):
            return None
        for axis, pair in enumerate(zip(before, after, strict=True)):
            if sizes[axis] is None and pair[0] is not None:
                self._moved[read.name] = f"size {pair[0]} along axis {axis} before a step and {pair[1]} after it"
        return helper.make_tensor_value_info(read.name, kind, sizes)

    def _joined_elements(self, read: ValueInfoProto, made: TypeProto) -> ValueInfoProto | None:
        """What is known of the elements of a state before and after a step, None where that is no less than before."""
        elements = [type_of(ValueInfoProto(type=held_by(kind))) for kind in (read.type, made)]
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

    def outputs_of(self, varied: Set[str]) -> frozenset[str]:
        """The final states and stacks that depend on a value in `varied` after some step."""
        inner = self._varied(varied)
        path = self.body.path(inner, ())
        found = {s.end for s in self.states if s.read in inner}
        found.update(s.outer for s in self.stacks if s.inner in path.varied)
        return frozenset(name for name in found if name and self.graph.is_float(name))

    def _varied(self, varied: Set[str]) -> set[str]:
        """The inputs and the captures of the body that vary in some step."""
        inner = {s.read for s in self.states if s.start in varied}
        inner.update(e.inner for e in self.elements if e.outer in varied)
        inner.update(name for name in self.body.captures if name in varied and name not in self._sliced)
        while True:
            path = self.body.path(inner, ())
            more = {s.read for s in self.states if s.made in path.varied} - inner
            if not more:
                return inner
            inner |= more

    def passage(self, varied: Set[str], needed: Set[str]) -> Passage:
        """The way through the body, which any number of steps may go."""
        inner = self._varied(varied)
        outputs = {s.made for s in self.states if s.end in needed}
        outputs.update(s.inner for s in self.stacks if s.outer in needed)
        while True:
            path = self.body.path(inner, outputs)
            more = {s.made for s in self.states if s.read in path.needed} - outputs
            if not more:
                break
            outputs |= more
        active = self._active(path, needed)
        found = {s.start for s in active}
        found.update(e.outer for e in self.elements if e.inner in path.needed)
        found.update(name for name in self.body.captures if name in path.needed)
        moving = [f"its state {s.read!r} has {self._moved[s.read]}" for s in active if s.read in self._moved]
        return Passage(self, frozenset(found & varied), (path,), "; ".join(moving))

    def _active(self, path: Path, ends: Container[str]) -> list[_State]:
        """The states that have an adjoint: of a start too that no step reads, where no step is made it is the end."""
        return [s for s in self.states if s.end in ends or s.made in path.needed or s.read in path.needed]

    def differentiate(
        self, op: Emitter, passage: Passage, cotangents: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None]]:
        """The adjoints of the states, the slices and the captures, by a node that makes the steps backwards."""
        [path] = passage.paths
        active = self._active(path, cotangents)
        swept = self.body.swept(op, path)
        sub, sweep = swept.op, swept.sweep
        steps = _Steps()
        of: list[str] = []  # whose adjoints the states are in the end

        def carry(name: str, like: str, start: str) -> str:
            sub.describe(name, like)
            steps.starts.append(start)
            steps.states.append((name, sub.adjoint_proto(like)))
            return name

        def give(value: str, like: str) -> None:
            steps.results.append((swept.result(value), sub.adjoint_proto(like)))

        before = [
            carry(sub.fresh(f"{s.made}_grad"), s.made, cotangents.get(s.end) or self._zeros(op, s)) for s in active
        ]
        for state, name in zip(active, before, strict=True):
            if state.made in path.needed:
                sweep.seed(state.made, name)
        stacks = [s for s in self.stacks if s.outer in cotangents and s.inner in path.needed]
        steps.slices = self._slices(swept, stacks, cotangents)
        sweep.run()
        sub.enter(op.rule, op.node)
        for state, name in zip(active, before, strict=True):
            adjoint = sweep.adjoint(state.read) if state.read in path.needed else None
            alike = state.read if sub.is_sequence(state.read) else name  # a sequence may have got longer
            give(adjoint or sub.zeros_like(alike), state.read)
            of.append(state.start)
        for name in self.body.captures:
            adjoint = sweep.adjoint(name) if name in path.needed else None
            if adjoint is not None:
                total = carry(sub.fresh(f"{name}_grad_before"), name, op.zeros_like(name))
                give(sub.sum([total, adjoint], like=name), name)
                of.append(name)
        for element in self.elements:
            adjoint = sweep.adjoint(element.inner) if element.inner in path.needed else None
            if adjoint is not None:
                give(adjoint, element.inner)
                steps.rows.append(element)
        swept.plan(stacked=True, listed=self._listing, recompute=self.node.name in op.repeated)
        made = self._backward(op, swept, steps)
        adjoints = list(zip(of, made[: len(of)], strict=True))
        adjoints += [(e.outer, self._whole(op, v, e)) for v, e in zip(made[len(of) :], steps.rows, strict=True)]
        for name, value in adjoints:
            op.describe(value, like=name)
            yield name, value

    def _whole(self, op: Emitter, made: str, element: _Slices) -> str:
        """The adjoint of what the steps read slices of, from those of the slices."""
        if not _sized(op.shape(element.outer), element.axis):  # where no step is made, no slice shows its size
            made = op.Reshape(made, op.Shape(element.outer), allowzero=1)
        return made

    def _zeros(self, op: Emitter, state: _State) -> str:
        """Zeros like the state in the end."""
        kind = self.body.graph.containers.get(state.made)
        if kind is None:
            return op.zeros_like(state.start)
        position = self.states.index(state)
        if not state.end:
            self.node.add_output(position, op.fresh(f"{self.node.name}_{state.made}"))
            op.learn(self.node.outputs[position], kind)
        return op.zeros_like(self.node.outputs[position])

    def _slices(self, swept: Swept, stacks: list[_Slices], cotangents: Mapping[str, str]) -> list[_Slices]:
        """Seed the sweep with what each step has of the adjoints of `stacks`; what the backward body reads for that."""
        raise NotImplementedError

    def _backward(self, op: Emitter, swept: Swept, steps: _Steps) -> tuple[str, ...]:
        """Let the forward node store the residuals, and emit the node of the backward pass; its results."""
        raise NotImplementedError

    def _trips(self) -> Dim:
        """The number of steps, where it is known before the model runs."""
        raise NotImplementedError

    def _stored(
        self, op: Emitter, swept: Swept, more: Sequence[tuple[list[NodeProto], ValueInfoProto]] = ()
    ) -> dict[str, _Slices]:
        """Where the steps have their residuals: among what the node reads or returns, or in outputs that it gets.

        :param more: what the body returns besides, behind everything else.
        """
        found = {e.inner: e for e in self.elements}
        copied = {n.output[0]: n.input[0] for n in self.body.proto.node if n.op_type == "Identity" and not n.domain}
        for stack in self.stacks:
            if stack.outer:
                found.setdefault(stack.inner, stack)
                found.setdefault(copied.get(stack.inner, stack.inner), stack)
        new = [name for name in swept.residuals if name not in found]
        _name_all(op, self.node, len(self.states) + len(self.stacks))
        outer = [op.fresh(f"{self.node.name}_{name}") for name in new]
        found.update((name, _Slices(value, name)) for name, value in zip(new, outer, strict=True))
        for name, value in zip(new, outer, strict=True):
            shape = swept.op.shape(name)
            op.learn(value, swept.op.type(name), None if shape is None else (self._trips(), *shape))
        self.node.change({"body": swept.forward([*new, *more])}, [*self.node.outputs, *outer])
        return {name: found[name] for name in swept.residuals}


def _sized(shape: Sequence[Dim] | None, axis: int) -> bool:
    """Whether the sizes of the slices along an axis are known before the model runs."""
    return shape is not None and all(isinstance(dim, int) for k, dim in enumerate(shape) if k != axis)


def _size(name: str, axis: int, before: Dim, after: Dim) -> Dim:
    """What is known of a size of the state `name` before and after a step: None of two numbers, a symbol of what may differ.

    One that inference lost is taken to stay.
    """
    if before is None or before == after or is_unnamed(after):
        return before
    return None if isinstance(before, int) and isinstance(after, int) else f"size_{name}_{axis}"


def _name_all(op: Emitter, node: Node, count: int) -> None:
    """Name what the node leaves out of its first `count` outputs: what it gets stands behind them."""
    for position in range(count):
        if position >= len(node.outputs) or not node.outputs[position]:
            node.add_output(position, op.fresh(f"{node.name}_unused"))


@structure("Scan")
class Scan(_Iterated):
    """dy in reverse: each step takes the adjoints of its states and slices; what all steps read is summed from step to step"""

    def _elements(self) -> int:
        return int(self.node.attributes["num_scan_inputs"])

    def _setting(self, name: str, count: int) -> list[int]:
        return list(self.node.attributes.get(name) or [0] * count)

    def _inputs(self, proto: GraphProto) -> list[ValueInfoProto]:
        node, count = self.node, self._elements()
        first = len(node.inputs) - count
        axes, made = self._setting("scan_input_axes", count), []
        for k, (declared, name) in enumerate(zip(proto.input, node.inputs, strict=True)):
            kind = self.graph.type_of(name)
            made.append(formal(declared, kind if k < first or kind is None else _slice(kind, axes[k - first])))
        return made

    def _carried(self, proto: GraphProto) -> dict[int, int]:
        return {k: k for k in range(len(proto.input) - self._elements())}

    def _layout(self) -> tuple[list[_State], list[_Slices], list[_Slices]]:
        node, body, count = self.node, self.body, self._elements()
        body.steady = frozenset(body.inputs)  # as the specification of Scan has it
        first = len(node.inputs) - count
        states = [
            _State(*names) for names in zip(node.inputs[:first], body.inputs, body.outputs, node.outputs, strict=False)
        ]

        def slices(outer: list[str], inner: list[str], which: str) -> list[_Slices]:
            axes = self._setting(f"scan_{which}_axes", len(outer))
            ways = self._setting(f"scan_{which}_directions", len(outer))
            ranks = [len(self.graph.shapes.get(name, ())) for name in outer]
            for name, axis, rank in zip(outer, axes, ranks, strict=True):
                if name in self.graph.shapes and not -rank <= axis < rank:
                    raise InvalidModelError(
                        f"Scan {node.name!r} has {axis} in scan_{which}_axes, and {name!r} has {rank} axes: {-rank} to "
                        f"{rank - 1} are valid."
                    )
            axes = [axis + rank if axis < 0 else axis for axis, rank in zip(axes, ranks, strict=True)]
            return [_Slices(*one) for one in zip(outer, inner, axes, ways, strict=True)]

        elements = slices(node.inputs[first:], body.inputs[first:], "input")
        outer = [*node.outputs, *[""] * (len(body.outputs) - len(node.outputs))]
        return states, elements, slices(outer[first:], body.outputs[first:], "output")

    def _trips(self) -> Dim:
        for element in self.elements:
            shape = self.graph.shapes.get(element.outer)
            if shape is not None:
                return shape[element.axis]
        return None

    def _slices(self, swept: Swept, stacks: list[_Slices], cotangents: Mapping[str, str]) -> list[_Slices]:
        found = []
        for stack in stacks:
            name = swept.op.fresh(f"{stack.inner}_grad")
            swept.sweep.seed(stack.inner, name)
            found.append(_Slices(cotangents[stack.outer], name, stack.axis, stack.backward))
        return found

    def _backward(self, op: Emitter, swept: Swept, steps: _Steps) -> tuple[str, ...]:
        stored = self._stored(op, swept)
        stacks = len(self.node.outputs) - len(self.states)
        for name in ("scan_output_axes", "scan_output_directions"):
            for attribute in self.node.proto.attribute:
                if attribute.name == name:
                    attribute.ints.extend([0] * (stacks - len(attribute.ints)))
                    self.node.attributes[name] = list(attribute.ints)
        read = [*steps.slices, *(_Slices(s.outer, name, s.axis, s.backward) for name, s in stored.items())]
        read = read or self.elements[:1]  # how many steps there are
        sub = swept.op
        formals = [*steps.states, *((s.inner, sub.adjoint_proto(s.inner)) for s in read)]
        attributes = {
            "body": swept.backward(formals, steps.results),
            "num_scan_inputs": len(read),
            "scan_input_axes": [s.axis for s in read],
            "scan_input_directions": [1 - s.backward for s in read],
            "scan_output_axes": [e.axis for e in steps.rows] or None,
            "scan_output_directions": [1 - e.backward for e in steps.rows] or None,
        }
        return op.emit_all("Scan", "", [*steps.starts, *(s.outer for s in read)], len(steps.results), attributes)


def _slice(kind: TypeProto, axis: int) -> TypeProto:
    """The type of a slice along `axis`."""
    elements, shape = type_of(ValueInfoProto(type=kind))
    if shape is None:
        return kind
    axis %= len(shape)
    return helper.make_tensor_type_proto(elements, [*shape[:axis], *shape[axis + 1 :]])


@structure("Loop")
class Loop(_Iterated):
    """dy in reverse, as many steps as were made; what all steps read is summed from step to step"""

    _listing = True

    def _inputs(self, proto: GraphProto) -> list[ValueInfoProto]:
        scalars = [
            formal(declared, helper.make_tensor_type_proto(kind, type_of(declared)[1] or ()))
            for declared, kind in zip(proto.input, (TensorProto.INT64, TensorProto.BOOL), strict=False)
        ]
        states = zip(list(proto.input)[2:], self.node.inputs[2:], strict=True)
        return [*scalars, *(formal(declared, self.graph.type_of(name)) for declared, name in states)]

    def _carried(self, proto: GraphProto) -> dict[int, int]:
        return {k: k - 1 for k in range(2, len(proto.input))}

    def _layout(self) -> tuple[list[_State], list[_Slices], list[_Slices]]:
        node, body = self.node, self.body
        outer = [*node.outputs, *[""] * (len(body.outputs) - 1 - len(node.outputs))]
        count = len(node.inputs) - 2
        inner = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], outer, strict=False)
        stacks = zip(outer[count:], body.outputs[1 + count :], strict=True)
        elements = self._slices_read()
        self._sliced = frozenset(element.outer for element in elements)
        return [_State(*names) for names in inner], elements, [_Slices(*names) for names in stacks]

    def _slices_read(self) -> list[_Slices]:
        """What is captured and read only at the number of the step: the adjoint of a step is that of a slice, and no larger."""
        body, found = self.body.graph, []
        counter = self.body.inputs[0]
        for name in self.body.captures if body.shapes.get(counter) == () else ():
            shape, readers = self.graph.shapes.get(name), body.readers(name)
            if shape and all(node.key == ("", "Gather") and node.inputs == [name, counter] for node in readers):
                found += [_Slices(name, n.outputs[0], n.attributes.get("axis", 0) % len(shape)) for n in readers]
        return found

    def _whole(self, op: Emitter, made: str, element: _Slices) -> str:
        """The slices in the order of the steps, and zeros for those that no step reads."""
        shape, axis = self.graph.shapes[element.outer], element.axis
        rank, trips, sizes = len(shape), op.Reshape(self._made, [1]), op.Shape(element.outer)
        if not _sized(shape, axis):
            others = [k for k in range(rank) if k != axis]
            made = op.Reshape(
                made, op.Concat(trips, op.Gather(sizes, others), axis=0) if others else trips, allowzero=1
            )
        made = op.Slice(made, [-1], [np.iinfo(np.int64).min], [0], [-1])
        if axis:
            made = op.Transpose(made, perm=[*range(1, axis + 1), 0, *range(axis + 1, rank)])
        if isinstance(shape[axis], int) and shape[axis] == self._trips():
            return made
        left = op.Sub(op.Gather(sizes, [axis]), trips)
        pads = [[0] * (rank + axis), left, [0] * (rank - axis - 1)]
        return str(op.Pad(made, op.Concat(*(pad for pad in pads if pad), axis=0)))

    def _trips(self) -> Dim:
        count, condition = (self.graph.constant(name) if name else None for name in self.node.inputs[:2])
        started = not self.node.inputs[1] or (condition is not None and bool(condition.all()))
        goes = self.body.outputs[0]
        made = self.body.graph.producer.get(goes)
        known = self.body.graph.constant(goes)
        kept = made is not None and made.key == ("", "Identity") and made.inputs[0] == self.body.inputs[1]
        if count is None or not started or not (kept or (known is not None and bool(known.all()))):
            return None
        return int(count.item())

    def _slices(self, swept: Swept, stacks: list[_Slices], cotangents: Mapping[str, str]) -> list[_Slices]:
        self._step = swept.op.fresh(f"{swept.op.node}_step")
        for stack in stacks:
            swept.sweep.seed(stack.inner, swept.op.Gather(cotangents[stack.outer], self._step, axis=0))
        return []

    def _backward(self, op: Emitter, swept: Swept, steps: _Steps) -> tuple[str, ...]:
        counter = self.body.inputs[0]
        if counter not in swept.residuals:
            swept.residuals.append(counter)
        listed = [name for name in swept.residuals if not self.body.is_stackable(name)]
        swept.residuals = [name for name in swept.residuals if name not in listed]
        stored, lists = self._listed(op, swept, listed)
        self._made = trips = op.Size(stored[counter].outer)
        sub = swept.op
        left, going, goes = (sub.fresh(f"{op.node}_{name}") for name in ("left", "going", "goes"))
        first = [
            helper.make_node("Sub", [op.Sub(trips, 1), left], [self._step], name=self._step),
            helper.make_node("Identity", [going], [goes], name=goes),
        ]
        first += [
            helper.make_node("Gather", [s.outer, self._step], [name], name=f"{self._step}_{name}", axis=s.axis)
            for name, s in stored.items()
        ]
        first += [
            helper.make_node("SequenceAt", [outer, self._step], [name], name=f"{self._step}_{name}")
            for name, outer in lists.items()
        ]
        formals = [
            (left, helper.make_tensor_type_proto(TensorProto.INT64, [])),
            (going, helper.make_tensor_type_proto(TensorProto.BOOL, [])),
            *steps.states,
        ]
        body = swept.backward(formals, [(goes, formals[1][1]), *steps.results], first)
        always = None if steps.starts else op.const(np.array(True))  # the last input of a node is not left out
        return op.emit_all("Loop", "", [trips, always, *steps.starts], len(steps.results), {"body": body})

    def _listed(self, op: Emitter, swept: Swept, names: list[str]) -> tuple[dict[str, _Slices], dict[str, str]]:
        """Where the steps have their residuals, and the sequences of what `names` are in every step: a state more for each."""
        kinds = [sequence_type(swept.op.type(name)) for name in names]
        states = []
        for name, kind in zip(names, kinds, strict=True):
            state = _State(
                *(op.fresh(f"{self.node.name}_{name}_{what}") for what in ("none", "before", "after", "all"))
            )
            dtype = swept.op.type(name)
            empty = helper.make_node("SequenceEmpty", [], [state.start], name=state.start, dtype=dtype)
            self.graph.insert(empty, before=self.node)
            self.node.add_input(state.start)
            op.learn(state.start, kind)
            op.learn(state.end, kind)
            states.append(state)
        longer = [
            (
                [helper.make_node("SequenceInsert", [s.read, name], [s.made], name=s.made)],
                helper.make_value_info(s.made, kind),
            )
            for s, name, kind in zip(states, names, kinds, strict=True)
        ]
        stored = self._stored(op, swept, longer)
        body = self.node.attributes["body"]
        body.input.extend(helper.make_value_info(s.read, kind) for s, kind in zip(states, kinds, strict=True))
        results = list(body.output)
        place, rest = 1 + len(self.states), len(results) - len(states)
        del body.output[:]
        body.output.extend([*results[:place], *results[rest:], *results[place:rest]])
        outputs = self.node.outputs
        self.node.change({}, [*outputs[: place - 1], *(s.end for s in states), *outputs[place - 1 :]])
        return stored, {name: s.end for name, s in zip(names, states, strict=True)}


@structure("If")
class If(Structure):
    """dy through the branch that was taken; 0 for what the other one reads"""

    def __init__(self, graph: Graph, node: Node, quantization: str) -> None:
        self.graph, self.node = graph, node
        names = "then_branch", "else_branch"
        self.branches = {name: Body(graph, node.attributes[name], [], quantization) for name in names}

    def outputs_of(self, varied: Set[str]) -> frozenset[str]:
        """The outputs that depend on a value in `varied` in one of the branches."""
        found: set[str] = set()
        for body in self.branches.values():
            path = body.path(varied & set(body.captures), ())
            found.update(o for o, inner in zip(self.node.outputs, body.outputs, strict=False) if inner in path.varied)
        return frozenset(name for name in found if name and self.graph.is_float(name))

    def passage(self, varied: Set[str], needed: Set[str]) -> Passage:
        """The ways through both branches."""
        paths: list[Path] = []
        reads: set[str] = set()
        for body in self.branches.values():
            outputs = {inner for o, inner in zip(self.node.outputs, body.outputs, strict=False) if o in needed}
            path = body.path(varied & set(body.captures), outputs)
            reads.update(name for name in body.captures if name in path.needed)
            paths.append(path)
        return Passage(self, frozenset(reads), tuple(paths))

    def differentiate(
        self, op: Emitter, passage: Passage, cotangents: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None]]:
        """The adjoints of what both branches capture, by a node that takes the same branch."""
        both = list(zip(self.branches.values(), passage.paths, strict=True))
        primals = list(dict.fromkeys(n for body, path in both for n in body.captures if n in path.needed))
        sweeps, results = [], []
        for body, path in both:
            swept = body.swept(op, path)
            for outer, inner in zip(self.node.outputs, body.outputs, strict=False):
                if outer in cotangents and inner in path.needed:
                    swept.sweep.seed(inner, cotangents[outer])
            swept.sweep.run()
            swept.op.enter(op.rule, op.node)
            adjoints = [swept.sweep.adjoint(name) if name in path.needed else None for name in primals]
            for name in primals:
                swept.op.know(name, op)
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
                op.learn(outer, swept.op.container(name) or swept.op.type(name), whole)
        _name_all(op, self.node, len(self.node.attributes["then_branch"].output))
        self.node.change(forward, [*self.node.outputs, *(name for slot in slots for name in slot.values())])
        kinds = [op.adjoint_proto(name) for name in primals]
        graphs = [
            swept.backward([], list(zip(values, kinds, strict=True)), rename=slot)
            for swept, values, slot in zip(sweeps, results, slots, strict=True)
        ]
        condition = self.node.inputs[0]
        branches = {"then_branch": graphs[0], "else_branch": graphs[1]}
        made = op.emit_all("If", "", [condition], len(primals), branches)
        for name, value in zip(primals, made, strict=True):
            op.describe(value, like=name)
            yield name, value

    def _empty_in(self, body: Body) -> str | None:
        """The optional that is empty where the branch is taken, if the condition asks for that."""
        asks, empty = self.graph.producer.get(self.node.inputs[0]), "else_branch"
        while asks is not None and asks.key == ("", "Not"):
            asks = self.graph.producer.get(asks.inputs[0])
            empty = "then_branch" if empty == "else_branch" else "else_branch"
        if asks is None or asks.key != ("", "OptionalHasElement") or body is not self.branches[empty]:
            return None
        return asks.inputs[0] if asks.inputs else None


def _nothing(op: Emitter, name: str) -> tuple[list[NodeProto], ValueInfoProto]:
    """What a branch returns where the other one returns `name`, and nobody reads it: as large if that is known."""
    shape, kind = op.shape(name), op.type(name)
    container = op.container(name)
    if container is not None:
        return _empty(op, name, container)
    sizes = op.static(name)
    if sizes is None:
        sizes = (0,) * len(shape or ())  # a scalar where the rank is unknown: it may be a condition
    made, measured = (op.fresh(f"{op.node}_{what}_{name}") for what in ("no", "shape_of"))
    value = ValueInfoProto(name=made, type=tensor_type(kind, sizes if shape is not None else None))
    size = np.array(sizes, np.int64)
    nothing = helper.make_tensor("value", kind, [1], b"" if kind == TensorProto.STRING else np.zeros(1))
    return [
        helper.make_node("Constant", [], [measured], name=measured, value=numpy_helper.from_array(size)),
        helper.make_node("ConstantOfShape", [measured], [made], name=made, value=nothing),
    ], value


def _empty(op: Emitter, name: str, kind: TypeProto) -> tuple[list[NodeProto], ValueInfoProto]:
    """A sequence, or an optional, without an element."""
    made = op.fresh(f"{op.node}_no_{name}")
    value = ValueInfoProto(name=made, type=unname(kind))
    if kind.HasField("sequence_type"):
        node = helper.make_node("SequenceEmpty", [], [made], name=made, dtype=element_type(kind))
    else:
        node = helper.make_node("Optional", [], [made], name=made, type=unname(kind.optional_type.elem_type))
    return [node], value
