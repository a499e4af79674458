"""The emitter that keeps a record of its sweep, and the contributions of the record as nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import ModelProto

from refgrad.builder.nodes import needed_emitted, write
from refgrad.builder.op import Emitter
from refgrad.builder.primitives import Primitives
from refgrad.reverse.record import Summed, SweepRecord
from refgrad.tables.dialects import DIALECTS


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
    """An emitter with a record of its sweep, in which it writes down what it sums over a broadcast."""

    record: SweepRecord

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.record = SweepRecord()

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
