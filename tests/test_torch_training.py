"""Updates of weights against torch.optim, step by step, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import helper, numpy_helper

from refgrad.backends import get_backend
from refgrad.training import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, StepModel, Training, batches, step_model

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


@pytest.mark.parametrize("loss", ["squared_error", "cross_entropy"])
def test_running_statistics_follow_as_torch_has_them(loss: str) -> None:
    """BatchNormalization in training mode, with short last batches."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 2)
    ).double()
    with torch.no_grad():
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
    tensors = {name: value.detach().numpy().copy() for name, value in net.state_dict().items() if "num" not in name}
    statistics = ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    nodes = [
        helper.make_node("Conv", ["x", "0.weight", "0.bias"], ["c"]),
        helper.make_node("BatchNormalization", ["c", *statistics], ["n"], momentum=0.9),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("Gemm", ["f", "4.weight", "4.bias"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 11, ["N", 2, 6, 6])],
        [helper.make_tensor_value_info("y", 11, ["N", 2])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x, y, classes = rng.standard_normal((20, 2, 6, 6)), rng.standard_normal((20, 2)), rng.integers(0, 2, 20)
    label = y if loss == "squared_error" else classes
    training = Training(step_model(model, loss, SGD(momentum=0.9), batch_norm="training"), 0.05)
    frozen = Training(step_model(model, loss, SGD(momentum=0.9)), 0.05)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    net.train()
    for _ in range(3):
        training.epoch(batches({"x": x, "label": label}, 8))
        frozen.epoch(batches({"x": x, "label": label}, 8))
        for k in range(0, 20, 8):
            optimizer.zero_grad()
            out, due = net(torch.tensor(x[k : k + 8])), torch.tensor(label[k : k + 8])
            found = (
                ((out - due) ** 2).mean() if loss == "squared_error" else torch.nn.functional.cross_entropy(out, due)
            )
            found.backward()
            optimizer.step()
    trained = {tensor.name: numpy_helper.to_array(tensor) for tensor in training.write_to(model).graph.initializer}
    for name, value in net.state_dict().items():
        if name in trained:  # num_batches_tracked is no part of the model
            np.testing.assert_allclose(trained[name], value.detach().numpy(), rtol=0, atol=1e-10)
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in frozen.write_to(model).graph.initializer}
    for name in statistics[2:]:
        np.testing.assert_array_equal(kept[name], tensors[name])
