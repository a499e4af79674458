"""A step of training of the network of the onnxcustom notebook, against scikit-learn's and one written in NumPy by hand.

    python benchmarks/training.py

750 samples of 100 features, hidden layers of 50 and 10, batches of 15, momentum after Nesterov, float32, one thread for BLAS
and one for onnxruntime. All of them shuffle. Times are those of the processor for the thread, in turn within one run:
the median of the rounds. "outside of the graph" is what a step takes beyond onnxruntime's own run with bound memory.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper
from sklearn.datasets import make_regression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from threadpoolctl import threadpool_limits
from timing import save

from refgrad.training import SGD, Training, batches, step_model

SIZES, BATCH, EPOCHS, ROUNDS = (100, 50, 10, 1), 15, 10, 15
RATE, MOMENTUM = 1e-4, 0.9
GOALS = {"onnxruntime": 4.0, "the interpreter": 1.0}


def samples() -> tuple[np.ndarray, np.ndarray]:
    """The samples that are trained on."""
    x, y = make_regression(1000, n_features=SIZES[0], bias=2, random_state=0)
    x, _, y, _ = train_test_split(x, y, random_state=0)
    return x.astype(np.float32), y.astype(np.float32)[:, None]


def weights() -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and intercepts of each layer."""
    rng = np.random.default_rng(0)
    pairs = pairwise(SIZES)
    return [
        ((rng.standard_normal(pair) * np.sqrt(2 / pair[0])).astype(np.float32), np.zeros((1, pair[1]), np.float32))
        for pair in pairs
    ]


