"""Every version of every operator goes through onnx's door, with inputs and attributes that onnx alone does not survive."""

from __future__ import annotations

import random

import onnx
import pytest
from door import asked
from onnx import AttributeProto, ModelProto, TypeProto, helper

from refgrad.worker import Worker

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]


def _each(models: list[ModelProto]) -> int:
    return sum(bool(asked(model)) for model in models)


def _survives(models: list[ModelProto]) -> None:
    with Worker(seconds=240) as worker:
        assert worker.call(_each, models) == len(models)


def _of_schema(schema: onnx.defs.OpSchema, inputs: list[TypeProto | None], outputs: int) -> ModelProto:
    """A model of one node; inputs without a type are made by an operator that nobody knows."""
    imports = {"": 17, "c": 1, schema.domain: schema.since_version}
    model = ModelProto(ir_version=8)
    model.opset_import.extend(helper.make_opsetid(*one) for one in imports.items())
    graph = model.graph
    graph.name = "g"
    for k, kind in enumerate(inputs):
        if kind is None:
            graph.node.add(op_type="Unheard", domain="c", output=[f"x{k}"])
        else:
            graph.input.add(name=f"x{k}", type=kind)
    names = [f"x{k}" for k in range(len(inputs))]
    graph.node.add(op_type=schema.name, domain=schema.domain, input=names, output=[f"y{k}" for k in range(outputs)])
    graph.output.add(name="y0").type.tensor_type.elem_type = 1
    return model


SCHEMAS = onnx.defs.get_all_schemas_with_history()
FEW = 6


def _usual(schema: onnx.defs.OpSchema) -> tuple[int, int]:
    return min(max(schema.min_input, 1), FEW), max(1, min(schema.min_output, FEW))


def _value(declared: onnx.defs.OpSchema.Attribute, number: int) -> AttributeProto:
    """An attribute of the declared type, or of integers where there is nothing simple of that type."""
    kind = str(declared.type).rpartition(".")[2]
    made = {
        "INT": number,
        "INTS": [number, number],
        "FLOAT": float(number),
        "FLOATS": [float(number)],
        "STRING": "a",
        "STRINGS": ["a"],
        "TENSOR": helper.make_tensor("", onnx.TensorProto.INT64, [1], [number]),
    }.get(kind, number)
    return helper.make_attribute(declared.name, made)


def test_every_operator_survives_inputs_of_unknown_type():
    models = []
    for schema in SCHEMAS:
        count, outputs = _usual(schema)
        for given in ([], list(schema.attributes.values())):
            model = _of_schema(schema, [None] * count, outputs)
            model.graph.node[-1].attribute.extend(_value(declared, 1) for declared in given)
            models.append(model)
    _survives(models)


def test_every_operator_survives_sizes_that_no_tensor_has():
    drawn = random.Random(0)
    models = []
    for schema in SCHEMAS:
        count, outputs = _usual(schema)
        for kind in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64):
            shapes = [
                [drawn.choice((2, 3, -7, -(10**8), 2**62)) for _ in range(drawn.randint(1, 3))] for _ in range(count)
            ]
            types = [helper.make_tensor_type_proto(kind, [1] * len(shape)) for shape in shapes]
            for one, shape in zip(types, shapes, strict=True):
                for dim, size in zip(one.tensor_type.shape.dim, shape, strict=True):
                    dim.dim_value = size
            models.append(_of_schema(schema, list(types), outputs))
    _survives(models)


def test_every_operator_survives_too_many_and_too_few_inputs_and_outputs():
    matrix = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2, 2])
    models = []
    for schema in SCHEMAS:
        count, outputs = _usual(schema)
        for more, others in ((0, outputs + 4), (count + 4, outputs), (count, 0)):
            models.append(_of_schema(schema, [matrix] * more, others))
        gap = _of_schema(schema, [matrix] * (count + 1), outputs + 1)
        gap.graph.node[-1].input[0] = gap.graph.node[-1].output[0] = ""
        models.append(gap)
    _survives(models)


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**31, -(2**31) - 1, 1025, -7])
def test_every_operator_survives_absurd_attributes(number):
    matrix = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2, 2])
    models = []
    for schema in SCHEMAS:
        count, outputs = _usual(schema)
        if schema.attributes:
            model = _of_schema(schema, [matrix] * count, outputs)
            model.graph.node[-1].attribute.extend(_value(declared, number) for declared in schema.attributes.values())
            models.append(model)
    _survives(models)


def test_every_operator_survives_attributes_of_other_types():
    matrix = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2, 2])
    models = []
    for schema in SCHEMAS:
        count, outputs = _usual(schema)
        for value in (1.5, "a", [], helper.make_graph([], "b", [], [])):
            if schema.attributes:
                model = _of_schema(schema, [matrix] * count, outputs)
                for name in schema.attributes:
                    kind = AttributeProto.INTS if value == [] else None
                    model.graph.node[-1].attribute.append(helper.make_attribute(name, value, attr_type=kind))
                models.append(model)
    _survives(models)
