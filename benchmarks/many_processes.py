"""Samples per second of a training in two processes on one machine, against one process.

    python benchmarks/many_processes.py

Both take the same batches in turn, each with the threads that it chooses. Adam, float32. No model is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx.parser
from onnx import ModelProto, numpy_helper
from timing import alternate, save

from refgrad.training import Adam, Training, batches, step_model

SAMPLES, ROUNDS = 1024, 5
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "convolutions": (
        """c (float[N, 3, 32, 32] x) => (float[N, 10] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w1)  b = Relu (a)  c = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
            d = Conv <pads = [1, 1, 1, 1]> (c, w2)  e = Relu (d)  f = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (e)
            g = Flatten (f)  y = MatMul (g, w3)
        }""",
        (3, 32, 32),
        {"w1": (32, 3, 3, 3), "w2": (64, 32, 3, 3), "w3": (4096, 10)},
    ),
    "perceptron": (
        """p (float[N, 256] x) => (float[N, 10] y) {
            a = MatMul (x, w1)  b = Relu (a)  c = MatMul (b, w2)  d = Relu (c)  y = MatMul (d, w3)
        }""",
        (256,),
        {"w1": (256, 256), "w2": (256, 256), "w3": (256, 10)},
    ),
}


def model(text: str, shapes: dict[str, tuple[int, ...]]) -> ModelProto:
    """The model with random weights."""
    made, rng = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}'), np.random.default_rng(0)
    for name, shape in shapes.items():
        spread = np.prod(shape[1:] if len(shape) == 4 else shape[:1]) ** -0.5
        made.graph.initializer.append(
            numpy_helper.from_array((spread * rng.standard_normal(shape)).astype(np.float32), name)
        )
    return made


def epoch_of(training: Training, data: dict[str, np.ndarray], size: int) -> Callable[[], Any]:
    """An epoch in batches of this size."""

    def parts() -> Iterator[dict[str, np.ndarray]]:
        return batches(data, size, np.random.default_rng(0))

    return lambda: training.epoch(parts())


def main() -> None:
    """Measure each model on each executor with small and large batches."""
    rows = []
    for name, (text, shape, shapes) in MODELS.items():
        step = step_model(model(text, shapes), "cross_entropy", Adam())
        rng = np.random.default_rng(1)
        x = rng.standard_normal((SAMPLES, *shape)).astype(np.float32)
        data = {"x": x, "label": rng.integers(0, 10, SAMPLES)}
        for backend in ("ort-cpu", "numpy"):
            for size in (64, 512):
                one, two = (Training(step, 1e-4, backend, processes=count) for count in (1, 2))
                seconds_two, seconds_one, ratio = alternate(
                    epoch_of(two, data, size), epoch_of(one, data, size), ROUNDS
                )
                two.close()
                rows.append(
                    {
                        "model": name,
                        "executor": backend,
                        "samples per step": size,
                        "1 process, samples/s": round(SAMPLES / seconds_one),
                        "2 processes, samples/s": round(SAMPLES / seconds_two),
                        "ratio": round(1 / ratio, 2),
                    }
                )
    save("many_processes", rows)


if __name__ == "__main__":
    main()
