"""An emitter into a graph that exists."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto

from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.protos.walk import fresh


class StepWriter(FunctionEmitter):
    """An emitter whose nodes have names of their own in a graph, and whose constants are initializers."""

    def __init__(self, opset: int, prefix: str, taken: set[str]) -> None:
        super().__init__(opset, prefix, prefix)
        self._prefix, self._taken = prefix, taken
        self.constants: dict[str, TensorProto] = {}

    def emit(
        self, op_type: str, domain: str, inputs: Any, outputs: int, attributes: Any, optional_outputs: bool = False
    ) -> Any:
        """Add a node, or an initializer, one for all that are the same."""
        if op_type == "Constant":
            tensor = attributes["value"]
            key = tensor.SerializeToString(deterministic=True).hex()
            if key not in self.constants:
                kept = TensorProto()
                kept.CopyFrom(tensor)
                kept.name = fresh(f"{self._prefix}/constant", self._taken)
                self.constants[key] = kept
                self.types[kept.name] = (tensor.data_type, len(tensor.dims))
            return self.constants[key].name
        made = super().emit(op_type, domain, inputs, outputs, attributes, optional_outputs)
        node = self.nodes[-1]
        names = [fresh(f"{self._prefix}/{op_type}", self._taken) for _ in node.output]
        for old, new in zip(node.output, names, strict=True):
            if old in self.types:
                self.types[new] = self.types.pop(old)
        node.output[:] = names
        node.name = names[0]
        return names[0] if isinstance(made, str) else tuple(names)
