"""Peak memory of `refgrad train` beside frozen weights in a file, and whether only the trained weights differ in the result.

    python benchmarks/training_memory.py

Low-rank adapters of all weights but the head, and the head alone, in two steps of 32 samples, with Adam. Each command runs by
itself, and the peak is the resident memory of its largest process (getrusage).
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper
from timing import save

MIB = 2**20
ROWS, CLASSES = 32, 10
MODELS = ((16, 2048), (12, 8192), (1, 23600))  # layers, width; the last one has a tensor of more than 2 GiB
TRAINED = {"adapters": ["--lora", "body.*"], "head": ["--trainable", "head.*"]}
RUNTIMES = {"ort-cpu": "onnxruntime", "numpy": "numpy"}  # the name that refgrad.cost has for each


def write(folder: str, layers: int, width: int) -> None:
    """Write a chain of products with a head, its weights in a file, and data."""
    draw, nodes, tensors, x = np.random.default_rng(0), [], [], "x"
    shapes = {f"body.{k}.w": (width, width) for k in range(layers)} | {"head.w": (width, CLASSES)}
    with Path(folder, "model.data").open("wb") as file:
        for name, shape in shapes.items():
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
            size = 4 * math.prod(shape)
            for key, value in (("location", "model.data"), ("offset", file.tell()), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            for _ in range(shape[0]):
                file.write((draw.standard_normal(shape[1], np.float32) / np.float32(width**0.5)).tobytes())
            nodes.append(helper.make_node("MatMul", [x, name], [f"{name}.product"]))
            if name != "head.w":
                nodes.append(helper.make_node("Tanh", [f"{name}.product"], [f"{name}.result"]))
            x = nodes[-1].output[0]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", w]) for n, w in (("x", width), (x, CLASSES))]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], tensors)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), Path(folder, "model.onnx")
    )
    x = draw.standard_normal((2 * ROWS, width), np.float32)
    np.savez(Path(folder, "data.npz"), x=x, label=draw.integers(0, CLASSES, 2 * ROWS))


def predict(path: str, trained: str, runtime: str) -> float:
    """The MiB of a step without the frozen weights, as `refgrad.cost` predicts them."""
    import refgrad
    from refgrad.training import AdamW, lora, step_model

    model = lora(path, ["body.*"]) if trained == "adapters" else path
    trainable = None if trained == "adapters" else ["head.*"]
    step = step_model(model, "cross_entropy", AdamW(), trainable=trainable, data_beside=path)
    cost = refgrad.cost(step.model, {"N": ROWS}, runtime=runtime)
    return (cost.peak + cost.feeds) / MIB


def run(folder: str, trained: str, backend: str) -> tuple[float, float]:
    """The peak of the command in MiB, and its seconds."""
    start = time.perf_counter()
    command = (
        f"-m refgrad train model.onnx --data data.npz --loss cross_entropy --epochs 1 --backend {backend} --rate 0.01"
    )
    words = [sys.executable, *command.split(), *TRAINED[trained], "-o", "result.onnx"]
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, time.perf_counter() - start


def refuse_other_changes(folder: str, trained: str) -> None:
    """Raise if other weights than the trained ones differ, or one of these does not."""
    from refgrad.model.external import ExternalData, values_of

    def tensors(name: str) -> dict[str, TensorProto]:
        model: ModelProto = onnx.load(Path(folder, name), load_external_data=False)
        return {tensor.name: tensor for tensor in model.graph.initializer}

    before, after = tensors("model.onnx"), tensors("result.onnx")
    if before.keys() != after.keys():
        raise AssertionError(f"{before.keys()} became {after.keys()}")
    with ExternalData(Path(folder, "model.onnx")) as old, ExternalData(Path(folder, "result.onnx")) as new:
        for name, tensor in before.items():
            is_trained = name.startswith("body." if trained == "adapters" else "head.")
            if np.array_equal(values_of(tensor, old), values_of(after[name], new)) == is_trained:
                raise AssertionError(f"{name} {'did not change' if is_trained else 'changed'}")


def main() -> None:
    """Measure each model, what is trained, and the runtime."""

    def apart(function: Any, *arguments: Any) -> Any:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(function, arguments)

    rows = []
    for layers, width in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            apart(write, folder, layers, width)
            size = Path(folder, "model.data").stat().st_size / MIB
            for trained in TRAINED:
                for backend, name in RUNTIMES.items():
                    predicted = apart(partial(predict, runtime=name), f"{folder}/model.onnx", trained)
                    peak, seconds = apart(run, folder, trained, backend)
                    apart(refuse_other_changes, folder, trained)
                    rows.append(
                        {
                            "model": f"{layers} × {width} × {width}",
                            "trained": trained,
                            "runtime": name,
                            "weights MiB": round(size),
                            "peak MiB": round(peak),
                            "predicted MiB": round(predicted, 1),
                            "ratio": round((peak - predicted) / size, 2),
                            "seconds": round(seconds, 1),
                        }
                    )
    save("training_memory", rows)


if __name__ == "__main__":
    main()
