"""Models of layers, and the memory that a run of one takes."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

from refgrad.backends import get_backend


def parsed(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]> {text}')


def measured(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> int:
    """The most bytes that a run of the interpreter holds beyond what was there before it."""
    prepared = get_backend("numpy").prepare(model)
    prepared.run(feeds)
    gc.collect()
    tracemalloc.start()
    try:
        results = prepared.run(feeds)
        assert results
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, taken = np.random.default_rng(0), {tensor.name for tensor in model.graph.initializer}
    tensors = {v.name: v.type.tensor_type for v in model.graph.input if v.name not in taken}
    shapes = {name: [d.dim_value for d in tensor.shape.dim] for name, tensor in tensors.items()}
    kinds = {name: helper.tensor_dtype_to_np_dtype(tensor.elem_type) for name, tensor in tensors.items()}
    return {name: rng.uniform(0.5, 1, shape).astype(kinds[name]) for name, shape in shapes.items()}


def layers(count: int = 3, width: int = 128) -> onnx.ModelProto:
    """A transformer with small layers, and the mean of the squares as the loss."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"

    def node(op_type: str, *inputs: str, **settings) -> str:
        name = f"{op_type}_{len(nodes)}"
        nodes.append(helper.make_node(op_type, inputs, [name], name=name, **settings))
        return name

    def weight(*shape: int) -> str:
        name = f"w{len(weights)}"
        weights.append(numpy_helper.from_array(rng.uniform(-0.1, 0.1, shape).astype(np.float32), name))
        return name

    for _ in range(count):
        y = node("LayerNormalization", x, weight(width), weight(width))
        scores = node("Softmax", node("MatMul", y, node("Transpose", y, perm=[0, 2, 1])))
        x = node("Add", x, node("MatMul", node("MatMul", scores, y), weight(width, width)))
        up = node("Gelu", node("MatMul", x, weight(width, 4 * width)))
        x = node("Add", x, node("MatMul", up, weight(4 * width, width)))
    nodes.append(helper.make_node("ReduceMean", [node("Mul", x, x)], ["loss"], keepdims=0))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "layers",
        [value("x", TensorProto.FLOAT, [4, 128, width])],
        [value("loss", TensorProto.FLOAT, [])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
