"""Running time of forward plus backward for the input and all weights.

    python examples/torch_models.py FOLDER
    python benchmarks/run_time.py FOLDER        # which comparison depends on what is installed

With onnxruntime-training-cpu: both dialects against the graph of ONNX Runtime's own builder, on the same wheel. With
onnxruntime and torch: dialect "onnx" against torch eager. Two threads each.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from timing import alternate_processes, save

import refgrad

THREADS = 2
ROUNDS = 15


def runner(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Callable[[], Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    taken = {name.name for name in session.get_inputs()}
    fed = {name: value for name, value in feeds.items() if name in taken}
    return lambda: session.run(None, fed)


def load(folder: Path, name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[str]]:
    """The model, its feeds with the cotangent, and what to differentiate with respect to."""
    model = onnx.load(folder / f"{name}.onnx")
    model.ir_version = min(model.ir_version, 10)
    data = np.load(folder / f"{name}.npz")
    feeds = {key.partition("/")[2]: data[key] for key in data if key.startswith(("feed/", "cotangent/"))}
    wrt = [key.removeprefix("float32/").removesuffix("_grad") for key in data if key.startswith("float32/")]
    return model, feeds, wrt


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each BatchNormalization folded into the Conv before it: ONNX Runtime's builder has no rule for it."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    conv = {node.output[0]: node for node in model.graph.node if node.op_type == "Conv"}
    for node in [node for node in model.graph.node if node.op_type == "BatchNormalization"]:
        scale, bias, mean, var = (numpy_helper.to_array(weights[name]) for name in node.input[1:])
        epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        factor = scale / np.sqrt(var + epsilon)
        producer = conv[node.input[0]]
        kernel = weights[producer.input[1]]
        value = numpy_helper.to_array(kernel) * factor.reshape(-1, 1, 1, 1)
        kernel.CopyFrom(numpy_helper.from_array(value.astype(np.float32), kernel.name))
        shift = weights[node.input[2]]
        shift.CopyFrom(numpy_helper.from_array((bias - mean * factor).astype(np.float32), shift.name))
        producer.input.append(shift.name)
        producer.output[0] = node.output[0]
        model.graph.node.remove(node)
    return model


def with_loss(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the scalar loss Σ output·weight: ONNX Runtime's builder wants a scalar."""
    output = model.graph.output[0]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    value = graph.input.add()
    value.CopyFrom(output)
    value.name = "weight"
    graph.node.append(onnx.helper.make_node("Mul", [output.name, "weight"], ["weighted"], "weighted"))
    graph.node.append(onnx.helper.make_node("ReduceSum", ["weighted"], ["loss"], "loss", keepdims=0))
    graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    return result


def onnxruntime_gradient(model: onnx.ModelProto, wrt: list[str]) -> onnx.ModelProto:
    """ONNX Runtime's own graph, the weights inputs with a default as in ours: a constant one would be packed beforehand."""
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    builder = GradientGraphBuilder(model.SerializeToString(), {"loss"}, set(wrt), "loss")
    builder.build()
    with tempfile.TemporaryDirectory() as folder:
        builder.save(f"{folder}/grad.onnx")
        gradient = onnx.load(f"{folder}/grad.onnx")
    inputs = {value.name for value in gradient.graph.input}
    gradient.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in gradient.graph.initializer
        if tensor.name in wrt and tensor.name not in inputs
    )
    return gradient


def prepared(folder: Path, name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[str]]:
    """The model as ONNX Runtime's builder can differentiate it."""
    model, feeds, wrt = load(folder, name)
    feeds["weight"] = feeds.pop(f"{model.graph.output[0].name}_grad")
    model = with_loss(folded(model))
    read = {key for node in model.graph.node for key in node.input}
    return model, feeds, [key for key in wrt if key in read]


def ours_on_wheel(folder: Path, name: str, dialect: str) -> Callable[[], Any]:
    model, feeds, wrt = prepared(folder, name)
    return runner(refgrad.gradient(model, wrt=wrt, dialect=dialect, cotangent="ones"), feeds)


def theirs_on_wheel(folder: Path, name: str, dialect: str) -> Callable[[], Any]:
    model, feeds, wrt = prepared(folder, name)
    return runner(onnxruntime_gradient(model, wrt), feeds)


def ours_on_stock(folder: Path, name: str) -> Callable[[], Any]:
    model, feeds, wrt = load(folder, name)
    return runner(refgrad.gradient(model, wrt=wrt, keep_outputs=True), feeds)


def torch_eager(folder: Path, name: str) -> Callable[[], Any]:
    import torch
    from torch_models import build

    torch.set_num_threads(THREADS)
    _, feeds, _ = load(folder, name)
    module, inputs = build(name)
    inputs = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in inputs.items()}
    leaves = [x for x in inputs.values() if x.requires_grad] + list(module.parameters())
    cotangent = torch.from_numpy(feeds["output_grad"])
    return lambda: torch.autograd.grad(module(**inputs), leaves, cotangent)


def against_builder(folder: Path) -> None:
    rows = []
    for name in ("mlp", "resnet18"):
        for dialect in ("ort", "onnx"):
            times = alternate_processes(ours_on_wheel, theirs_on_wheel, (folder, name, dialect), ROUNDS)
            rows.append(row(name, dialect, "onnxruntime's graph", times))
    save("run_time_builder", rows)


def against_torch(folder: Path) -> None:
    rows = []
    for name in ("mlp", "resnet18", "bert", "gpt2"):
        times = alternate_processes(ours_on_stock, torch_eager, (folder, name), ROUNDS)
        rows.append(row(name, "onnx", "torch eager", times))
    save("run_time_torch", rows)


def row(name: str, dialect: str, other: str, times: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "model": name,
        "dialect": dialect,
        "against": other,
        "refgrad ms": round(times[0] * 1e3, 2),
        "other ms": round(times[1] * 1e3, 2),
        "ratio": round(times[2], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where examples/torch_models.py wrote the models")
    folder = parser.parse_args().folder
    if hasattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder"):
        against_builder(folder)
    else:
        against_torch(folder)


if __name__ == "__main__":
    main()
