"""The record of a sweep: the contributions to each adjoint, and the sums over broadcast axes.

Nobody but `refgrad.walk` asks for it. Without a record a sweep does nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from onnx import ModelProto

from refgrad.forward.graph import Graph, Node
from refgrad.reverse.emit import Emitter
from refgrad.reverse.emitted import needed_emitted, write
from refgrad.reverse.primitives import Primitives
from refgrad.tables.dialects import DIALECTS
from refgrad.tables.registry import RULES


class Given(NamedTuple):
    """The adjoint that a node gave to `primal`, its input at `position`; -1 for a value that its graphs read."""

    node: str
    position: int
    primal: str
    adjoint: str


class Summed(NamedTuple):
    """An adjoint before and after it was summed over the axes along which `primal` was broadcast, in the rule of a node."""

    node: str
    primal: str
    before: str
    after: str


class SweepRecord:
    """The contributions to every adjoint and the sums over broadcasts, in the order in which the sweep met them."""

    def __init__(self) -> None:
        self.given: list[Given] = []
        self.summed: list[Summed] = []

    def watched(
        self, graph: Graph, node: Node, pairs: Iterable[tuple[str, str | None]]
    ) -> Iterator[tuple[str, str | None]]:
        """`pairs`, the names that a node reads and their adjoints, each written down on the way."""
        places = iter(_places(graph, node))
        for name, adjoint in pairs:
            position = next(places, -1)
            if adjoint is not None:
                self.given.append(Given(node.name, position, name, adjoint))
            yield name, adjoint


def _places(graph: Graph, node: Node) -> Iterator[int]:
    """The positions of the inputs that the rule of a node gives adjoints to, in its order."""
    rule = RULES.get(node.key)
    if rule is None or node.key in graph.structures:
        return
    for position, variadic in rule.bind(graph.opsets.get(rule.domain, 1))[1]:
        yield from range(position, len(node.inputs) if variadic else min(position + 1, len(node.inputs)))


def with_contributions(gradient: ModelProto, op: Emitter, names: Mapping[str, str], record: SweepRecord) -> ModelProto:
    """`gradient` with the contributions that it does without at its end: slices between zeros, which it puts side by side.

    :param names: the names in `gradient` of values that `op` emitted.
    """
    made = {name for node in gradient.graph.node for name in node.output}
    padded, emission = op.values.sparse.padded, op.emission
    given = {one.adjoint for one in record.given if one.adjoint in padded}
    nodes = [
        node
        for node in needed_emitted(emission.nodes, given)
        if made.isdisjoint(names.get(name, name) for name in node.outputs)
    ]
    whole = ModelProto()
    whole.CopyFrom(gradient)
    have = {tensor.name for tensor in gradient.graph.initializer}
    reads = dict.fromkeys(name for node in nodes for name in node.inputs if name in emission.constants)
    whole.graph.initializer.extend(emission.constants[name] for name in reads if name not in have)
    write(whole.graph, nodes, names)
    return whole


class RecordingEmitter(Emitter):
    """An emitter that writes down in `record` what it sums over a broadcast."""

    record: SweepRecord

    @property
    def grad(self) -> Primitives:
        """The gradient primitives."""
        return _RecordingPrimitives(self)


class _RecordingPrimitives(Primitives):
    def __init__(self, op: RecordingEmitter) -> None:
        super().__init__(op)
        self._emitter, self._record = op, op.record

    def BroadcastGradient(self, dY: str, X: str, operands: tuple[str, ...]) -> Any:  # noqa: N802
        """The lowering of the primitive, and a line in the record."""
        made = DIALECTS["onnx"].lowerings["BroadcastGradient"](self._emitter, dY, X, operands)
        if made != dY:
            self._record.summed.append(Summed(self._emitter.node, X, dY, made))
        return made
