"""The types of the methods of `op` and `op.grad`: refgrad/builder/operators.pyi and refgrad/builder/primitives.pyi."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Iterable, Sequence

import onnx
from onnx.defs import OpSchema

from refgrad.tables.dialects import DIALECTS

OLDEST = 16  # the opset from which on gradients are emitted
_VALUES = {
    "INT": "int",
    "FLOAT": "float",
    "STRING": "str",
    "TENSOR": "TensorProto",
    "SPARSE_TENSOR": "SparseTensorProto",
    "GRAPH": "GraphProto",
    "TYPE_PROTO": "TypeProto",
    "INTS": "Sequence[int]",
    "FLOATS": "Sequence[float]",
    "STRINGS": "Sequence[str]",
    "TENSORS": "Sequence[TensorProto]",
    "SPARSE_TENSORS": "Sequence[SparseTensorProto]",
    "GRAPHS": "Sequence[GraphProto]",
    "TYPE_PROTOS": "Sequence[TypeProto]",
}
HEADER = '''# Written by docs/generate.py from the schemas of ai.onnx.
"""`op.Mul(a, b)`: a method for every operator of ai.onnx."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
from onnx import GraphProto, SparseTensorProto, TensorProto, TypeProto

Argument = str | float | Sequence[int] | np.ndarray | np.generic | None

class Operators:
    """One method per operator: it adds a node of ai.onnx and returns the name of its output, or a tuple of names."""

    @property
    def rule(self) -> str: ...
    @property
    def node(self) -> str: ...
    def emit(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Argument],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> Any: ...
    @overload
    def com_microsoft(self, op_type: str, *inputs: Argument, outputs: Literal[1] = 1, **attributes: Any) -> str: ...
    @overload
    def com_microsoft(
        self, op_type: str, *inputs: Argument, outputs: Literal[2], **attributes: Any
    ) -> tuple[str, str]: ...
    @overload
    def com_microsoft(
        self, op_type: str, *inputs: Argument, outputs: Literal[3], **attributes: Any
    ) -> tuple[str, str, str]: ...
    @overload
    def com_microsoft(self, op_type: str, *inputs: Argument, outputs: int, **attributes: Any) -> Any: ...
'''


def operators() -> str:
    """Return the stub: every operator, with the inputs and the attributes of its versions from opset 16 on."""
    versions: dict[str, list[OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            versions.setdefault(schema.name, []).append(schema)
    lines = [HEADER]
    for name, found in sorted(versions.items()):
        newest = max(found, key=lambda schema: schema.since_version)
        if not newest.deprecated:
            lines += _method(name, newest, [schema for schema in found if _is_used(schema, found)])
    return "".join(lines)


def _is_used(schema: OpSchema, versions: Iterable[OpSchema]) -> bool:
    """True if a model of an opset from the oldest on may have this version."""
    later = [other.since_version for other in versions if other.since_version > schema.since_version]
    return not later or min(later) > OLDEST


def _method(name: str, newest: OpSchema, versions: Sequence[OpSchema]) -> list[str]:
    attributes = _attributes(versions)
    head = ["self", *_inputs(newest, {attribute.partition(":")[0] for attribute in attributes})]
    variadic = any(parameter.startswith("*") for parameter in head)
    star = () if variadic or not attributes else ("*",)
    if not variadic and len(head) > 1:
        head.append("/")
    several = len(newest.outputs) > 1 or newest.max_output > 1
    if not several:
        return [_signature(name, [*head, *star, *attributes], "str")]
    star = () if variadic else ("*",)
    one = [*head, *star, "outputs: Literal[1] = 1", *attributes]
    two = [*head, *star, "outputs: Literal[2]", *attributes]
    three = [*head, *star, "outputs: Literal[3]", *attributes]
    more = [*head, *star, "outputs: int", *attributes]
    return [
        "    @overload\n" + _signature(name, one, "str"),
        "    @overload\n" + _signature(name, two, "tuple[str, str]"),
        "    @overload\n" + _signature(name, three, "tuple[str, str, str]"),
        "    @overload\n" + _signature(name, more, "str | tuple[str, ...]"),
    ]


def _inputs(schema: OpSchema, taken: set[str]) -> list[str]:
    """The inputs; one that is an attribute in an older version gets another name."""
    made = []
    for parameter in schema.inputs:
        name = _safe(parameter.name)
        if name in taken:
            name += "_"
        if parameter.option == OpSchema.FormalParameterOption.Variadic:
            made.append(f"*{name}: Argument")
        elif parameter.option == OpSchema.FormalParameterOption.Optional or len(made) >= schema.min_input:
            made.append(f"{name}: Argument = None")
        else:
            made.append(f"{name}: Argument")
    return made


def _attributes(versions: Sequence[OpSchema]) -> list[str]:
    kinds: dict[str, set[str]] = {}
    for schema in versions:
        for attribute in schema.attributes.values():
            kinds.setdefault(_safe(attribute.name), set()).add(_VALUES[attribute.type.name])
    return [f"{name}: {' | '.join(sorted(found))} | None = None" for name, found in sorted(kinds.items())]


def _safe(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) or name == "self" else name


def _signature(name: str, parameters: Sequence[str], result: str) -> str:
    line = f"    def {name}({', '.join(parameters)}) -> {result}: ...\n"
    if len(line) <= 120:
        return line
    return f"    def {name}(\n" + "".join(f"        {p},\n" for p in parameters) + f"    ) -> {result}: ...\n"


def primitives() -> str:
    """Return the stub of `op.grad`: what every primitive returns, by its lowering in ai.onnx operators."""
    lines = [
        '# Written by docs/generate.py from the lowerings of dialect "onnx".\n'
        '"""`op.grad.SoftmaxGrad(...)`: the gradient primitives."""\n\nfrom typing import Any\n\nclass Primitives:\n'
        '    """`op.grad.SoftmaxGrad(...)`: a gradient primitive, lowered for the dialect in use."""\n\n'
        "    def __init__(self, op: Any) -> None: ...\n"
    ]
    for name, function in sorted(DIALECTS["onnx"].lowerings.items()):
        result = inspect.signature(function).return_annotation
        lines.append(f"    def {name}(self, *inputs: Any, **attributes: Any) -> {result}: ...\n")
    return "".join(lines)
