"""Values of a gradient that are finite whatever is fed: masks, and constants that are."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from refgrad.protos.external import array_of
from refgrad.protos.types import FLOATS
from refgrad.protos.walk import attribute_value

_BOOL = frozenset(
    ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf")
)
_WHOLE = frozenset(("Shape", "Size", "NonZero", "ArgMax", "ArgMin"))
# Finite where all their operands are: they choose, repeat and move elements, or scale them down to 1.
_MOVES = frozenset(
    (
        *("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Slice", "Concat", "Gather", "Pad"),
        *("Tile", "Where", "Abs", "Neg", "Sign", "Max", "Min", "Ceil", "Floor", "Round", "Flatten"),
    )
)


class Finite:
    """What is known to be finite, node by node; called with a name it says whether this value is."""

    def __init__(self, graph: GraphProto) -> None:
        self._overridable = {value.name for value in graph.input}
        self._finite: set[str] = set()
        self._nonzero: set[str] = set()
        self._masks: set[str] = set()
        self._bools: set[str] = set()

    def __call__(self, name: str) -> bool:
        """Whether a value is finite whatever is fed."""
        return name in self._finite

    def is_nonzero(self, name: str) -> bool:
        """Whether no element of a value is 0."""
        return name in self._nonzero

    def is_mask(self, name: str) -> bool:
        """Whether a value is a condition as numbers."""
        return name in self._masks

    def enter(self, graph: GraphProto) -> None:
        """Look at the constants of a graph."""
        for value in graph.input:
            if value.type.tensor_type.elem_type not in FLOATS | {0}:
                self._finite.add(value.name)
            if value.type.tensor_type.elem_type == TensorProto.BOOL:
                self._bools.add(value.name)
        for tensor in graph.initializer:
            if tensor.name not in self._overridable:
                self._look(tensor.name, tensor)

    def _look(self, name: str, tensor: TensorProto) -> None:
        if tensor.data_location == TensorProto.EXTERNAL:
            return
        array = array_of(tensor)
        if array.dtype.kind in "iub":
            self._finite.add(name)
            if array.dtype.kind == "b":
                self._bools.add(name)
        elif array.dtype.kind in "OSU":
            return
        elif np.isfinite(array.astype(np.float64) if array.dtype.kind not in "fc" else array).all():
            self._finite.add(name)
        else:
            return
        if array.astype(np.float64).all():
            self._nonzero.add(name)

    def see(self, node: NodeProto) -> None:
        """Take note of what a node computes."""
        op_type = node.op_type
        if node.domain or len(node.output) != 1:
            return
        name = node.output[0]
        if op_type in _BOOL:
            self._bools.add(name)
            self._finite.add(name)
        elif op_type in _WHOLE:
            self._finite.add(name)
        elif op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    self._look(name, attribute.t)
        elif op_type == "ConstantOfShape":
            tensor = [attribute_value(a) for a in node.attribute if a.name == "value"]
            if tensor:
                self._look(name, tensor[0])
            else:
                self._finite.add(name)
        elif op_type == "Cast" and node.input[0] in self._bools:
            self._masks.add(name)
            self._finite.add(name)
        elif op_type in _MOVES:
            read = node.input[1:] if op_type == "Where" else node.input
            if all(one in self._finite for one in read if one):
                self._finite.add(name)
            if op_type == "Identity" and node.input[0] in self._bools:
                self._bools.add(name)
