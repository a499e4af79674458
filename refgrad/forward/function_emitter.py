"""The emitter of function bodies: `op.Add(x, y)` adds a node and returns the name of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from refgrad.protos.domains import MICROSOFT
from refgrad.protos.reading import CONSTANT
from refgrad.protos.types import Type

Argument = str | float | Sequence[int] | None

_TYPED = dict.fromkeys(("Shape", "Size"), int(TensorProto.INT64)) | dict.fromkeys(
    ("Equal", "Less", "Greater", "GreaterOrEqual", "LessOrEqual", "Not", "And", "Or"), int(TensorProto.BOOL)
)


class FunctionEmitter:
    """Collects the nodes of a function body: `op.Add(x, y)` adds one of ai.onnx and returns the name of its result.

    An argument is a value's name, a number (of the type of the first float input), a list of integers, or None. `types`
    has what is known of the operator's inputs.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.types: dict[str, Type] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.emit(op_type, "", inputs, **attributes)

    def microsoft(self, op_type: str, *inputs: Argument, **attributes: Any) -> Any:
        """Add a node of com.microsoft."""
        return self.emit(op_type, MICROSOFT, inputs, **attributes)

    def emit(self, op_type: str, domain: str, inputs: Sequence[Argument], outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; its result's name, or a tuple of names where it has several."""
        like = next((x for x in inputs if isinstance(x, str)), None)
        names = [self._name(x, like) for x in inputs]
        while names and not names[-1]:
            names.pop()
        made = tuple(f"v_{len(self.nodes)}_{k}" for k in range(outputs))
        attributes = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op_type, names, list(made), domain=domain, **attributes))
        kind = self._result_type(op_type, names, attributes)
        if kind:
            self.types.update(dict.fromkeys(made, (kind, None)))
        return made[0] if outputs == 1 else made

    def _result_type(self, op_type: str, names: list[str], attributes: Mapping[str, Any]) -> int:
        """The element type of a result, 0 where it is unknown."""
        if op_type == "Constant":
            return int(attributes["value"].data_type)
        if op_type == "Cast":
            return int(attributes["to"])
        if op_type in _TYPED:
            return _TYPED[op_type]
        typed = names[1:] if op_type in ("Where", "CastLike") else names
        return self.type(typed[0]) if typed else 0

    def _name(self, value: Argument, like: str | None) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, int | float):
            assert like is not None
            return self.number(value, like)
        return self.constant(np.array(value, np.int64))

    def constant(self, array: np.ndarray) -> str:
        """A constant."""
        return str(self.emit("Constant", "", (), value=numpy_helper.from_array(array)))

    def number(self, value: float, like: str) -> str:
        """A scalar of the type of `like`."""
        kind = self.type(like) or TensorProto.FLOAT
        tensor = numpy_helper.from_array(np.array(value, helper.tensor_dtype_to_np_dtype(kind)))
        if float(numpy_helper.to_array(tensor)) != value:
            tensor.metadata_props.add(key=CONSTANT, value=repr(float(value)))
        constant = str(self.emit("Constant", "", (), value=tensor))
        return constant if self.type(like) else str(self.CastLike(constant, like))

    def rank(self, value: str) -> int | None:
        """The rank of an input, None where it is unknown."""
        return self.types.get(value, (0, None))[1]

    def type(self, value: str) -> int:
        """The element type of an input, 0 where it is unknown."""
        return self.types.get(value, (0, None))[0]

    def mean(self, value: str, axes: list[int]) -> str:
        """The mean over `axes`, which stay as 1: before opset 18 they are an attribute."""
        if self.opset >= 18:
            return str(self.ReduceMean(value, axes))
        return str(self.ReduceMean(value, axes=axes))
