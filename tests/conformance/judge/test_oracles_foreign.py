"""The oracles of other people agree with differences where they speak, and are silent, with a reason, where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import pytest

from refgrad.conformance.case import Case, node_case
from refgrad.conformance.judge.running import runner
from refgrad.conformance.oracles import Directional, Elementwise, NotApplicable, Observation, get_oracle
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.worker import Worker

pytestmark = pytest.mark.torch

FOREIGN = ("torch", "onnxruntime", "onnx-ad")
INSTALLED = [name for name in FOREIGN if not get_oracle(name).missing()]
TOLERANCE = 1e-6  # what float64 explains


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Some gradients of ONNX Runtime end the process that runs them."""
    with Worker() as started:
        yield started


def contradicted(problem: Problem, observations: Sequence[Observation]) -> list[str]:
    """The inputs by which an observation is not what differences say, up to what both are off by."""
    gradients = {observation.name: observation for observation in observations if isinstance(observation, Elementwise)}
    names = []
    for observation in runner.observe("differences", problem):
        if not isinstance(observation, Directional) or observation.name not in gradients:
            continue
        elementwise = gradients[observation.name]
        got = float(np.sum(elementwise.gradient * observation.direction))
        size = max(
            float(np.linalg.norm(elementwise.gradient) * np.linalg.norm(observation.direction)), abs(observation.value)
        )
        if not abs(got - observation.value) <= (TOLERANCE + elementwise.error) * size + 10 * observation.error:
            names.append(observation.name)
    return names


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


