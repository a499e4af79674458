"""Calls of onnx's door with a model, for a worker: onnx would end this process."""

from __future__ import annotations

import onnx
from onnx import ModelProto, TypeProto

from refgrad.errors import RefgradError
from refgrad.model import native


def asked(model: ModelProto) -> list[str]:
    """The answer of each function of the door to `model`."""
    said = []
    for ask in (
        native.infer_shapes,
        lambda one: native.infer_shapes(one, check_type=True, strict_mode=True),
        native.check_model,
        lambda one: native.check_model(one, full_check=True),
        native.inline_functions,
        lambda one: native.convert_version(one, 21),
        native.to_text,
    ):
        try:
            ask(model)
            said.append("")
        except MemoryError:
            raise
        except Exception as error:
            said.append(str(error))
    node = model.graph.node[-1]
    types = {value.name: value.type for value in model.graph.input}
    types |= {name: TypeProto() for name in node.input if name not in types}
    opsets = {one.domain: one.version for one in model.opset_import}
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets[node.domain], node.domain)
        native.infer_node_outputs(schema, node, types, {}, opsets)
    except (RefgradError, native.InferenceError, onnx.defs.SchemaError, KeyError) as error:
        said.append(str(error))
    return said
