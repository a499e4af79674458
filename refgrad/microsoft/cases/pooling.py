"""Cases of ONNX Runtime's poolings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from refgrad.conformance.case import NODE, SHAPES, Case
from refgrad.microsoft.cases import case
from refgrad.protos.domains import MICROSOFT

# The shape of the images without their channels, and the windows.
POOLS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 5, 4), {"kernel_shape": [2, 3]}),
    ((2, 5, 4), {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [1, 2, 0, 1]}),
    ((1, 5, 5), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 5, 5), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((1, 5, 5), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "VALID"}),
    ((1, 5), {"kernel_shape": [2], "pads": [1, 0]}),
    ((1, 2, 3, 2), {"kernel_shape": [2, 2, 1]}),
    ((0, 5, 4), {"kernel_shape": [2, 3]}),
)


def cases() -> Iterator[Case]:
    """Every attribute; static, symbolic and unknown shapes."""
    random = np.random.default_rng(6)
    for shapes in SHAPES:
        for image, window in POOLS:
            for kind in (np.uint8, np.int8):
                yield between_floats(image, kind, shapes, **window)
        yield between_floats((1, 5, 4), np.int8, shapes, kernel_shape=[2, 2], strides=[2, 3], ceil_mode=1)
        yield between_floats((1, 5, 4), np.uint8, shapes, kernel_shape=[2, 2], dilations=[2, 3])
        for (batch, *size), window in POOLS:
            mask = (random.random((1, 1, *size)) < 0.7).astype(np.int32) * 2
            yield case("MaxpoolWithMask", apart(batch, 2, *size), mask, shapes=shapes, **window)
        ones, nothing = np.ones((1, 1, 5, 4), np.int32), np.zeros((1, 1, 5, 4), np.int32)
        for mask in (ones, nothing):
            constant = {"constant": ["M"], "storage_order": 1}
            yield case("MaxpoolWithMask", apart(2, 3, 5, 4), mask, shapes=shapes, kernel_shape=[2, 2], **constant)


def apart(*shape: int) -> np.ndarray:
    """Numbers of which no two are near each other."""
    count = int(np.prod(shape))
    return (np.random.default_rng(7).permutation(count).reshape(shape) / 8 - count / 16).astype(np.float32)


def between_floats(image: tuple[int, ...], kind: Any, shapes: str, **window: Any) -> Case:
    """NhwcMaxPool of numbers that are quantised before, and read back behind; none is near halfway between two steps."""
    shape = (*image, 2)
    steps = np.random.default_rng(8).permutation(256)[: int(np.prod(shape))].reshape(shape) + np.iinfo(kind).min
    feeds = {"x": ((steps + 0.2) * 0.5).astype(np.float32)}
    nodes: list[NodeProto] = []
    read = "x"
    if shapes == "unknown":
        feeds["x_shape"], read = np.array(shape), "x_"
        nodes.append(helper.make_node("Reshape", ["x", "x_shape"], ["x_"], allowzero=1))
    nodes += [
        helper.make_node("QuantizeLinear", [read, "scale", "zero"], ["q"]),
        helper.make_node("NhwcMaxPool", ["q"], ["p"], name=NODE, domain=MICROSOFT, **window),
        helper.make_node("DequantizeLinear", ["p", "scale", "zero"], ["y"]),
    ]
    initializers = [
        numpy_helper.from_array(np.array(0.5, np.float32), "scale"),
        numpy_helper.from_array(np.array(0, kind), "zero"),
    ]
    dims = list(shape) if shapes == "static" else [f"x_{axis}" for axis in range(len(shape))]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)]
    if shapes == "unknown":
        inputs.append(helper.make_tensor_value_info("x_shape", TensorProto.INT64, ["rank"]))
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [f"y_{axis}" for axis in range(len(shape))])
    graph = helper.make_graph(nodes, "NhwcMaxPool", inputs, [output], initializers)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    name = "-".join(["NhwcMaxPool", "x".join(map(str, shape)), np.dtype(kind).name, str(window), shapes])
    return Case(name, helper.make_model(graph, opset_imports=imports, ir_version=10), feeds, ("x",))
