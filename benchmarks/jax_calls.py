"""What a call from JAX costs beside the run of the session alone: a network of MatMul, Add and Relu, on ONNX Runtime.

    python benchmarks/jax_calls.py

"ms" is a call of the function of JAX on arrays of JAX, until its results are there; "session ms" a run of the same model by an
onnxruntime session with the same options, on NumPy arrays. Both take turns within one run; the medians of the rounds. The
gradient is that of the sum of the squares of the output, by all weights, which are arguments; beside it stand two runs with
the weights as inputs, of the model and of the model of its gradient, which is what the call does. Needs jax and onnxruntime.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper
from timing import save

import refgrad
import refgrad.jax
from refgrad.model.reading import skeleton_of

ROUNDS, GOAL = 1000, 0.3
SIZES = {"small": (8, (100, 50, 10)), "large": (64, (784, 512, 256, 10))}


def network(sizes: tuple[int, ...]) -> ModelProto:
    """The network, its batch of any size."""
    rng = np.random.default_rng(0)
    nodes, tensors, x = [], [], "x"
    for k, (inner, outer) in enumerate(pairwise(sizes)):
        tensors.append(numpy_helper.from_array((rng.normal(size=(inner, outer)) / inner**0.5).astype("f4"), f"w{k}"))
        tensors.append(numpy_helper.from_array(np.zeros(outer, "f4"), f"b{k}"))
        nodes.append(helper.make_node("MatMul", [x, f"w{k}"], [f"m{k}"], f"MatMul{k}"))
        nodes.append(helper.make_node("Add", [f"m{k}", f"b{k}"], [f"a{k}"], f"Add{k}"))
        nodes.append(helper.make_node("Relu", [f"a{k}"], [x := f"r{k}"], f"Relu{k}"))
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, ["N", sizes[0]])], [value(x, TensorProto.FLOAT, ["N", sizes[-1]])]
    graph = helper.make_graph(nodes, "mlp", *ends, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    """A session whose threads do not spin, as those of refgrad.jax."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def turns(ours: Callable[[], Any], theirs: Callable[[], Any]) -> dict[str, Any]:
    """Both in turn."""
    jax.block_until_ready(ours()), theirs()
    pairs = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(ours())
        middle = time.perf_counter()
        theirs()
        pairs.append((1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)))
    over = statistics.median(a - b for a, b in pairs)
    return {
        "ms": round(statistics.median(a for a, _ in pairs), 3),
        "session ms": round(statistics.median(b for _, b in pairs), 3),
        "over ms": round(over, 3),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }


def main() -> None:
    rows = []
    for size, (batch, sizes) in SIZES.items():
        model = network(sizes)
        f, g = refgrad.jax.function(model), refgrad.jax.function(model, trainable=True)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(batch, sizes[0])), jnp.float32)
        fed = {"x": np.asarray(x)} | {name: np.asarray(value) for name, value in g.params.items()}
        alone = session(model)
        forward = session(skeleton_of(model, {tensor.name: tensor for tensor in model.graph.initializer}))
        backward = session(refgrad.gradient(model, list(g.params), weights="inputs"))
        called = jax.jit(f)
        stepped = jax.jit(jax.grad(lambda params, x, g=g: (g(params, x) ** 2).sum()))

        def one(alone: Any = alone, x: np.ndarray = fed["x"]) -> list[Any]:
            return alone.run(None, {"x": x})

        def both(forward: Any = forward, backward: Any = backward, fed: Any = fed) -> list[Any]:
            (y,) = forward.run(None, fed)
            return backward.run(None, fed | {f"{forward.get_outputs()[0].name}_grad": 2 * y})

        for what, ours, theirs in (
            ("under jit", partial(called, x), one),
            ("outside of jit", partial(f, x), one),
            ("gradient under jit", partial(stepped, g.params, x), both),
        ):
            layers = "-".join(map(str, sizes))
            rows.append({"network": f"{size}, {batch} x {layers}", "call": what} | turns(ours, theirs))
    save("jax_calls", rows)
    print(f"under jit at most {max(r['over ms'] for r in rows if 'under' in r['call'])} ms; the goal is {GOAL} ms")


if __name__ == "__main__":
    main()
