"""`op.Mul(a, b)`: a method for every operator of ai.onnx. `operators.pyi`, which is generated, has their types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from refgrad.builder.misuse import no_such_method, no_such_node
from refgrad.protos.domains import MICROSOFT

Argument = str | float | Sequence[int] | np.ndarray | np.generic | None
_Bounds = tuple[int, int, int, frozenset[str], frozenset[str]]


class Operators:
    """One method per operator: it adds a node of ai.onnx and returns the name of its output, or a tuple of names.

    `opset` is the version of ai.onnx that the node is of.
    """

    opset: int

    @property
    def rule(self) -> str:
        """The operator whose rule emits."""
        raise NotImplementedError

    @property
    def node(self) -> str:
        """The name of the forward node that what is emitted belongs to."""
        raise NotImplementedError

    def emit(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Any],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> Any:
        """Add a node."""
        raise NotImplementedError

    def com_microsoft(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """A node of ONNX Runtime's domain whose unused outputs may be left empty."""
        return self.emit(op_type, MICROSOFT, inputs, outputs, attributes, optional_outputs=True)

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper() or not onnx.defs.has(op_type):
            raise no_such_method(self, op_type)

        schemas: dict[int, _Bounds] = {}

        def emit(op: Operators, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
            bounds = schemas.get(op.opset)
            if bounds is None:
                bounds = schemas[op.opset] = _bounds(op_type, op.opset)
            if not bounds[0] <= len(inputs) <= bounds[1] or outputs > bounds[2] or not bounds[3].issuperset(attributes):
                given = {name for name, value in attributes.items() if value is not None}
                if (error := no_such_node(op, op_type, op.opset, inputs, outputs, given)) is not None:
                    raise error
            if not bounds[4].isdisjoint(attributes):
                attributes = {name: _floats(v) if name in bounds[4] else v for name, v in attributes.items()}
            return op.emit(op_type, "", inputs, outputs, attributes)

        setattr(Operators, op_type, emit)  # on the class: it is looked up once
        return getattr(self, op_type)  # type: ignore[no-any-return]


def _bounds(op_type: str, opset: int) -> _Bounds:
    """The least and the largest number of inputs of an operator in that version, its largest number of outputs, its attributes.

    The last entry has the attributes that hold floats. If the operator is newer, all is 0 or empty.
    """
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return 0, 0, 0, frozenset(), frozenset()
    types = onnx.defs.OpSchema.AttrType
    floats = frozenset(a.name for a in schema.attributes.values() if a.type in (types.FLOAT, types.FLOATS))
    return schema.min_input, schema.max_input, schema.max_output, frozenset(schema.attributes), floats


def _floats(value: Any) -> Any:
    """An integer, or a list with some, as floats: ONNX tells them apart."""
    if isinstance(value, list | tuple):
        return [_floats(part) for part in value]
    return float(value) if isinstance(value, int) else value
