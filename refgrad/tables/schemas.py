"""The schema of an operator: onnx's, or one that is declared here, because onnx has none.

Nothing is registered with onnx: what its checker says of a model does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import onnx
from onnx import AttributeProto, NodeProto
from onnx.defs import OpSchema

DECLARED: dict[tuple[str, str], OpSchema] = {}  # by domain and operator

_NEWEST = 2**31 - 1  # the largest version that onnx takes


def find_schema(op_type: str, domain: str, opset: int | None = None) -> Any:
    """The schema of an operator in that version of its domain (None: the newest), onnx's or ours; None without one."""
    if onnx.defs.has(op_type, domain):
        if opset is None:
            return onnx.defs.get_schema(op_type, domain)
        return onnx.defs.get_schema(op_type, min(opset, _NEWEST), domain)
    return DECLARED.get((domain, op_type))


def schemas() -> list[Any]:
    """Every operator that has a schema, onnx's and ours."""
    return [*onnx.defs.get_all_schemas(), *DECLARED.values()]


def wrong_type(node: NodeProto, schema: OpSchema) -> str:
    """The reason why an attribute of `node` is of a type that `schema` does not declare, or ""."""
    for attribute in node.attribute:
        declared = schema.attributes.get(attribute.name)
        given = AttributeProto.AttributeType.Name(attribute.type)
        if declared is not None and given != (due := type_name(declared)):
            return f"its attribute {attribute.name!r} is of type {given}, not {due}"
    return ""


def type_name(declared: OpSchema.Attribute) -> str:
    """The type of a declared attribute, as AttributeProto calls it."""
    return str(declared.type).rpartition(".")[2]


_KINDS = {int: AttributeProto.INT, float: AttributeProto.FLOAT, str: AttributeProto.STRING}


def wrong_kind(attributes: Iterable[AttributeProto], defaults: Mapping[str, Any]) -> str:
    """The reason why one of `attributes` is of another type than its default, or than onnx's operators give its name; or ""."""
    for attribute in attributes:
        due = _KINDS.get(type(defaults.get(attribute.name)), _usual_types().get(attribute.name))
        if due is not None and attribute.type != due:
            given, wanted = map(AttributeProto.AttributeType.Name, (attribute.type, due))
            return f"its attribute {attribute.name!r} is of type {given}, not {wanted}"
    return ""


@cache
def _usual_types() -> dict[str, int]:
    """The type of each attribute, by its name, that all operators of onnx agree on."""
    found: dict[str, set[str]] = {}
    for schema in onnx.defs.get_all_schemas():
        for name, declared in schema.attributes.items():
            found.setdefault(name, set()).add(type_name(declared))
    return {name: AttributeProto.AttributeType.Value(*kinds) for name, kinds in found.items() if len(kinds) == 1}
