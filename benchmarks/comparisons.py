"""What other differentiators of ONNX models answer on eight small models: for docs/comparisons.md.

python benchmarks/comparisons.py refgrad           # first: the others are compared with its gradients
python benchmarks/comparisons.py onnx-ad           # in an environment that has this package, onnx and onnxruntime
python benchmarks/comparisons.py onnxruntime-training | onnxsim | jaxonnxruntime

Each tool is asked for the gradient of a sum by one float tensor: a weight, or an input where a model has no weights. It is
called as its documentation says. refgrad's answer is "right" where `refgrad check`, which asks finite differences, says so.
Another's is "right" within 1e-4 of refgrad's gradient, "wrong", or what the tool says when it refuses.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

RESULTS = Path(__file__).resolve().parents[1] / "reports" / "results" / "comparisons.json"
LAYER = "w = {1, -1, 0.5, 0, 2, -1}"
MODELS = {  # of each model: its opset, its graph, the tensor to differentiate by
    "a layer": (
        17,
        f"g (float[4,2] x) => (float loss) <float[2,3] {LAYER}> "
        "{ z = MatMul(x, w) h = Tanh(z) s = Mul(h, h) loss = ReduceSum<keepdims=0>(s) }",
        "w",
    ),
    "a batch of any size": (
        17,
        f"g (float[N,2] x) => (float loss) <float[2,3] {LAYER}, float[3] b = {{0, 1, 2}}> "
        "{ z = MatMul(x, w) a = Add(z, b) h = Tanh(a) s = Mul(h, h) loss = ReduceSum<keepdims=0>(s) }",
        "b",
    ),
    "opset 21": (
        21,
        f"g (float[4,2] x) => (float loss) <float[2,3] {LAYER}> "
        "{ z = MatMul(x, w) h = Tanh(z) s = Mul(h, h) loss = ReduceSum<keepdims=0>(s) }",
        "w",
    ),
    "Gelu": (20, "g (float[4,3] x) => (float loss) { h = Gelu(x) s = Mul(h, h) loss = ReduceSum<keepdims=0>(s) }", "x"),
    "LSTM": (
        17,
        "g (float[3,2,2] x, float[1,8,2] w, float[1,8,2] r) => (float loss) "
        "{ y = LSTM<hidden_size=2>(x, w, r) s = Mul(y, y) loss = ReduceSum<keepdims=0>(s) }",
        "x",
    ),
    "If": (
        17,
        "g (float[3] x, bool c) => (float loss) { y = If(c) <then_branch = t () => (float[3] a) { a = Exp(x) }, "
        "else_branch = e () => (float[3] b) { b = Sin(x) }> loss = ReduceSum<keepdims=0>(y) }",
        "x",
    ),
    "Loop": (
        17,
        "g (float[3] x, int64 n) => (float loss) { c = Constant<value = bool {1}>() y = Loop(n, c, x) "
        "<body = b (int64 i, bool c_in, float[3] v) => (bool c_out, float[3] w) { c_out = Identity(c_in) w = Sin(v) }> "
        "loss = ReduceSum<keepdims=0>(y) }",
        "x",
    ),
    "double precision": (17, "g (double[4,2] x) => (double loss) { h = Tanh(x) loss = ReduceSum<keepdims=0>(h) }", "x"),
}
DISTRIBUTIONS = {"onnxruntime-training": "onnxruntime-training-cpu"}
Feeds = dict[str, np.ndarray]


def model(name: str) -> tuple[onnx.ModelProto, str, Feeds]:
    """A model of the table, the tensor to differentiate by, and its feeds."""
    opset, graph, wrt = MODELS[name]
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> {graph}')
    rng = np.random.default_rng(0)
    feeds: Feeds = {"c": np.array(True), "n": np.array(2, np.int64)}
    for value in made.graph.input:
        if value.name not in feeds:
            kind = value.type.tensor_type
            shape = [dim.dim_value or 4 for dim in kind.shape.dim]
            feeds[value.name] = rng.standard_normal(shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return made, wrt, {value.name: feeds[value.name] for value in made.graph.input}


def by_refgrad(made: onnx.ModelProto, wrt: str, feeds: Feeds) -> np.ndarray:
    """refgrad.gradient, on its interpreter."""
    import refgrad
    from refgrad.backends import get_backend

    gradient = refgrad.gradient(made, [wrt], cotangent="ones")
    return np.asarray(get_backend("numpy").prepare(gradient).run(feeds)[f"{wrt}_grad"])


def by_onnx_ad(made: onnx.ModelProto, wrt: str, feeds: Feeds) -> np.ndarray:
    """onnx_ad.reverse, which differentiates by inputs: a weight is made one first. ONNX Runtime runs the result."""
    import onnx_ad
    import onnxruntime

    feeds = dict(feeds)
    for weight in [one for one in made.graph.initializer if one.name == wrt]:
        feeds[wrt] = onnx.numpy_helper.to_array(weight)
        made.graph.initializer.remove(weight)
        made.graph.input.append(onnx.helper.make_tensor_value_info(wrt, weight.data_type, list(weight.dims)))
    gradient = onnx_ad.reverse(made, inputs=[wrt])
    seeds = [value for value in gradient.graph.input if value.name not in feeds]
    kinds = {value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in seeds}
    ones = {v.name: np.ones([d.dim_value or 1 for d in v.type.tensor_type.shape.dim], kinds[v.name]) for v in seeds}
    session = onnxruntime.InferenceSession(gradient.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run([f"adj_{wrt}"], feeds | ones)[0]).reshape(feeds[wrt].shape)


def by_onnxruntime(made: onnx.ModelProto, wrt: str, feeds: Feeds) -> np.ndarray:
    """The GradientGraphBuilder of the training wheel, run by the same wheel."""
    import onnxruntime
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    onnxruntime.set_default_logger_severity(4)
    builder = GradientGraphBuilder(made.SerializeToString(), {"loss"}, {wrt}, "loss")
    builder.build()
    session = onnxruntime.InferenceSession(builder.get_model(), providers=["CPUExecutionProvider"])
    weights = {one.name: onnx.numpy_helper.to_array(one) for one in made.graph.initializer}
    known = feeds | weights
    return np.asarray(session.run([f"{wrt}_grad"], {v.name: known[v.name] for v in session.get_inputs()})[0])


def by_onnxsim(made: onnx.ModelProto, wrt: str, feeds: Feeds) -> np.ndarray:
    """What the first step of onnxsim.compile_training_loop takes off a weight: an input is made one first."""
    import onnxsim

    feeds = dict(feeds)
    for value in [one for one in made.graph.input if one.name == wrt]:
        made.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop(wrt), wrt))
        made.graph.input.remove(value)
    before = next(onnx.numpy_helper.to_array(one) for one in made.graph.initializer if one.name == wrt)
    loop = onnxsim.compile_training_loop(made, "loss", [wrt], "sgd_momentum")
    loop(feeds, 1.0)
    return before - np.asarray(loop.parameters()[wrt])


def by_jax(made: onnx.ModelProto, wrt: str, feeds: Feeds) -> np.ndarray:
    """jax.grad of what jaxonnxruntime makes of the model."""
    import jax
    from jaxonnxruntime.call_onnx import call_onnx_model

    jax.config.update("jax_enable_x64", True)
    function, weights = call_onnx_model(made, feeds)
    known = {**weights, **feeds}

    def loss(value: Any) -> Any:
        if wrt in weights:
            return function({**weights, wrt: value}, feeds)[0].sum()
        return function(weights, {**feeds, wrt: value})[0].sum()

    return np.asarray(jax.grad(loss)(known[wrt]))


TOOLS: dict[str, Callable[[onnx.ModelProto, str, Feeds], np.ndarray]] = {
    "refgrad": by_refgrad,
    "onnx-ad": by_onnx_ad,
    "onnxruntime-training": by_onnxruntime,
    "onnxsim": by_onnxsim,
    "jaxonnxruntime": by_jax,
}


def confirmed(name: str) -> str:
    """Say whether finite differences confirm refgrad's gradient on the interpreter."""
    from refgrad.conformance import check

    made, wrt, feeds = model(name)
    return "right" if check(made, feeds, wrt=[wrt], backends=["numpy"]).ok else "wrong"


