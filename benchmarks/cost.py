"""The peak of memory that `refgrad.cost` predicts, against what a run takes; and gradients within a memory budget.

    python examples/torch_models.py FOLDER
    python benchmarks/cost.py FOLDER

Whole models, and the transformer, the layer of attention and the Scan of recompute.py: forward, and forward with the gradient
for the input and all weights. Each figure comes from a process of its own, without weights and feeds, with the results. On the
interpreter it is the bytes that Python allocates in a run; on ONNX Runtime the resident memory that the first run of a session
adds. There a session before it has run the model once, so that the code of the kernels is in memory: that is 1 to 2 MiB.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from interpreter_memory import peak as interpreter_peak
from memory import current, peak_since
from recompute import Config, attention, feeds_for, scan, transformer
from run_time import load
from timing import save

import refgrad
from refgrad.backends import get_backend

MIB = 2**20
MODELS = ("mlp", "resnet18", "bert", "gpt2", "lstm")
BUDGETS = ("600 MiB", "400 MiB", "250 MiB")


def measured(runtime: str, path: str, feeds: dict[str, np.ndarray]) -> float:
    """The MiB that a first run adds at its peak."""
    if runtime == "numpy":
        return interpreter_peak(onnx.load(path), feeds) / MIB
    most = 0.0
    for _ in range(2):
        prepared = get_backend("ort-cpu").prepare(path, threads=1)
        before = current()
        results = prepared.run(feeds)
        most = peak_since(before)
        del prepared, results
        gc.collect()
    return most


def alone(runtime: str, model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> float:
    """What `measured` says in a process of its own."""
    taken = {value.name for value in model.graph.input}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        onnx.save(model, path)
        with multiprocessing.get_context("spawn").Pool(1) as one:
            return one.apply(measured, (runtime, path, {name: x for name, x in feeds.items() if name in taken}))


def runs(folder: Path) -> Iterator[tuple[str, str, onnx.ModelProto, dict[str, np.ndarray]]]:
    """The names of a model and of a run of it, that run as a model, and its feeds."""
    for name in MODELS:
        model, feeds, wrt = load(folder, name)
        yield name, "forward", model, feeds
        yield name, "gradient", refgrad.gradient(model, wrt=wrt, keep_outputs=True), feeds
    model = recurrent()
    feeds = feeds_for(model)
    yield "lstm of 100 steps", "forward", model, feeds
    yield "lstm of 100 steps", "gradient", refgrad.gradient(model, keep_outputs=True, cotangent="ones"), feeds
    for name, model in (("transformer", transformer(Config())), ("attention", attention()), ("Scan", scan())):
        feeds = feeds_for(model)
        yield name, "forward", model, feeds
        yield name, "gradient", refgrad.gradient(model, keep_outputs=True), feeds
        yield name, "recompute", refgrad.gradient(model, keep_outputs=True, recompute=True), feeds


def recurrent() -> onnx.ModelProto:
    """An LSTM of 100 steps, 256 to 256 numbers, for 16 samples."""
    size = {"X": (100, 16, 256), "W": (1, 1024, 256), "R": (1, 1024, 256), "B": (1, 2048)}
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in size.items()]
    node = onnx.helper.make_node("LSTM", list(size), ["Y"], "lstm", hidden_size=256)
    output = onnx.helper.make_tensor_value_info("Y", onnx.TensorProto.FLOAT, (100, 1, 16, 256))
    graph = onnx.helper.make_graph([node], "recurrent", inputs, [output])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def digits(size: float) -> float:
    return round(size, 1 if size >= 10 else 3)


def predictions(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for name, run, model, feeds in runs(folder):
        row: dict[str, Any] = {"model": name, "run": run, "GFLOPs": digits(refgrad.cost(model).flops / 1e9)}
        for runtime, label in (("numpy", "interpreter"), ("onnxruntime", "ONNX Runtime")):
            predicted, most = refgrad.cost(model, runtime=runtime).peak / MIB, alone(runtime, model, feeds)
            row[f"{label}: predicted MiB"], row[f"{label}: measured MiB"] = digits(predicted), digits(most)
            row[f"{label}: error %"] = round(100 * (predicted / most - 1), 1)
        rows.append(row)
        print(row, flush=True)
    return rows


def budgets() -> list[dict[str, Any]]:
    model, rows = transformer(Config()), []
    feeds, plain = feeds_for(model), refgrad.cost(refgrad.gradient(model)).flops
    for budget in BUDGETS:
        gradient = refgrad.gradient(model, memory=budget)
        found = refgrad.cost(gradient)
        rows.append(
            {
                "budget": budget,
                "FLOPs ratio": round(found.flops / plain, 3),
                "interpreter MiB": round(alone("numpy", gradient, feeds)),
                "ONNX Runtime MiB": round(alone("onnxruntime", gradient, feeds)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where examples/torch_models.py wrote the models")
    folder = parser.parse_args().folder
    save("cost", predictions(folder))
    save("cost_budget", budgets())


if __name__ == "__main__":
    main()
