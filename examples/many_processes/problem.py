"""A small network, data and five epochs: the problem of the examples in this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.parser

from refgrad.training import Adam, Training, batches, part_of, step_model

NETWORK = """
    <ir_version: 8, opset_import: ["": 18]>
    network (float[N, 4] x) => (float[N, 3] logits) { a = MatMul(x, w)  h = Tanh(a)  logits = MatMul(h, v) }
"""


def network() -> onnx.ModelProto:
    """The network with its first weights, the same in every process."""
    model, rng = onnx.parser.parse_model(NETWORK), np.random.default_rng(0)
    for name, shape in (("w", (4, 16)), ("v", (16, 3))):
        weight = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def samples() -> dict[str, np.ndarray]:
    """The data. 250 samples are seven batches of 32, and one of 26."""
    x = np.random.default_rng(1).standard_normal((250, 4)).astype(np.float32)
    return {"x": x, "label": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)}


def train(place: tuple[int, int] = (0, 1), **settings: Any) -> Training:
    """Five epochs, with this process's part of every batch: `place` is its number, and the number of processes."""
    training = Training(step_model(network(), "cross_entropy", Adam()), 0.01, place=place, **settings)

    def parts(epoch: int) -> Iterator[dict[str, np.ndarray]]:
        for batch in batches(samples(), 32, np.random.default_rng(epoch)):  # the same order in every process
            yield batch if "sums" in settings else part_of(batch, place)

    for epoch in range(5):
        training.epoch(parts(epoch))
    return training


def report(training: Training) -> None:
    """Print the losses, and write the weights to the file that the command line names."""
    print("losses:", *(f"{loss:.4f}" for loss in training.losses))
    if len(sys.argv) > 1:
        np.savez(sys.argv[1], losses=training.losses, **training.weights)


if __name__ == "__main__":
    report(train())