def answer(task: tuple[str, str]) -> Any:
    """The gradient as a nested list, or the first line of the tool's message."""
    tool, name = task
    try:
        return TOOLS[tool](*model(name)).tolist()
    except Exception as error:  # whatever a tool raises
        said = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {said.rpartition(' was false. ')[2].rpartition(' : ')[2].strip()}"


def main() -> None:
    """Ask the tool that is named on the command line, each time in a process of its own, and add its answers to the results."""
    [tool] = sys.argv[1:]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    row: dict[str, Any] = {"version": metadata.version(DISTRIBUTIONS.get(tool, tool))}
    gradients = results.setdefault("gradients", {})  # refgrad's
    for name in MODELS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            try:
                found = pool.apply_async(answer, ((tool, name),)).get(120)
            except multiprocessing.TimeoutError:
                found = "it ends the process, or takes more than two minutes"
        if tool == "refgrad":
            gradients[name], found = found, confirmed(name)
        elif not isinstance(found, str):
            expected = np.array(gradients[name])
            same = np.shape(found) == expected.shape and np.allclose(found, expected, rtol=1e-4, atol=1e-5)
            found = "right" if same else "wrong"
        row[name] = found
        print(tool, name, str(found)[:100], flush=True)
    RESULTS.write_text(json.dumps({**results, tool: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
