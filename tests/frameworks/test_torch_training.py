"""Updates of weights against torch.optim, step by step, in float64."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

import refgrad
from refgrad.backends import get_backend
from refgrad.training import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Cosine,
    Optimizer,
    RMSProp,
    StepModel,
    Training,
    batches,
    lora,
    merge_adapters,
    step_model,
)

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


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (SGD(momentum=0.9), lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9)),
        (AdamW(weight_decay=0.3), lambda groups: torch.optim.AdamW(groups, 0.1)),
        (RMSProp(), lambda groups: torch.optim.RMSprop(groups, 0.1)),
    ],
    ids=["SGD", "AdamW", "RMSProp"],
)
def test_weight_decay_by_pattern_is_that_of_groups(optimizer: Optimizer, make: Any, flat: bool) -> None:
    rng = np.random.default_rng(2)
    model, weights = _network(rng)
    batches = _batches(rng)
    usual = optimizer.weight_decay  # type: ignore[attr-defined]

    def grouped(parameters: Sequence[Any]) -> Any:
        w, b, v = parameters
        amounts = zip((w, b, v), (0.2, 0.0, usual), strict=True)
        return make([{"params": [one], "weight_decay": amount} for one, amount in amounts])

    expected = _by_torch(weights, batches, grouped)
    step = step_model(model, optimizer=optimizer, flat=flat, weight_decay={"w": 0.2, "b*": 0})
    found = _trained(step, batches, "numpy")
    for weight, value in expected.items():
        np.testing.assert_allclose(found[weight], value, rtol=0, atol=1e-10, err_msg=weight)


@pytest.mark.parametrize("flat", [True, False])
def test_gradients_that_accumulate_are_those_of_torch(flat: bool) -> None:
    rng = np.random.default_rng(3)
    model, weights = _network(rng)
    batches = _batches(rng)
    parameters = w, b, v = [torch.tensor(value, requires_grad=True) for value in weights.values()]
    optimizer = torch.optim.Adam(parameters, 0.1)
    for k, (x, y) in enumerate(batches):
        loss = torch.mean((torch.tanh(torch.tensor(x) @ w + b) @ v - torch.tensor(y)) ** 2) / 4
        loss.backward()
        if k % 4 == 3:
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    found = _trained(step_model(model, optimizer=Adam(), flat=flat, accumulate=4, clip_norm=0.5), batches, "numpy")
    for weight, value in zip(weights, parameters, strict=True):
        np.testing.assert_allclose(found[weight], value.detach().numpy(), rtol=0, atol=1e-10, err_msg=weight)


def test_a_cosine_of_epochs_is_that_of_torch() -> None:
    rng = np.random.default_rng(4)
    model, weights = _network(rng)
    x, y = rng.standard_normal((20, 3)), rng.standard_normal((20, 2))
    training = Training(step_model(model, optimizer=SGD(momentum=0.9)), Cosine(0.1, period=12, minimum=0.01))
    w, b, v = parameters = [torch.tensor(value, requires_grad=True) for value in weights.values()]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12, 0.01)
    for _ in range(12):
        training.epoch(batches({"x": x, "label": y}, 6))
        for k in range(0, 20, 6):
            optimizer.zero_grad()
            inputs, due = torch.tensor(x[k : k + 6]), torch.tensor(y[k : k + 6])
            torch.mean((torch.tanh(inputs @ w + b) @ v - due) ** 2).backward()
            optimizer.step()
        schedule.step()
    for weight, value in zip(weights, parameters, strict=True):
        np.testing.assert_allclose(training.weights[weight], value.detach().numpy(), rtol=0, atol=1e-10, err_msg=weight)


def test_adapters_are_trained_as_in_torch() -> None:
    rng = np.random.default_rng(5)
    model, weights = _network(rng)
    batches = _batches(rng)
    adapted = lora(model, ["w", "v"], rank=2, alpha=3)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in adapted.graph.initializer}
    names = ["w.lora_A", "w.lora_B", "v.lora_A", "v.lora_B"]
    a, b, c, d = parameters = [torch.tensor(held[name], requires_grad=True) for name in names]
    w, bias, v = (torch.tensor(weights[name]) for name in ("w", "b", "v"))
    optimizer = torch.optim.Adam(parameters, 0.1)
    for x, y in batches:
        optimizer.zero_grad()
        hidden = torch.tanh(torch.tensor(x) @ (w + 1.5 * a @ b) + bias)
        torch.mean((hidden @ (v + 1.5 * c @ d) - torch.tensor(y)) ** 2).backward()
        optimizer.step()
    found = _trained(step_model(adapted, optimizer=Adam()), batches, "numpy")
    assert set(found) == set(names)
    for name, value in zip(names, parameters, strict=True):
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=1e-10, err_msg=name)
    merged = merge_adapters(refgrad.write_back(adapted, found))
    expected = w + 1.5 * a @ b
    [made] = [numpy_helper.to_array(tensor) for tensor in merged.graph.initializer if tensor.name == "w"]
    np.testing.assert_allclose(made, expected.detach().numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("drops", [False, True])
def test_the_export_of_the_page_on_fine_tuning(drops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new network has many equal tensors: biases and running means of 0. None is merged, and each is trained as in torch."""
    text = (
        (Path(__file__).parents[2] / "docs" / "fine_tuning.md")
        .read_text(encoding="utf-8")
        .partition("from torch\n\n")[2]
    )
    [export] = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [for_dropout] = re.findall(r"^  `(.*isinstance\(m, torch\.nn\.Dropout\).*)`", text, re.MULTILINE)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.BatchNorm2d(4),
        torch.nn.Dropout(0.5), torch.nn.Flatten(), torch.nn.Linear(144, 3),
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    x = torch.randn(10, 1, 8, 8)
    before, _, after = export.partition("torch.onnx.export(")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(
            f"{before}{for_dropout if drops else ''}\ntorch.onnx.export({after}", {"torch": torch, "model": net, "x": x}
        )
    if drops:
        assert refgrad.weights("model.onnx").trainable
        Training(step_model("model.onnx", "cross_entropy", dropout="training"))
        return
    net.eval()
    training = Training(step_model("model.onnx", "cross_entropy", SGD()), 0.05)
    assert sorted(training.weights) == sorted(name for name, _ in net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    label = np.random.default_rng(0).integers(0, 3, 10)
    for _ in range(5):
        training.train_on({"x": x.numpy(), "label": label}, 0.05)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), torch.tensor(label)).backward()
        optimizer.step()
    for name, value in net.named_parameters():
        np.testing.assert_allclose(training.weights[name], value.detach().numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_head_is_trained_and_the_body_stays_bit_for_bit(dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        OrderedDict(
            body=torch.nn.Sequential(
                torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()
            ),
            head=torch.nn.Linear(144, 3),
        )
    )
    with torch.no_grad():
        net.body[1].running_mean.normal_()
    net.eval()
    x = torch.randn(10, 1, 8, 8)
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            shapes = ({0: torch.export.Dim("N")},)
            torch.onnx.export(net, (x,), path, dynamo=True, dynamic_shapes=shapes, verbose=False, input_names=["x"])
        else:
            torch.onnx.export(
                net, (x,), path, dynamo=False, training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
                input_names=["x"], dynamic_axes={"x": {0: "N"}},
            )  # fmt: skip
    model = onnx.load(path)
    label = np.random.default_rng(0).integers(0, 3, 10)
    training = Training(step_model(path, "cross_entropy", SGD(momentum=0.9), trainable=["head.*"]), 0.05, "ort-cpu")
    assert list(training.weights) == ["head.weight", "head.bias"]
    optimizer = torch.optim.SGD(net.head.parameters(), 0.05, momentum=0.9)
    for _ in range(5):
        training.train_on({"x": x.numpy(), "label": label}, 0.05)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), torch.tensor(label)).backward()
        optimizer.step()
    before = {tensor.name: tensor for tensor in model.graph.initializer}
    for tensor in training.write_to(model).graph.initializer:
        if tensor.name.startswith("head."):
            expected = net.state_dict()[tensor.name].numpy()
            np.testing.assert_allclose(numpy_helper.to_array(tensor), expected, rtol=1e-4, atol=1e-6)
        else:
            assert numpy_helper.to_array(tensor).tobytes() == numpy_helper.to_array(before[tensor.name]).tobytes()
