"""Updates of weights against torch.optim, step by step, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx.parser
import pytest

from refgrad.backends import get_backend
from refgrad.training import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, StepModel, step_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
STEPS = 20

MODEL = """<ir_version: 8, opset_import: ["": 18]> network (double[N, 3] x) => (double[N, 2] y) {
    first = MatMul(x, w)  biased = Add(first, b)  hidden = Tanh(biased)  y = MatMul(hidden, v)
}"""
OPTIMIZERS: dict[str, tuple[Optimizer, Callable[[Any], Any]]] = {
    "SGD": (SGD(), lambda p: torch.optim.SGD(p, 0.1)),
    "SGD, momentum": (
        SGD(momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "SGD, dampening": (
        SGD(momentum=0.9, dampening=0.3),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3),
    ),
    "SGD, Nesterov": (SGD(momentum=0.8, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True)),
    "Adam": (Adam(weight_decay=0.02), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.02)),
    "AdamW": (AdamW(beta1=0.8, eps=1e-3), lambda p: torch.optim.AdamW(p, 0.1, betas=(0.8, 0.999), eps=1e-3)),
    "Adagrad": (
        Adagrad(rate_decay=0.1, initial=0.2),
        lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    ),
    "RMSProp": (RMSProp(), lambda p: torch.optim.RMSprop(p, 0.1)),
    "RMSProp, centered": (
        RMSProp(momentum=0.9, centered=True, weight_decay=0.01),
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True, weight_decay=0.01),
    ),
}


def _network(rng: np.random.Generator) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = onnx.parser.parse_model(MODEL)
    weights = {name: rng.standard_normal(shape) for name, shape in (("w", (3, 4)), ("b", (4,)), ("v", (4, 2)))}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    return model, weights


def _batches(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(rng.standard_normal((5, 3)), rng.standard_normal((5, 2))) for _ in range(STEPS)]


def _trained(step: StepModel, batches: Sequence[tuple[np.ndarray, np.ndarray]], backend: str) -> dict[str, np.ndarray]:
    prepared, state = get_backend(backend).prepare(step.model), dict(step.state)
    for x, y in batches:
        results = prepared.run({"x": x, "label": y, "learning_rate": np.array(0.1), **state})
        state = {name: results[output] for name, output in step.next.items()}
    return step.weights_in(state)


def _by_torch(
    weights: dict[str, np.ndarray],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    make: Callable[[Any], Any],
    clip: Callable[[Any], Any] | None = None,
) -> dict[str, np.ndarray]:
    w, b, v = parameters = [torch.tensor(value, requires_grad=True) for value in weights.values()]
    optimizer = make(parameters)
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.mean((torch.tanh(torch.tensor(x) @ w + b) @ v - torch.tensor(y)) ** 2)
        loss.backward()
        if clip is not None:
            clip(parameters)
        optimizer.step()
    return {name: p.detach().numpy() for name, p in zip(weights, parameters, strict=True)}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_torch(name: str, flat: bool) -> None:
    rng = np.random.default_rng(0)
    optimizer, make = OPTIMIZERS[name]
    model, weights = _network(rng)
    batches = _batches(rng)
    expected = _by_torch(weights, batches, make)
    for backend in ("numpy", "ort-cpu"):
        found = _trained(step_model(model, optimizer=optimizer, flat=flat), batches, backend)
        for weight, value in expected.items():
            np.testing.assert_allclose(found[weight], value, rtol=0, atol=1e-10, err_msg=f"{weight} on {backend}")


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("how", ["norm", "value"])
def test_clipped_gradients_are_those_of_torch(how: str, flat: bool) -> None:
    rng = np.random.default_rng(1)
    model, weights = _network(rng)
    batches = _batches(rng)
    clip = {
        "norm": lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5),
        "value": lambda p: torch.nn.utils.clip_grad_value_(p, 0.1),
    }[how]
    expected = _by_torch(weights, batches, lambda p: torch.optim.SGD(p, 0.1), clip)
    clipped = {"clip_norm": 0.5} if how == "norm" else {"clip_value": 0.1}
    found = _trained(step_model(model, optimizer=SGD(), flat=flat, **clipped), batches, "numpy")
    for weight, value in expected.items():
        np.testing.assert_allclose(found[weight], value, rtol=0, atol=1e-10, err_msg=weight)
