"""Peak memory of a run of the interpreter against the largest set of values that are alive at once.

    python examples/torch_models.py FOLDER
    python benchmarks/interpreter_memory.py FOLDER

Forward, and forward plus gradient for the input and all weights. The live set is read off the graph in its order: a value lives
from the node that makes it to the last that reads it, weights and feeds all the time, and views count once. The peak has the
scratch memory of kernels too, which has an upper bound: it shows where "values alone" leaves weights and feeds out.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from run_time import load
from timing import save

import refgrad
from refgrad.backends import get_backend
from refgrad.backends.numpy.memory import owner

MIB = 2**20
MODELS = ("mlp", "resnet18", "bert", "gpt2")


def light_resnet50() -> tuple[onnx.ModelProto, dict[str, np.ndarray], None]:
    """The model that onnx ships, a feed and a cotangent; what can be differentiated is its input and the statistics."""
    model = onnx.load(Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx")
    constants = {tensor.name for tensor in model.graph.initializer}
    (value,) = (value for value in model.graph.input if value.name not in constants)
    (output,) = model.graph.output
    sizes = {f"{output.name}_grad": output, value.name: value}
    rng = np.random.default_rng(0)
    shapes = {name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for name, v in sizes.items()}
    return model, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}, None


def live_set(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> int:
    """The bytes of the largest set of values that are alive at once."""
    values = get_backend("numpy").prepare(model).run(feeds, trace=True)
    there = {id(owner(values[name])) for name in feeds}
    read = dict.fromkeys((value.name for value in model.graph.output), len(model.graph.node))
    for index in reversed(range(len(model.graph.node))):
        for name in model.graph.node[index].input:
            read.setdefault(name, index)
    alive: dict[str, np.ndarray] = {}
    most = 0
    for index, node in enumerate(model.graph.node):
        if node.op_type != "Constant":
            alive |= {name: owner(np.asarray(values[name])) for name in node.output if name}
        arrays = {id(array): array.nbytes for array in alive.values() if id(array) not in there}
        most = max(most, sum(arrays.values()))
        alive = {name: array for name, array in alive.items() if read.get(name, -1) > index}
    return most


def peak(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> int:
    """The most bytes that a run holds beyond what was there before it."""
    prepared = get_backend("numpy").prepare(model)
    prepared.run(feeds)
    gc.collect()
    tracemalloc.start()
    try:
        prepared.run(feeds)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def row(name: str, what: str, model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    taken = {value.name for value in model.graph.input}
    feeds = {key: array for key, array in feeds.items() if key in taken}
    live, most = live_set(model, feeds), peak(model, feeds)
    weights = (np.prod(tensor.dims) * tensor_dtype(tensor).itemsize for tensor in model.graph.initializer)
    there = int(sum(weights)) + sum(array.nbytes for array in feeds.values())
    return {
        "model": name,
        "run": what,
        "live set MiB": round((live + there) / MIB, 2),
        "peak MiB": round((most + there) / MIB, 2),
        "ratio": round((most + there) / (live + there), 2),
        "values alone": round(most / live, 2),
    }


def tensor_dtype(tensor: onnx.TensorProto) -> np.dtype[Any]:
    return onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where examples/torch_models.py wrote the models")
    folder = parser.parse_args().folder
    models = {name: load(folder, name) for name in MODELS} | {"light_resnet50": light_resnet50()}
    rows = []
    for name, (model, feeds, wrt) in models.items():
        rows.append(row(name, "forward", model, feeds))
        rows.append(row(name, "forward and gradient", refgrad.gradient(model, wrt=wrt, keep_outputs=True), feeds))
    save("interpreter_memory", rows)


if __name__ == "__main__":
    main()
