"""The sizes of cotangents, which follow from the sizes of the inputs.

An output often declares sizes of its own, such as `unk__12`. A gradient does not compute every output, so its metadata hold the
nodes that lead from what it computes to such outputs. Their shapes are inferred where sizes are asked for.
"""

from __future__ import annotations

import base64
import json

from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto

from refgrad.protos.documents import parse_json, typed

_KEY = "refgrad.way_to_outputs"
_LARGEST = 1 << 16  # bytes


def put_way(gradient: ModelProto, way: GraphProto) -> None:
    """Write the nodes that lead to the outputs into the metadata of a gradient, if there are some and they are not too many."""
    if way.node and way.ByteSize() <= _LARGEST:
        gradient.metadata_props.add(key=_KEY, value=json.dumps(base64.b64encode(way.SerializeToString()).decode()))


def with_way(model: ModelProto, skeleton: ModelProto) -> ModelProto:
    """A copy of `skeleton`, the graph of `model`, that computes the outputs to which its cotangents belong.

    Metadata that are no such nodes, or that the graph contradicts, are ignored.
    """
    copy = ModelProto()
    copy.CopyFrom(skeleton)
    text = next((entry.value for entry in model.metadata_props if entry.key == _KEY), '""')
    try:
        data = typed(parse_json(text), str, "it") if len(text) <= 2 * _LARGEST else ""
        way = GraphProto.FromString(base64.b64decode(data, validate=True))
    except (DecodeError, ValueError):
        return copy
    graph = copy.graph
    taken = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    taken |= {name for node in graph.node for name in node.output}
    graph.input.extend(value for value in way.input if value.name not in taken)
    graph.initializer.extend(tensor for tensor in way.initializer if tensor.name not in taken)
    graph.node.extend(node for node in way.node if taken.isdisjoint(node.output))
    return copy