def network() -> ModelProto:
    """The network, as skl2onnx writes it."""
    nodes, tensors, x = [], [], "X"
    for k, (w, b) in enumerate(weights()):
        tensors += [numpy_helper.from_array(w, f"coefficient{k}"), numpy_helper.from_array(b, f"intercepts{k}")]
        nodes.append(helper.make_node("MatMul", [x, f"coefficient{k}"], [f"mul{k}"]))
        nodes.append(helper.make_node("Add", [f"mul{k}", f"intercepts{k}"], [f"add{k}"]))
        x = f"add{k}"
        if k < len(SIZES) - 2:
            nodes.append(helper.make_node("Relu", [x], [f"next{k}"]))
            x = f"next{k}"
    tensors.append(numpy_helper.from_array(np.array([-1, 1]), "shape_tensor"))
    nodes.append(helper.make_node("Reshape", [x, "shape_tensor"], ["variable"]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "mlp", [value("X", 1, [None, 100])], [value("variable", 1, [None, 1])], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def by_hand(x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """The same steps in NumPy."""
    layers, rng = weights(), np.random.default_rng(0)
    velocities = [(np.zeros_like(w), np.zeros_like(b)) for w, b in layers]

    def run() -> None:
        for batch in batches({"x": x, "y": y}, BATCH, rng):
            values, out = [batch["x"]], batch["x"]
            for k, (w, b) in enumerate(layers):
                out = out @ w + b
                if k < len(layers) - 1:
                    out = np.maximum(out, 0)
                values.append(out)
            d = (out - batch["y"]) * (2 / len(out))
            for k in reversed(range(len(layers))):
                (w, b), (v, u) = layers[k], velocities[k]
                slope, bias = values[k].T @ d, d.sum(axis=0, keepdims=True)
                if k:
                    d = (d @ w.T) * (values[k] > 0)
                for weight, gradient, velocity in ((w, slope, v), (b, bias, u)):
                    velocity *= MOMENTUM
                    velocity -= RATE * gradient
                    weight += MOMENTUM * velocity - RATE * gradient

    return run


def in_torch(x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """The same steps in torch eager."""
    import torch

    torch.set_num_threads(1)
    layers: list[Any] = []
    for k, (w, b) in enumerate(weights()):
        layers += [torch.nn.Linear(*w.shape), *([torch.nn.ReLU()] if k < len(SIZES) - 2 else [])]
        with torch.no_grad():
            layers[2 * k].weight.copy_(torch.from_numpy(w.T.copy()))
            layers[2 * k].bias.copy_(torch.from_numpy(b[0]))
    module, rng = torch.nn.Sequential(*layers), np.random.default_rng(0)
    optimizer = torch.optim.SGD(module.parameters(), RATE, MOMENTUM, nesterov=True)

    def run() -> None:
        for batch in batches({"x": x, "y": y}, BATCH, rng):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(module(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"]))
            loss.backward()
            optimizer.step()

    return run


def scikit_learn(x: np.ndarray, y: np.ndarray) -> None:
    """As many epochs of scikit-learn's."""
    made = MLPRegressor(
        hidden_layer_sizes=SIZES[1:-1], solver="sgd", batch_size=BATCH, momentum=MOMENTUM, learning_rate="invscaling",
        learning_rate_init=RATE, max_iter=EPOCHS, tol=0, n_iter_no_change=1000, random_state=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(x, y.ravel())


def measured(calls: dict[str, Callable[[], Any]], steps: int) -> dict[str, float]:
    """µs per step of each, of the processor."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for k in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.thread_time_ns()
            call()
            if k:
                found[name].append((time.thread_time_ns() - start) / 1e3 / steps)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    x, y = samples()
    step = step_model(network(), "squared_error", SGD(momentum=MOMENTUM, nesterov=True, rate_in_velocity=True))
    data, rng = {"X": x, "label": y}, np.random.default_rng(0)

    def epochs(training: Training) -> Callable[[], None]:
        def run() -> None:
            for _ in range(EPOCHS):
                training.epoch(batches(data, BATCH, rng))

        return run

    hand = by_hand(x, y)
    session = Training(step, RATE, "ort-cpu", options={"threads": 1})
    steps = EPOCHS * -(-len(x) // BATCH)
    calls: dict[str, Callable[[], Any]] = {
        "scikit-learn": lambda: scikit_learn(x, y),
        "onnxruntime": epochs(session),
        "the interpreter": epochs(Training(step, RATE, "numpy")),
        "NumPy by hand": lambda: [hand() for _ in range(EPOCHS)],
    }
    if find_spec("torch"):
        eager = in_torch(x, y)
        calls["torch eager"] = lambda: [eager() for _ in range(EPOCHS)]
    session.epoch(batches(data, BATCH, rng))
    run: Any = session._run
    bindings = next(iter(run._bindings.values())).bindings
    calls["onnxruntime, the graph alone"] = lambda: [
        run._owner._session.run_with_iobinding(bindings[k % 2]) for k in range(steps)
    ]
    with threadpool_limits(1):
        found = measured(calls, steps)
    rows = []
    for name, spent in found.items():
        ratio, goal = found["scikit-learn"] / spent, GOALS.get(name)
        rows.append(
            {
                "what": name,
                "µs per step": round(spent, 1),
                "times as fast as scikit-learn": round(ratio, 2),
                "goal": "" if goal is None else f"at least {goal:g}",
                "met": "" if goal is None else "yes" if ratio >= goal else "no",
            }
        )
    outside = found["onnxruntime"] - found["onnxruntime, the graph alone"]
    rows.append(
        {
            "what": "onnxruntime, outside of the graph",
            "µs per step": round(outside, 1),
            "times as fast as scikit-learn": "",
            "goal": "at most 10 µs",
            "met": "yes" if outside <= 10 else "no",
        }
    )
    rows.append(
        {
            "what": f"{len(step.model.graph.node)} nodes",
            "µs per step": "",
            "times as fast as scikit-learn": "",
            "goal": "at most 38",
            "met": "yes" if len(step.model.graph.node) <= 38 else "no",
        }
    )
    save("training", rows)


if __name__ == "__main__":
    main()
