"""Values of a gradient that are finite for every input: masks and finite constants."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from refgrad import traits
from refgrad.model.external import array_of
from refgrad.protos.traverse import attribute_value
from refgrad.protos.types import FLOATS

# Finite where all their operands are: they choose, repeat and move elements, or scale them down to 1.
_MOVES = traits.MOVING | traits.STEPS | {"Abs", "Max", "Min", "Neg", "Where"}


class Finite:
    """The values that are known to be finite, node by node. A call with a name is True if that value is finite."""

    def __init__(self, graph: GraphProto) -> None:
        self._overridable = {value.name for value in graph.input}
        self._tensors: dict[str, TensorProto] = {}  # constants that nobody asked about
        self._finite: set[str] = set()
        self._nonzero: set[str] = set()
        self._masks: set[str] = set()
        self._bools: set[str] = set()

    def __call__(self, name: str) -> bool:
        """True if a value is finite for every input."""
        if (tensor := self._tensors.pop(name, None)) is not None:
            self._look(name, tensor)
        return name in self._finite

    def is_nonzero(self, name: str) -> bool:
        """True if no element of a finite value is 0."""
        return name in self._nonzero

    def is_mask(self, name: str) -> bool:
        """True if a value is a condition cast to numbers."""
        return name in self._masks

    def enter(self, graph: GraphProto) -> None:
        """Take note of the inputs and the constants of a graph."""
        for value in graph.input:
            self._forget(value.name)
            kind = value.type.tensor_type.elem_type
            if kind and kind not in FLOATS:
                self._finite.add(value.name)
            if kind == TensorProto.BOOL:
                self._bools.add(value.name)
        for tensor in graph.initializer:
            if tensor.name not in self._overridable:
                self._forget(tensor.name)
                self._tensors[tensor.name] = tensor

    def see(self, node: NodeProto) -> None:
        """Note the results of a node."""
        for name in node.output:
            self._forget(name)
        if node.domain or len(node.output) != 1:
            return
        op_type, name = node.op_type, node.output[0]
        if op_type in traits.BOOLEAN:
            self._bools.add(name)
            self._finite.add(name)
        elif op_type in traits.COUNTING:
            self._finite.add(name)
        elif op_type in ("Constant", "ConstantOfShape"):
            self._filled(name, node)
        elif op_type == "Cast" and node.input[0] in self._bools:
            self._masks.add(name)
            self._finite.add(name)
        elif op_type in _MOVES:
            read = node.input[1:] if op_type == "Where" else node.input
            if all(self(read_name) for read_name in read if read_name):
                self._finite.add(name)
            if op_type == "Identity" and node.input[0] in self._bools:
                self._bools.add(name)

    def _forget(self, name: str) -> None:
        """Forget a value of this name in another body."""
        for known in (self._finite, self._nonzero, self._masks, self._bools):
            known.discard(name)
        self._tensors.pop(name, None)

    def _filled(self, name: str, node: NodeProto) -> None:
        values = {a.name: attribute_value(a) for a in node.attribute}
        if isinstance(values.get("value"), TensorProto):
            self._look(name, values["value"])
        elif not values.keys().isdisjoint(("value_float", "value_floats")):
            self._note(name, np.asarray(values.get("value_float", values.get("value_floats"))))
        elif node.op_type == "ConstantOfShape" or not values.keys().isdisjoint(("value_int", "value_ints")):
            self._finite.add(name)

    def _look(self, name: str, tensor: TensorProto) -> None:
        if tensor.data_location != TensorProto.EXTERNAL and tensor.data_type != TensorProto.STRING:
            self._note(name, array_of(tensor))

    def _note(self, name: str, array: np.ndarray) -> None:
        if array.dtype.kind == "b":
            self._bools.add(name)
        wide = array if array.dtype.kind in "biufc" else array.astype(np.float64)  # types of ml_dtypes
        if np.isfinite(wide).all():
            self._finite.add(name)
            if wide.all():
                self._nonzero.add(name)
