"""Gradient checkpointing: forward nodes that the backward pass computes again, so that their values are not kept.

The nodes come in segments. What a segment gives to nodes outside of it is kept, and all else in it is computed again when
its backward part begins (Griewank 1992; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

A runtime may merge a copy with its original, or run it as early as its inputs are there: either way the values would live as
long as before. So the copies read values that are tied to what the backward pass has computed until then:

    ready = Concat(Cast(Slice(Reshape(cotangent, [-1]), 0, 0)), ...)      no elements, int64
    tied  = Unsqueeze(value, ready)                                     no axis is added

The tie moves no data, is exact whatever the values are, and no derivative passes through `ready`. A Reshape to Shape(value) and
`ready` would do as well, but ONNX Runtime joins it with a Reshape behind it. The tie waits for everything
that the backward part of the segment before left behind, the gradients of weights too: the copies of one segment are dead
before the copies of the next are made, in whatever order a runtime takes the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any

from onnx import NodeProto, TensorProto, ValueInfoProto

from refgrad import traits
from refgrad.builder.nodes import EmittedNode, Entries, NodeBuilder
from refgrad.builder.op import Emitter
from refgrad.errors import UnknownNameError, choices, did_you_mean
from refgrad.model.graph import Graph, Node, needed_nodes
from refgrad.protos.types import nbytes
from refgrad.reverse.bodies import is_random, rename_reads
from refgrad.reverse.path import Path

Segments = Sequence[frozenset[str]]  # the names of the nodes in each

_BODIES = frozenset((("", "If"), ("", "Loop"), ("", "Scan")))


def segments(graph: Graph, recompute: bool | Sequence[str]) -> list[frozenset[str]]:
    """The names of the nodes that are to be computed again, a set per segment; no node is in two.

    :raises UnknownNameError: a name or pattern that no node has.
    """
    if isinstance(recompute, bool):
        return cut(graph) if recompute else []
    names = [node.name for node in graph.nodes]
    taken: set[str] = set()
    found = []
    for entry in recompute:
        matched = {entry} & set(names) or {name for name in names if fnmatchcase(name, entry)}
        if not matched:
            raise UnknownNameError(
                f"recompute={[entry]!r} matches no node.{did_you_mean(entry, names)} The nodes are {choices(names)}."
            )
        found.append(frozenset(matched - taken))
        taken |= matched
    return found


def with_bodies(path: Path, chosen: Iterable[frozenset[str]]) -> frozenset[str]:
    """The chosen nodes that are not repeated themselves: their bodies are, step by step, from the states that are kept."""
    names = {node.name for node in path.active if node.key in _BODIES}
    return frozenset(name for segment in chosen for name in segment & names)


def cut(graph: Graph, scale: float = 1.0) -> list[frozenset[str]]:
    """Segments of about `scale`·√n nodes. Each ends where the fewest bytes cross, up to half of that earlier or later."""
    fixed = _fixed(graph, graph.nodes)
    nodes = [node for node in graph.nodes if not fixed.issuperset(node.outputs)]
    maker = {name: position for position, node in enumerate(nodes) for name in node.outputs if name}
    last = {name: position for position, node in enumerate(nodes) for name in node.reads if name in maker}
    change = [0] * (len(nodes) + 1)
    for name, position in last.items():
        change[maker[name] + 1] += _nbytes(graph, name)
        change[position + 1] -= _nbytes(graph, name)
    crossing = list(accumulate(change))
    size = max(round(scale * math.sqrt(len(nodes))), 1)
    cuts = [0]
    while len(nodes) - cuts[-1] > size + size // 2:
        due = cuts[-1] + size
        around = range(due - size // 2, due + size // 2 + 1)
        cuts.append(min(around, key=lambda place: (crossing[place], abs(place - due))))
    return [frozenset(node.name for node in nodes[a:b]) for a, b in pairwise([*cuts, len(nodes)])]


def _nbytes(graph: Graph, name: str) -> int:
    return nbytes(graph.types.get(name, TensorProto.FLOAT), graph.shapes.get(name))


def _fixed(graph: Graph, nodes: Sequence[Node]) -> set[str]:
    """The values that depend on initializers alone, and the missing input."""
    fixed = {"", *graph.initializers}.difference(graph.inputs)
    for node in nodes:
        if fixed.issuperset(node.reads) and not is_random(node.proto):
            fixed.update(node.outputs)
    return fixed


class Repetition:
    """The copies of forward nodes in a backward pass.

    `names` has what the copy of a value is called. `live`, the values that are read, is brought up to date: what is computed
    again is no longer read, and what the copies read is. `results` are those that the model returns.
    """

    def __init__(
        self,
        forward: Sequence[Node],
        op: Emitter,
        chosen: Sequence[frozenset[str]],
        backward: Sequence[EmittedNode],
        live: set[str],
        results: Iterable[str],
        rename: Mapping[str, str],
        space: Callable[[str], Entries],
    ) -> None:
        self._space = space
        self.names: dict[str, str] = {}
        self.types: list[ValueInfoProto] = []
        self._before: dict[int, list[NodeProto]] = {}
        if not chosen:
            return
        self._nodes, self._op, self._backward, self._live, self._rename = forward, op, backward, live, rename
        self._builder = NodeBuilder(op.emission.taken)
        self._fixed = _fixed(op.graph, forward)
        forward = needed_nodes(forward, set(live))
        makers = self._repeatable(forward, chosen, set(results))
        places, repeated = self._repeated(makers)
        nodes = [node for node in forward if node.name in repeated]
        self.names.update((n, op.fresh(f"{n}_again")) for node in nodes for n in node.outputs if n in makers)
        parts = [
            (min(places[name] for node in part for name in node.outputs if name in places), part)
            for part in _connected(nodes, makers)
        ]
        self._write(sorted(parts, key=lambda placed: placed[0]))

    def before(self, position: int) -> Iterable[NodeProto]:
        """The nodes that stand before the node of the backward pass at `position`."""
        return self._before.get(position, ())

    def _repeatable(
        self, forward: Sequence[Node], chosen: Sequence[frozenset[str]], results: set[str]
    ) -> dict[str, Node]:
        """The values that no node outside of their segment reads, nor the caller, each with the node that may repeat it.

        Something that is tied has to be among what that node reads, or is computed from.
        """
        segment = {name: number for number, names in enumerate(chosen) for name in names}
        makers: dict[str, Node] = {}
        for node in forward:
            if node.name not in segment or node.name in self._op.repeated or is_random(node.proto):
                continue
            if any(name in makers or self._is_tied(name) for name in node.reads):
                makers.update((name, node) for name in node.outputs if name)
        crossing = {
            name
            for node in forward
            for name in node.reads
            if name in makers and segment.get(node.name) != segment[makers[name].name]
        }
        yielded = {name for node in self._backward if node.op_type == "YieldOp" for name in node.inputs}
        return {name: node for name, node in makers.items() if name not in crossing | yielded | results}

    def _repeated(self, makers: Mapping[str, Node]) -> tuple[dict[str, int], set[str]]:
        """The first position at which the backward pass needs a value of `makers`, with the names of the nodes to repeat."""
        places: dict[str, int] = {}
        for position, emitted in enumerate(self._backward):
            for name in _reads(emitted):
                if name in makers:
                    places.setdefault(name, position)
        repeated: set[str] = set()
        pending = list(places)
        while pending:
            node = makers[pending.pop()]
            if node.name not in repeated:
                repeated.add(node.name)
                pending += [name for name in node.reads if name in makers]
        return places, repeated

    def _is_tied(self, name: str) -> bool:
        """True if a value that is kept is tied: a tensor that depends on more than initializers."""
        values = self._op.values
        return name not in self._fixed and (
            name in values.graph.types or (name in values.added and values.is_tensor(name))
        )

    def _write(self, parts: Sequence[tuple[int, list[Node]]]) -> None:
        """Write the copies of `parts`, and what they wait for."""
        self._live.difference_update(self.names)
        reads = (name for _, part in parts for node in part for name in node.reads)
        self._live.update(name for name in reads if name not in self.names)
        ready, after, left = "", 0, self._end_of_forward()
        for place, part in parts:
            made = self._before.setdefault(place, [])
            if not made:
                ready, after, left = self._ready([*left, *self._left(after, place)], made), place, []
            self._repeat(part, ready, made)

    def _end_of_forward(self) -> list[str]:
        """The tensors that the forward pass computes last."""
        made = ([n for n in node.outputs if self._is_tied(n)] for node in needed_nodes(self._nodes, set(self._live)))
        return next(filter(None, reversed(list(made))), [])

    def _left(self, start: int, end: int) -> list[str]:
        """The tensors that this part of the backward pass computes and none of it reads."""
        nodes = self._backward[start:end]
        read = {name for node in nodes for name in _reads(node)}
        made = (name for node in nodes if node.op_type not in traits.SEQUENCES for name in node.outputs)
        return [name for name in made if name and name not in read and not self._op.is_sequence(name)]

    def _ready(self, names: Sequence[str], made: list[NodeProto]) -> str:
        """No elements, as soon as all the values in `names` are there; "" where there are none."""
        flat, start = self._op.const([-1]), self._op.const([0])
        self._live.update((flat, start))
        parts = []
        for name in names:
            whole = self._node(made, "Reshape", [self._rename.get(name, name), flat], name, "flat")
            none = self._node(made, "Slice", [whole, start, start], name, "none")
            parts.append(self._node(made, "Cast", [none], name, "ready", to=TensorProto.INT64))
        return self._node(made, "Concat", parts, parts[0], "all", axis=0) if len(parts) > 1 else "".join(parts)

    def _repeat(self, part: Sequence[Node], ready: str, made: list[NodeProto]) -> None:
        """Copy the nodes of a part; what enters it is tied to `ready`."""
        names = {name: self.names[name] for node in part for name in node.outputs if name in self.names}
        entering = dict.fromkeys(name for node in part for name in node.reads if name not in names)
        for name in entering if ready else ():
            if self._is_tied(name):
                names[name] = self._tie(name, ready, made)
                self._declare(name, names[name])
        for node in part:
            copy = NodeProto()
            copy.CopyFrom(node.proto)
            copy.name = self._op.fresh(f"{node.name}_again")
            rename_reads(copy, names)
            copy.output[:] = [
                name and (self.names.get(name) or self._op.fresh(f"{name}_again")) for name in node.outputs
            ]
            _describe(copy, node.name, self._space)
            made.append(copy)
            for name in node.outputs:
                if name in names:
                    self._declare(name, names[name])

    def _tie(self, name: str, ready: str, made: list[NodeProto]) -> str:
        """The value `name`, but not before `ready`."""
        shape = self._op.values.shapes.get(name)
        if self._op.values.types[name] == TensorProto.INT64 and shape is not None and len(shape) == 1:
            # ONNX Runtime joins what makes a shape with the Reshape that reads it, as if it were its data
            return self._node(made, "Concat", [name, ready], name, "tied", axis=0)
        return self._node(made, "Unsqueeze", [name, ready], name, "tied")

    def _node(
        self, made: list[NodeProto], op_type: str, inputs: Sequence[str], of: str, what: str, **settings: Any
    ) -> str:
        name = self._builder.add(op_type, inputs, f"{of}_{what}", **settings)
        made += self._builder.take()
        _describe(made[-1], of, self._space)
        return name

    def _declare(self, name: str, copy: str) -> None:
        """A copy has the type of its original."""
        kind = self._op.values.type_of(name)
        if kind is not None:
            self.types.append(ValueInfoProto(name=copy, type=kind))


def _connected(nodes: Sequence[Node], makers: Mapping[str, Node]) -> list[list[Node]]:
    """`nodes` in parts, between which no value in `makers` passes."""
    together = {node.name: {node.name} for node in nodes}
    for node in nodes:
        for name in node.reads:
            if name in makers:
                fewer, more = sorted((together[node.name], together[makers[name].name]), key=len)
                if fewer is not more:
                    more |= fewer
                    together.update(dict.fromkeys(fewer, more))
    parts: dict[int, list[Node]] = {}
    for node in nodes:
        parts.setdefault(id(together[node.name]), []).append(node)
    return list(parts.values())


def _reads(node: EmittedNode) -> Iterator[str]:
    yield from node.inputs
    yield from node.attribute_set.captured


def _describe(node: NodeProto, of: str, space: Callable[[str], Entries]) -> None:
    """Say in the metadata what the node is for, and which node or value it repeats."""
    del node.metadata_props[:]
    node.metadata_props.add(key="refgrad.rule", value="recompute")
    node.metadata_props.add(key="refgrad.node", value=of)
    node.metadata_props.extend(space(of))
