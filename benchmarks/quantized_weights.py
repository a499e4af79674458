"""Memory and time of the gradient by the input of a chain of products whose weights have 4 bits, against float weights.

    python benchmarks/quantized_weights.py

Eight products with matrices of 2048 × 2048 and a Tanh behind each, 64 rows, on ONNX Runtime: what making a session and three
runs of the gradient add to the resident set of a process of its own, at its peak. The weights are 16 MiB in 4 bits, 128 MiB in
floats.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import numpy as np
from memory import current, peak_since
from onnx import ModelProto, TensorProto, helper, numpy_helper
from timing import save

import refgrad
from refgrad.backends import get_backend

LAYERS, SIZE, ROWS, BLOCK = 8, 2048, 64, 32


def chain(bits: int | None) -> ModelProto:
    """The products, of MatMulNBits or of MatMul."""
    draw = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for layer in range(LAYERS):
        if bits is None:
            array = draw.standard_normal((SIZE, SIZE)).astype(np.float32) / np.float32(SIZE**0.5)
            weights.append(numpy_helper.from_array(array, f"w{layer}"))
            nodes.append(helper.make_node("MatMul", [x, f"w{layer}"], [f"p{layer}"]))
        else:
            packed = draw.integers(0, 256, (SIZE, SIZE // BLOCK, BLOCK * bits // 8)).astype(np.uint8)
            scales = np.full((SIZE, SIZE // BLOCK), 0.2 / SIZE**0.5, np.float32)
            weights += [numpy_helper.from_array(packed, f"q{layer}"), numpy_helper.from_array(scales, f"s{layer}")]
            attributes = {"K": SIZE, "N": SIZE, "bits": bits, "block_size": BLOCK, "domain": "com.microsoft"}
            nodes.append(helper.make_node("MatMulNBits", [x, f"q{layer}", f"s{layer}"], [f"p{layer}"], **attributes))
        nodes.append(helper.make_node("Tanh", [f"p{layer}"], [f"t{layer}"]))
        x = f"t{layer}"
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, SIZE]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "chain", values[:1], values[1:], weights)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def measure(bits: int | None) -> dict[str, Any]:
    """What a session of the gradient and three runs add to this process."""
    gradient = refgrad.gradient(chain(bits), wrt=["x"])
    output = next(value.name for value in gradient.graph.input if value.name.endswith("_grad"))
    draw = np.random.default_rng(1)
    feeds = {name: draw.standard_normal((ROWS, SIZE)).astype(np.float32) for name in ("x", output)}
    before = current()
    prepared = get_backend("ort-cpu").prepare(gradient, threads=1)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        prepared.run(feeds)
        seconds.append(time.process_time() - start)
    title = "float32" if bits is None else f"{bits} bits"
    return {"weights": title, "peak MiB": round(peak_since(before)), "seconds": min(seconds)}


def main() -> None:
    """Measure each in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for bits in (None, 4):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (bits,)))
    plain, quantized = rows
    quantized["memory ratio"] = round(quantized["peak MiB"] / plain["peak MiB"], 2)
    quantized["time ratio"] = round(quantized["seconds"] / plain["seconds"], 2)
    for row in rows:
        row["seconds"] = round(row["seconds"], 2)
    save("quantized_weights", rows)


if __name__ == "__main__":
    main()
