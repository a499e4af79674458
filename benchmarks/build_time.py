"""Time to build a gradient, against ONNX Runtime's builder, on chains of MatMul-Add-Relu-Add.

    python benchmarks/build_time.py

Needs onnxruntime-training-cpu==1.19.2. Both read a ModelProto and return the gradient for every weight and the input;
ONNX Runtime's builder takes and returns bytes, so its time includes them.
"""

from __future__ import annotations

import time

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.capi._pybind_state import GradientGraphBuilder
from timing import alternate, save

import refgrad

WIDTH = 8


def chain(nodes: int) -> ModelProto:
    """A chain of `nodes` nodes, MatMul-Add-Relu-Add in turn, each with a weight of its own, and their sum.

    ONNX Runtime's builder starts from a scalar 1 whatever the output is: it wants a scalar output.
    """
    rng = np.random.default_rng(0)
    made, weights, x = [], [], "x"
    for k in range(nodes // 4):
        for name, shape in ((f"w{k}", (WIDTH, WIDTH)), (f"b{k}", (WIDTH,)), (f"c{k}", (1, WIDTH))):
            weights.append(numpy_helper.from_array(rng.standard_normal(shape, dtype=np.float32), name))
        made += [
            helper.make_node("MatMul", [x, f"w{k}"], [f"m{k}"], f"matmul{k}"),
            helper.make_node("Add", [f"m{k}", f"b{k}"], [f"a{k}"], f"add{k}"),
            helper.make_node("Relu", [f"a{k}"], [f"r{k}"], f"relu{k}"),
            helper.make_node("Add", [f"r{k}", f"c{k}"], [f"y{k}"], f"bias{k}"),
        ]
        x = f"y{k}"
    made.append(helper.make_node("ReduceSum", [x], ["loss"], "loss", keepdims=0))
    graph = helper.make_graph(
        made,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, WIDTH])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def onnxruntime_gradient(model: ModelProto) -> None:
    output = model.graph.output[0].name
    wrt = {"x", *(tensor.name for tensor in model.graph.initializer)}
    builder = GradientGraphBuilder(model.SerializeToString(), {output}, wrt, output)
    builder.build()


def main() -> None:
    rows = []
    for dialect in ("onnx", "ort"):
        for nodes, rounds in ((100, 21), (1_000, 9), (4_000, 5), (10_000, 3)):
            model = chain(nodes)
            ours, theirs, ratio = alternate(
                lambda m=model, d=dialect: refgrad.gradient(m, dialect=d),
                lambda m=model: onnxruntime_gradient(m),
                rounds,
            )
            rows.append(
                {
                    "nodes": nodes,
                    "dialect": dialect,
                    "refgrad ms": round(ours * 1e3, 1),
                    "onnxruntime ms": round(theirs * 1e3, 1),
                    "ratio": round(ratio, 2),
                    "µs per node": round(ours / nodes * 1e6, 1),
                }
            )
    model = chain(100_000)
    start = time.perf_counter()
    refgrad.gradient(model)
    seconds = time.perf_counter() - start
    rows.append(
        {
            "nodes": 100_000,
            "dialect": "onnx",
            "refgrad ms": round(seconds * 1e3, 1),
            "µs per node": round(seconds * 10, 1),
            "against 1,000 nodes": round(seconds * 10 / float(rows[1]["µs per node"]), 2),
        }
    )
    save("build_time", rows)


if __name__ == "__main__":
    main()
