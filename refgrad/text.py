"""A model as text: one line per input, constant, node and output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

_FEW = 6  # elements of a constant that are printed


def as_text(model: ModelProto) -> str:
    """The graph of `model`: what goes in, what each node computes from what, what comes out.

    >>> import onnx.parser
    >>> print(as_text(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> g (float[N] x) => (float[N] y) { y = Mul(x, x) }'
    ... )))
    opset   18
    input   x: float32[N]
            y = Mul(x, x)
    output  y: float32[N]
    """
    opsets = (f"{o.domain} {o.version}" if o.domain else str(o.version) for o in model.opset_import)
    return "\n".join([f"opset   {', '.join(opsets)}", *_graph(model.graph)])


def _graph(graph: GraphProto) -> Iterator[str]:
    yield from (f"input   {_value(value)}" for value in graph.input)
    yield from (f"const   {_constant(tensor)}" for tensor in graph.initializer)
    yield from (f"        {line}" for node in graph.node for line in _node(node))
    yield from (f"output  {_value(value)}" for value in graph.output)


def _value(value: ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    if not tensor.elem_type:
        return f"{value.name}: {value.type.WhichOneof('value') or 'any type'}"
    dims = (str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim)
    return f"{value.name}: {_type(tensor.elem_type)}[{', '.join(dims) if tensor.HasField('shape') else '...'}]"


def _constant(tensor: TensorProto) -> str:
    text = f"{tensor.name}: {_type(tensor.data_type)}[{', '.join(map(str, tensor.dims))}]"
    if tensor.data_location == TensorProto.EXTERNAL:
        return f"{text} in a file of its own"
    if np.prod(tensor.dims, dtype=np.int64) > _FEW:
        return text
    return f"{text} = {numpy_helper.to_array(tensor).tolist()}"


def _type(kind: int) -> str:
    return helper.tensor_dtype_to_np_dtype(kind).name if kind != TensorProto.STRING else "string"


def _node(node: NodeProto) -> Iterator[str]:
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    attributes = (f"{a.name}={_attribute(a)}" for a in node.attribute if not a.HasField("g"))
    arguments = "; ".join(filter(None, (_names(node.input), ", ".join(attributes))))
    yield f"{_names(node.output)} = {operator}({arguments})"
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield f"  {attribute.name}:"
            yield from (f"    {line}" for line in _graph(attribute.g))


def _names(names: Iterable[str]) -> str:
    return ", ".join(name or "-" for name in names)


def _attribute(attribute: object) -> str:
    value = helper.get_attribute_value(attribute)  # type: ignore[arg-type]
    if isinstance(value, TensorProto):
        return str(numpy_helper.to_array(value).tolist())
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