LAYERS = Case(
    "two layers, a weight, two outputs",
    parsed(
        """f (float[2, 3] x) => (float[2, 2] y, float s) <float[3, 2] w = {0.1, 0.2, -0.3, 0.4, 0.5, -0.6}>
        { [a] p = MatMul(x, w) [b] y = Tanh(p) [c] s = ReduceSum<keepdims=0>(y) }"""
    ),
    {"x": draw(2, 3)},
    ("x", "w"),
)
CASES = {
    case.name: case
    for case in (
        LAYERS,
        Case(
            "a shape on the way",
            parsed(
                "f (float[2, 3] x) => (float[6] y) { e = Exp(x) n = Shape(e) size = ReduceProd(n) y = Reshape(e, size) }"
            ),
            {"x": draw(2, 3)},
        ),
        Case(
            "an input that nothing depends on",
            parsed("f (float[3] x, float[2] z) => (float[3] y) { [n] y = Exp(x) }"),
            {"x": draw(3), "z": draw(2)},
        ),
        node_case("Softmax", draw(2, 3), opset=21),
        node_case("Conv", draw(1, 2, 5, 5), draw(3, 2, 3, 3), opset=21, strides=[2, 1], pads=[1, 0, 1, 0]),
        replace(node_case("LayerNormalization", draw(2, 3), draw(3), draw(3), opset=17, outputs=3), outputs=("Y",)),
        node_case("Where", np.array([True, False, True]), draw(3), draw(3), opset=21),
        node_case("Gather", draw(4, 2), np.array([[0, 3], [3, 1]]), opset=21),
    )
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("oracle", INSTALLED)
def test_it_agrees_with_differences(worker: Worker, oracle: str, name: str) -> None:
    problem = ask(CASES[name])
    said = worker.call(runner.observe, oracle, problem)
    assert sorted(one.name for one in said) == sorted(problem.wrt), said
    assert not contradicted(problem, said)


@pytest.mark.parametrize("oracle", INSTALLED)
def test_a_wrong_witness_would_be_noticed(worker: Worker, oracle: str) -> None:
    problem = ask(LAYERS)
    said = [replace(one, gradient=1.001 * one.gradient) for one in worker.call(runner.observe, oracle, problem)]
    assert contradicted(problem, said) == ["x", "x", "w", "w"]


# Where they are known to be wrong: why nobody is believed alone. One that is right one day fails here.
_ROWS = np.array([[0], [2]])
WRONG = {
    "onnx-ad": {
        "pads the gradient of Conv with output_shape, which overrides the pads": (
            node_case("Conv", draw(1, 2, 5, 5), draw(3, 2, 3, 3), opset=21, pads=[0, 0, 0, 2]),
            ["X"],
        ),
        "takes Det for a constant": (node_case("Det", draw(3, 3), opset=21), ["X"]),
        "takes the values of OneHot for constants": (
            node_case("OneHot", np.array([[0, 1]]), np.array([2]), draw(2), constant=["depth"], opset=21),
            ["values"],
        ),
        "reduces no axis where the list of axes is empty": (
            node_case("ReduceProd", draw(2, 3), np.zeros(0, np.int64), constant=["axes"], keepdims=0, opset=18),
            ["data"],
        ),
        "divides a product by its factor, which is 0": (
            node_case(
                "ReduceProd", np.array([[0.0, 2.0, 3.0]], np.float32), np.array([1]), constant=["axes"], opset=18
            ),
            ["data"],
        ),
    },
    "onnxruntime": {
        "overlooks the reduction of ScatterND": (
            node_case("ScatterND", draw(4, 3), _ROWS, draw(2, 3), opset=18, reduction="max"),
            ["data", "updates"],
        ),
        "takes the sign of y for that of x in LeakyRelu": (
            node_case("LeakyRelu", draw(2, 3), opset=21, alpha=-0.5),
            ["X"],
        ),
    },
}


@pytest.mark.parametrize(("oracle", "fault"), [(oracle, fault) for oracle in WRONG for fault in WRONG[oracle]])
def test_it_is_known_to_be_wrong(worker: Worker, oracle: str, fault: str) -> None:
    if oracle not in INSTALLED:
        pytest.skip(get_oracle(oracle).missing())
    case, names = WRONG[oracle][fault]
    problem = ask(case)
    assert sorted(set(contradicted(problem, worker.call(runner.observe, oracle, problem)))) == names


def test_onnxruntime_forgets_to_sum_over_broadcast_axes_and_is_silent(worker: Worker) -> None:
    if "onnxruntime" not in INSTALLED:
        pytest.skip(get_oracle("onnxruntime").missing())
    problem = ask(node_case("Mul", draw(1, 3), draw(2, 1), shapes="symbolic", opset=21))
    assert [(one.name, one.why) for one in worker.call(runner.observe, "onnxruntime", problem)] == [
        ("A", "its gradient has shape (2, 3)"),
        ("B", "its gradient has shape (2, 3)"),
    ]


# Silence

UNKNOWN = node_case(
    "MaxRoiPool", draw(1, 1, 4, 4), np.array([[0, 0, 0, 3, 3]], np.float32), pooled_shape=[1, 1], wrt=["X"]
)
SILENT = {
    "torch": [
        (UNKNOWN, "the table of torch functions has no MaxRoiPool"),
        (node_case("GRU", draw(2, 1, 3), draw(1, 6, 3), draw(1, 6, 2), hidden_size=2), "torch has no such form of GRU"),
        (node_case("QuickGelu", draw(2), domain="com.microsoft", opset=1), "has no com.microsoft.QuickGelu"),
    ],
    "onnxruntime": [(UNKNOWN, "gradient builder has not been registered: MaxRoiPool")],
    "onnx-ad": [(UNKNOWN, "MaxRoiPool")],
}


@pytest.mark.parametrize("oracle", INSTALLED)
def test_it_says_why_it_is_silent(worker: Worker, oracle: str) -> None:
    for case, why in SILENT[oracle]:
        (said,) = worker.call(runner.observe, oracle, ask(case))
        assert isinstance(said, NotApplicable)
        assert said.name == ""
        assert why in said.why


@pytest.mark.parametrize("oracle", [name for name in FOREIGN if name not in INSTALLED])
def test_what_is_missing_is_said(oracle: str) -> None:
    (said,) = runner.observe(oracle, ask(LAYERS))
    assert isinstance(said, NotApplicable)
    assert "pip install" in said.why


def torch_table(monkeypatch: pytest.MonkeyPatch, op_type: str, function: Any) -> None:
    pytest.importorskip("torch")
    from refgrad.conformance.oracles.tables.torch_table import TABLE

    monkeypatch.setitem(TABLE, op_type, function)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda a, x: 1.000001 * x.sin(), "torch computes another function: Sin is off by "),
        (lambda a, x: x.sin()[:1], r"torch computes another function: Sin gives (1, 3)"),
        (lambda a, x: x.no_such_function(), "torch fails on this form of Sin: AttributeError: "),
        (lambda a, x: None, "torch has no such form of Sin"),
    ],
)
def test_torch_says_nothing_of_another_function(monkeypatch: pytest.MonkeyPatch, function: Any, why: str) -> None:
    torch_table(monkeypatch, "Sin", function)
    (said,) = runner.observe("torch", ask(node_case("Sin", draw(2, 3), opset=21)))
    assert isinstance(said, NotApplicable)
    assert why in said.why


def test_torch_gets_the_attributes_with_the_defaults_of_the_opset(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SimpleNamespace] = []
    torch_table(monkeypatch, "Softmax", lambda a, x: seen.append(a))
    runner.observe("torch", ask(node_case("Softmax", draw(2, 3), opset=21)))
    runner.observe("torch", ask(node_case("Softmax", draw(2, 3), opset=21, axis=0)))
    assert [(a.axis, a.operator, a.outputs, a.result.shape) for a in seen] == [
        (-1, "Softmax", 1, (2, 3)),
        (0, "Softmax", 1, (2, 3)),
    ]
