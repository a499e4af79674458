"""A graph in double: its types, its constants, and the types in its attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TypeProto, helper, numpy_helper

from refgrad.backends.numpy.precision import Float64
from refgrad.model.external import array_of
from refgrad.protos.traverse import subgraphs
from refgrad.protos.types import FLOATS

DOUBLE = Float64()
NARROW = FLOATS - {onnx.TensorProto.DOUBLE}


def schema_of(node: NodeProto, versions: Mapping[str, int]) -> Any:
    """The schema of a node's operator, None where onnx has none. (The stubs lack its function bodies.)"""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = versions.get(domain, 1)
    return onnx.defs.get_schema(node.op_type, version, domain) if onnx.defs.has(node.op_type, version, domain) else None


def widen(graph: GraphProto, opsets: Mapping[str, int]) -> None:
    """Make every float type, constant and Cast of a graph double, in place."""
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        _widen_type(value.type)
    for tensor in graph.initializer:
        if tensor.data_type in NARROW:
            tensor.CopyFrom(numpy_helper.from_array(DOUBLE.tensor(tensor), tensor.name))
    for sparse in graph.sparse_initializer:
        wide = DOUBLE.array(array_of(sparse.values))
        sparse.values.CopyFrom(numpy_helper.from_array(wide, sparse.values.name))
    for node in graph.node:
        widen_node(node, opsets)


def _widen_type(kind: TypeProto) -> None:
    match kind.WhichOneof("value"):
        case "tensor_type":
            if kind.tensor_type.elem_type in NARROW:
                kind.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        case "sequence_type":
            _widen_type(kind.sequence_type.elem_type)
        case "optional_type":
            _widen_type(kind.optional_type.elem_type)


def widen_node(node: NodeProto, opsets: Mapping[str, int]) -> None:
    """Make every float type and constant in the attributes of a node double, in place."""
    if node.op_type == "Constant" and not node.domain:
        for attribute in node.attribute:
            if attribute.name in ("value_float", "value_floats"):
                value = np.array(helper.get_attribute_value(attribute), np.float64)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))
            elif attribute.name == "value" and attribute.t.data_type in NARROW:
                attribute.t.CopyFrom(numpy_helper.from_array(DOUBLE.tensor(attribute.t)))
        return
    wide = DOUBLE.node(node, schema_of(node, opsets))
    if wide is not node:
        node.CopyFrom(wide)
    for attribute in node.attribute:
        if (
            attribute.name == "stash_type"
        ):  # bodies and implementations know float32 alone: its Cast is widened, or there is none
            attribute.i = onnx.TensorProto.FLOAT
        for inner in subgraphs(attribute):
            widen(inner, opsets)
