"""Peak memory and time of a gradient that keeps its values, and of ones that compute them again (`recompute`).

    python benchmarks/recompute.py

A transformer of 48 layers, a layer of attention to 2,048 tokens and a Scan, on ONNX Runtime and on the interpreter.
Memory is what a run adds to the process, without weights and feeds, with the gradients that it returns: on ONNX Runtime
the peak of the resident set in a process of its own, on the interpreter the bytes that Python allocates. Time is that
of the processor, with one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from interpreter_memory import peak as interpreter_peak
from memory import current, peak_since
from onnx import ModelProto, TensorProto, helper, numpy_helper
from timing import save

import refgrad
from refgrad.backends import get_backend

MIB = 2**20


@dataclass(frozen=True)
class Config:
    """The sizes of a transformer."""

    layers: int = 48
    hidden: int = 256
    heads: int = 4
    sequence: int = 256
    batch: int = 2
    seed: int = 0


class _Writer:
    """Nodes and weights of a model, written one after the other."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.scope = ""

    def weight(self, name: str, *shape: int, scale: float = 0.0, shift: float = 0.0) -> str:
        array = (shift + scale * self._rng.standard_normal(shape)).astype(np.float32)
        return self.constant(f"{self.scope}/{name}", array)

    def constant(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        name = f"{self.scope}/{name or op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name


def transformer(config: Config) -> ModelProto:
    """Layers of attention and a feed-forward network before a normalization each; the loss is the mean of the squares."""
    w, width = _Writer(config.seed), config.hidden
    split = w.constant("split", np.array([0, 0, config.heads, width // config.heads], np.int64))
    joined = w.constant("joined", np.array([0, 0, width], np.int64))
    scale = w.constant("scale", np.array((width // config.heads) ** -0.5, np.float32))

    def normalized(x: str, name: str) -> str:
        return w.node(
            "LayerNormalization",
            x,
            w.weight(f"{name}.scale", width, shift=1.0),
            w.weight(f"{name}.bias", width),
            axis=-1,
        )

    def linear(x: str, name: str, before: int, after: int) -> str:
        made = w.node("MatMul", x, w.weight(f"{name}.weight", before, after, scale=before**-0.5))
        return w.node("Add", made, w.weight(f"{name}.bias", after))

    x = "x"
    for layer in range(config.layers):
        w.scope = f"/layers.{layer}"
        y = normalized(x, "before_attention")
        q, k, v = (
            w.node("Transpose", w.node("Reshape", linear(y, name, width, width), split), perm=perm)
            for name, perm in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3)))
        )
        scores = w.node("Softmax", w.node("Mul", w.node("MatMul", q, k), scale), axis=-1)
        read = w.node("Transpose", w.node("MatMul", scores, v), perm=(0, 2, 1, 3))
        x = w.node("Add", x, linear(w.node("Reshape", read, joined), "o", width, width))
        y = w.node("Gelu", linear(normalized(x, "before_network"), "up", width, 4 * width), approximate="tanh")
        x = w.node("Add", x, linear(y, "down", 4 * width, width))
    w.scope = ""
    w.nodes.append(helper.make_node("ReduceMean", [w.node("Mul", x, x)], ["loss"], name="/loss", keepdims=0))
    value = helper.make_tensor_value_info
    sizes = [config.batch, config.sequence, width]
    graph = helper.make_graph(
        w.nodes,
        "transformer",
        [value("x", TensorProto.FLOAT, sizes)],
        [value("loss", TensorProto.FLOAT, [])],
        w.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def scan(steps: int = 128, batch: int = 64, hidden: int = 256, seed: int = 0) -> ModelProto:
    """A state that a gate mixes with what a network makes of it, step by step; the loss is the mean of its squares."""
    w, value = _Writer(seed), helper.make_tensor_value_info
    gate, up, down = (
        w.weight(name, before, after, scale=before**-0.5)
        for name, before, after in (("gate", hidden, hidden), ("up", hidden, 4 * hidden), ("down", 4 * hidden, hidden))
    )
    outer, w.nodes = w.nodes, []
    kept = w.node("Sigmoid", w.node("MatMul", "h", gate))
    made = w.node("Tanh", w.node("MatMul", w.node("Gelu", w.node("MatMul", w.node("Add", "h", "x_t"), up)), down))
    mixed = w.node("Add", made, w.node("Mul", kept, w.node("Sub", "h", made)))
    state = [batch, hidden]
    body = helper.make_graph(
        w.nodes,
        "step",
        [value("h", TensorProto.FLOAT, state), value("x_t", TensorProto.FLOAT, state)],
        [value(mixed, TensorProto.FLOAT, state)],
    )
    w.nodes = outer
    w.nodes.append(helper.make_node("Scan", ["start", "x"], ["last"], name="/scan", body=body, num_scan_inputs=1))
    w.nodes.append(helper.make_node("ReduceMean", [w.node("Mul", "last", "last")], ["loss"], name="/loss", keepdims=0))
    inputs = [value("start", TensorProto.FLOAT, state), value("x", TensorProto.FLOAT, [steps, *state])]
    graph = helper.make_graph(w.nodes, "scan", inputs, [value("loss", TensorProto.FLOAT, [])], w.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def attention(length: int = 2048, width: int = 512, heads: int = 8, seed: int = 0) -> ModelProto:
    """A layer of attention with its four projections; the loss is the mean of the squares."""
    w = _Writer(seed)
    split = w.constant("split", np.array([0, 0, heads, width // heads], np.int64))
    joined = w.constant("joined", np.array([0, 0, width], np.int64))
    scale = w.constant("scale", np.array((width // heads) ** -0.5, np.float32))

    def linear(x: str, name: str) -> str:
        return w.node("MatMul", x, w.weight(f"{name}.weight", width, width, scale=width**-0.5))

    q, k, v = (
        w.node("Transpose", w.node("Reshape", linear("x", name), split), perm=perm)
        for name, perm in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3)))
    )
    shares = w.node("Softmax", w.node("Mul", w.node("MatMul", q, k), scale), axis=-1)
    read = w.node("Transpose", w.node("MatMul", shares, v), perm=(0, 2, 1, 3))
    y = linear(w.node("Reshape", read, joined), "o")
    w.nodes.append(helper.make_node("ReduceMean", [w.node("Mul", y, y)], ["loss"], name="/loss", keepdims=0))
    value = helper.make_tensor_value_info
    x, loss = value("x", TensorProto.FLOAT, [1, length, width]), value("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(w.nodes, "attention", [x], [loss], w.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def feeds_for(model: ModelProto) -> dict[str, np.ndarray]:
    """Random inputs, and 1 for the cotangent of the loss."""
    rng = np.random.default_rng(0)
    shapes = {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in model.graph.input}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return feeds | {"loss_grad": np.ones((), np.float32)}


def measured(backend: str, model: bytes, feeds: dict[str, np.ndarray]) -> tuple[float, float]:
    """The MiB that a run adds at its peak, and the processor seconds of a later one."""
    prepared = get_backend(backend).prepare(
        onnx.load_model_from_string(model), **({} if backend == "numpy" else {"threads": 1})
    )
    if backend == "numpy":
        most = interpreter_peak(onnx.load_model_from_string(model), feeds) / MIB
    else:
        before = current()
        prepared.run(feeds)
        most = peak_since(before)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        prepared.run(feeds)
        seconds.append(time.process_time() - start)
    return most, statistics.median(seconds)


def rows(name: str, model: ModelProto, choices: dict[str, bool | list[str]]) -> list[dict[str, Any]]:
    """Every choice of what is computed again, on both backends, against the gradient that keeps its values."""
    made = {what: refgrad.gradient(model, recompute=choice).SerializeToString() for what, choice in choices.items()}
    feeds = feeds_for(model)
    found = []
    for backend in ("ort-cpu", "numpy"):
        stored: tuple[float, float] | None = None
        for what, gradient in made.items():
            with multiprocessing.get_context("spawn").Pool(1) as one:
                most, seconds = one.apply(measured, (backend, gradient, feeds))
            row = {"model": name, "on": backend, "computed again": what, "peak MiB": round(most)}
            if stored is None:
                stored = most, seconds
            else:
                row |= {"memory ratio": round(most / stored[0], 2), "time ratio": round(seconds / stored[1], 2)}
            found.append(row)
    return found


def main() -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # for the processes that measure
    config = Config()
    by_layer = [f"/layers.{layer}/*" for layer in range(config.layers)]
    save(
        "recompute",
        [
            *rows("transformer", transformer(config), {"nothing": False, "True": True, "by layer": by_layer}),
            *rows("attention", attention(), {"nothing": False, "True": True}),
            *rows("Scan", scan(), {"nothing": False, "True": True}),
        ],
    )


if __name__ == "__main__":
    main()
