"""The element types of an operator's results, as its schema has them: of an input, of an attribute, or fixed.

onnx's inference does not infer every operator, and of an unknown operand it infers nothing. What is known here needs no shape.
A container has the element type of the tensors that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import onnx
from onnx import TensorProto, helper

from refgrad import traits
from refgrad.protos.domains import MICROSOFT, TRAINING
from refgrad.tables.schemas import find_schema

Kinds = tuple[int, ...]
_Source = Callable[[Sequence[int], Mapping[str, Any]], int]  # from the types of the inputs and the attributes
_OPTIMIZERS = frozenset(("Adagrad", "Adam", "Momentum"))  # each result is an input behind the first two, made anew
_TYPING = ("to", "dtype", "output_datatype")  # attributes that give the first output its element type


def element_types(
    op_type: str, domain: str, opset: int | None, inputs: Sequence[int], attributes: Mapping[str, Any], outputs: int
) -> Kinds:
    """The element types of the `outputs` results of a node, 0 for each that does not follow.

    :param opset: the version of the domain that the model imports.
    :param inputs: the element types of the node's inputs, 0 where one is unknown or absent.
    :param attributes: those that the node sets.
    """
    sources = _sources("" if domain == "ai.onnx" else domain, op_type, opset)
    if not sources:
        return (0,) * outputs
    last = len(sources) - 1
    return tuple([sources[min(k, last)](inputs, attributes) for k in range(outputs)])


@cache
def has_own_type(op_type: str, domain: str) -> bool:
    """True if the element type of the first result is known, and need not be the type of the first input."""
    sources = _sources(domain, op_type, None)
    if not sources or sources[0] is _unknown:
        return False
    schema = find_schema(op_type, domain)
    return not schema.inputs or schema.inputs[0].type_str != schema.outputs[0].type_str


@cache
def _sources(domain: str, op_type: str, opset: int | None) -> tuple[_Source, ...]:
    """The source of the type of each output of an operator; the last one also stands for the rest of a variadic output."""
    try:
        schema = find_schema(op_type, domain, opset)
    except onnx.defs.SchemaError:
        return ()
    if schema is None:
        return ()
    sources = [_source(schema, domain, position) for position in range(len(schema.outputs))]
    if sources and schema.outputs[-1].option != onnx.defs.OpSchema.FormalParameterOption.Variadic:
        sources.append(_unknown)
    return tuple(sources)


def _source(schema: Any, domain: str, position: int) -> _Source:
    special = _special(schema, position) if domain in ("", MICROSOFT, TRAINING) else None
    if special is not None:
        return special
    output = schema.outputs[position]
    if output.option == onnx.defs.OpSchema.FormalParameterOption.Variadic and not output.is_homogeneous:
        return _unknown  # If, Loop, Scan: their bodies say it
    allowed = {
        text for c in schema.type_constraints if c.type_param_str == output.type_str for text in c.allowed_type_strs
    }
    kinds = {_KINDS.get(text, 0) for text in allowed or {output.type_str}}
    if len(kinds) == 1 and 0 not in kinds:
        return _fixed(kinds.pop())
    places = [k for k, formal in enumerate(schema.inputs) if formal.type_str == output.type_str]
    if places:
        variadic = schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
        open_end = places[-1] if variadic and places[-1] == len(schema.inputs) - 1 else None
        if open_end is not None and not schema.inputs[-1].is_homogeneous:
            return _unknown
        return lambda inputs, _: _first(inputs, places, open_end)
    if not domain and schema.name in traits.CONTAINERS:  # it has no one name for a container and for what it holds
        return lambda inputs, _: inputs[0] if inputs else 0
    return _unknown


def _special(schema: Any, position: int) -> _Source | None:
    """The types that an attribute gives, or only the text of an operator's specification."""
    op_type = schema.name
    if op_type in _OPTIMIZERS:
        return lambda inputs, _: inputs[position + 2] if position + 2 < len(inputs) else 0
    if position:
        return _by_attribute(schema, "stash_type") if op_type == "LayerNormalization" else None
    for name in _TYPING:
        if name in schema.attributes:
            return _by_attribute(schema, name)
    return {"Constant": _constant, "ConstantOfShape": _filling, "QuantizeLinear": _quantized}.get(
        op_type, _dequantized if op_type == "DequantizeLinear" else None
    )


def _by_attribute(schema: Any, name: str) -> _Source:
    """The type that an attribute gives; by default the schema's, or the type of the first input, or float."""
    declared = schema.attributes[name]
    default = declared.default_value.i if declared.default_value.name else 0 if declared.required else None
    if default is None and schema.inputs:
        return lambda inputs, attributes: _type(attributes.get(name)) or (inputs[0] if inputs else 0)
    return lambda _, attributes: _type(attributes.get(name, TensorProto.FLOAT if default is None else default))


def _unknown(_: Sequence[int], __: Mapping[str, Any]) -> int:
    return 0


def _fixed(kind: int) -> _Source:
    return lambda _, __: kind


def _first(inputs: Sequence[int], places: Sequence[int], open_end: int | None) -> int:
    """The first type that is known among inputs of one type."""
    for place in places:
        if place < len(inputs) and inputs[place]:
            return inputs[place]
    return 0 if open_end is None else next((kind for kind in inputs[open_end:] if kind), 0)


def _constant(_: Sequence[int], attributes: Mapping[str, Any]) -> int:
    for name, value in attributes.items():
        if name == "value":
            return int(value.data_type)
        if name == "sparse_value":
            return int(value.values.data_type)
        for text, kind in (("string", TensorProto.STRING), ("int", TensorProto.INT64), ("float", TensorProto.FLOAT)):
            if name.startswith(f"value_{text}"):
                return int(kind)
    return 0


def _filling(_: Sequence[int], attributes: Mapping[str, Any]) -> int:
    return int(attributes["value"].data_type if "value" in attributes else TensorProto.FLOAT)


def _quantized(inputs: Sequence[int], attributes: Mapping[str, Any]) -> int:
    if len(inputs) > 2 and inputs[2]:
        return inputs[2]
    return _type(attributes.get("output_dtype")) or int(TensorProto.UINT8)


def _dequantized(inputs: Sequence[int], attributes: Mapping[str, Any]) -> int:
    return _type(attributes.get("output_dtype")) or (inputs[1] if len(inputs) > 1 else 0)


def _type(value: Any) -> int:
    """An attribute as an element type, 0 where it is none."""
    return value if isinstance(value, int) and value in _KINDS.values() else 0


def _type_text(kind: int) -> str:
    return "tensor(" + str(helper.tensor_dtype_to_string(kind)).removeprefix("TensorProto.").lower() + ")"


_KINDS = {_type_text(kind): int(kind) for kind in helper.get_all_tensor_dtypes() if kind}
