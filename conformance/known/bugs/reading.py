"""Known bugs as data: a TOML file per family, models in onnx's text format, arrays as literals.

    [[finding]]
    system = "onnx.reference"
    operator = "Softsign"
    fault = "fails on a scalar"
    proof = "1/(1 + |1|)"
    model = '''
    <ir_version: 10, opset_import: ["" : 21]>
    Softsign (float X) => (float[] Y) { Y = Softsign (X) }
    '''
    feeds.X = 1
    expected.Y = 0.5

A model stands in the record as it is, so that it can be read, compared and copied into `onnx.parser.parse_model`; nothing makes
it of parts. The type of an array is the one that the model declares for its name. Nested lists give its shape, and a table does
where there are no elements: `{ shape = [0, 3] }`. The value of a formula is a number here, with every digit that its type
holds: the formula is in `proof`, and the tests compare the number with the interpreter, and the number of a gradient with
float64 differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, TypeProto, helper

from refgrad.conformance.known.records import Record
from refgrad.errors import choices
from refgrad.model import native

Types = Mapping[str, TypeProto]


def model_of(record: Record, key: str) -> ModelProto:
    """The model in onnx's text format under `key`; one of its nodes has to be of the operator that the record is about.

    :raises RecordsError: it is not a model, or has no such node.
    """
    try:
        model = native.parse_model(record[key])
    except native.ParseError as error:
        raise record.wrong(f"{key} is no model in onnx's text format: {error}") from error
    if key == "model" and record["operator"] not in (found := {node.op_type for node in model.graph.node}):
        raise record.wrong(f"operator is {record['operator']!r}. The model has nodes of {choices(sorted(found))}.")
    return model


def inputs_of(model: ModelProto) -> dict[str, TypeProto]:
    """The types of the inputs, by name."""
    return {value.name: value.type for value in model.graph.input}


def outputs_of(model: ModelProto) -> dict[str, TypeProto]:
    """The types of the outputs, by name."""
    return {value.name: value.type for value in model.graph.output}


def arrays_of(record: Record, key: str, types: Types, every: bool = False) -> dict[str, Any]:
    """The values in the table under `key`, in the types of the values that they are named after.

    :param every: whether each name in `types` has to have a value.
    :raises RecordsError: a name is not in `types`, one is missing, or a value is not of its type.
    """
    values: Mapping[str, Any] = record[key]
    if unknown := sorted(values.keys() - types.keys()):
        raise record.wrong(f"{key} has {unknown[0]!r}. The model has {choices(types)} there.")
    if every and (missing := sorted(types.keys() - values.keys())):
        raise record.wrong(f"{key} has no {missing[0]!r}. Give every one of {choices(types)} a value.")
    try:
        return {name: _value(value, types[name]) for name, value in values.items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise record.wrong(f"{key} is not of the types that the model declares: {error}") from error


def _value(literal: Any, kind: TypeProto) -> Any:
    match kind.WhichOneof("value"):
        case "sequence_type":
            return [_value(element, kind.sequence_type.elem_type) for element in literal]
        case "map_type":
            strings = kind.map_type.key_type == TensorProto.STRING
            values = {name: _value(value, kind.map_type.value_type).item() for name, value in literal.items()}
            return {name if strings else int(name): value for name, value in values.items()}
    return _array(literal, helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


def _array(literal: Any, dtype: np.dtype[Any]) -> np.ndarray:
    if isinstance(literal, dict):
        if literal.keys() != {"shape"} or 0 not in literal["shape"]:
            raise ValueError(f"write the elements of {literal}, and {{ shape = [0, 3] }} only where there are none")
        return np.empty(literal["shape"], dtype)
    made = np.array(literal, dtype)
    written = np.array(literal).dtype.kind if made.size else ""
    if written == "f" and dtype.kind in "iub":
        raise ValueError(f"{literal} has fractions, for {dtype}")
    if written == "U" and dtype.kind != "O":
        raise ValueError(f"{literal} has strings, for {dtype}")
    return made
