"""Peak memory of `gradient()` on a model with 500 MB of weights, beyond what the caller holds.

    python benchmarks/memory.py

Each figure comes from a process of its own: the peak after the call less the peak before it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from timing import save

LAYERS, WIDTH = 32, 2048  # 32 · 2048² · 4 bytes = 512 MiB
MIB = 2**20


def model() -> onnx.ModelProto:
    nodes, weights, x = [], [], "x"
    for k in range(LAYERS):
        weights.append(numpy_helper.from_array(np.full((WIDTH, WIDTH), 1 / WIDTH, dtype=np.float32), f"w{k}"))
        nodes += [helper.make_node("MatMul", [x, f"w{k}"], [f"m{k}"]), helper.make_node("Relu", [f"m{k}"], [f"y{k}"])]
        x = f"y{k}"
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "wide", [value("x", TensorProto.FLOAT, [1, WIDTH])], [value(x, TensorProto.FLOAT, [1, WIDTH])], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def of_proto(_: str) -> float:
    import refgrad

    proto = onnx.load_model_from_string(model().SerializeToString())
    before = current()
    result = refgrad.gradient(proto)
    assert len(result.graph.output) == LAYERS + 1
    return peak_since(before)


def of_path(path: str) -> float:
    import refgrad

    before = current()
    result = refgrad.gradient(path)
    assert len(result.graph.output) == LAYERS + 1
    return peak_since(before)


def current() -> float:
    """Resident MiB now, freed memory given back; the recorded peak starts anew here (Linux)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_since(before: float) -> float:
    return _status("VmHWM") - before


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:"))) / 1024


def main() -> None:
    weights = LAYERS * WIDTH * WIDTH * 4 / MIB
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/wide.onnx"
        onnx.save(model(), path, save_as_external_data=True, location="wide.data")
        pool = multiprocessing.get_context("spawn")
        with pool.Pool(1) as one:
            proto = one.apply(of_proto, (path,))
        with pool.Pool(1) as one:
            external = one.apply(of_path, (path,))
    save(
        "memory",
        [
            {
                "model": "ModelProto",
                "weights MiB": weights,
                "peak MiB": round(proto),
                "ratio": round(proto / weights, 2),
            },
            {"model": "path, external data", "weights MiB": weights, "peak MiB": round(external)},
        ],
    )


if __name__ == "__main__":
    main()
