"""The conventions of a derivative are taken everywhere alike: in Python and in the shell, by what differentiates on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

import refgrad
from refgrad import recipes
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.errors import ModelWarning, OptionError
from refgrad.tables.conventions import ConventionOptions, Conventions
from refgrad.training import SGD, Training, step_model

pytestmark = pytest.mark.interpreter

# Everything is quantised, and nothing is clipped: straight-through y is sum(tanh(x·w)), by the rounded x and w.
QUANTISED = """<ir_version: 10, opset_import: ["": 21]>
net (float[2, 3] x) => (float y) <float[3, 2] w = {0.5, -0.25, 1, 0.75, -1, 0.125}, float s = {0.125}, int8 z = {0}> {
    xq = QuantizeLinear (x, s, z)
    xd = DequantizeLinear (xq, s, z)
    wq = QuantizeLinear (w, s, z)
    wd = DequantizeLinear (wq, s, z)
    p = MatMul (xd, wd)
    t = Tanh (p)
    y = ReduceSum <keepdims = 0> (t)
}"""
X = np.array([[0.3, -0.7, 1.1], [0.9, 0.2, -0.4]], np.float32)
STRAIGHT: ConventionOptions = {"quantization": "straight-through"}


def model() -> ModelProto:
    return onnx.parser.parse_model(QUANTISED)


def expected() -> tuple[np.ndarray, np.ndarray]:
    """The derivatives by x and by w."""
    w = np.array([[0.5, -0.25], [1, 0.75], [-1, 0.125]])
    x = np.round(X / 0.125) * 0.125
    inner = 1 - np.tanh(x @ w) ** 2
    return inner @ w.T, x.T @ inner


def run(made: ModelProto, **feeds: Any) -> dict[str, np.ndarray]:
    return get_backend("numpy").prepare(made).run({"x": X, **feeds})


RECIPES: dict[str, tuple[Callable[..., ModelProto], Callable[[np.ndarray], np.ndarray]]] = {
    "saliency": (lambda m, **how: recipes.saliency(m, "x", "y", **how), np.abs),
    "integrated_gradients": (lambda m, **how: recipes.integrated_gradients(m, "x", "y", steps=1, **how), lambda d: d),
    "fgsm": (lambda m, **how: recipes.fgsm(m, "x", "y", eps=0.5, **how), lambda d: X + 0.5 * np.sign(d)),
    "forces": (lambda m, **how: recipes.forces(m, "x", "y", **how), np.negative),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str) -> None:
    make, of = RECIPES[name]
    by_x = expected()[0]
    if name == "integrated_gradients":  # of one step: x times the gradient at x/2
        w = np.array([[0.5, -0.25], [1, 0.75], [-1, 0.125]])
        middle = np.round(X / 2 / 0.125) * 0.125
        by_x = X * ((1 - np.tanh(middle @ w) ** 2) @ w.T)
    np.testing.assert_allclose(next(iter(run(make(model(), **STRAIGHT)).values())), of(by_x), rtol=1e-5)
    with pytest.warns(ModelWarning, match="QuantizeLinear"):
        flat = make(model())
    assert not np.allclose(next(iter(run(flat).values())), of(by_x))
    with pytest.raises(OptionError, match="no quantization 'ste'; there are 'zero', 'straight-through', 'clipped'"):
        make(model(), quantization="ste")


def test_sensitivity() -> None:
    made = recipes.sensitivity(model(), **STRAIGHT)
    outputs = recipes.sensitivities_in(made)["w"]
    np.testing.assert_allclose(run(made)[outputs["norm"]], np.linalg.norm(expected()[1]), rtol=1e-5)


def test_walk() -> None:
    walked = refgrad.walk(model(), {"x": X}, wrt=["x"], **STRAIGHT)
    np.testing.assert_allclose(walked.values[walked.cotangents["x"].value], expected()[0], rtol=1e-5)
    assert [step.operator for step in walked.steps if step.difference is None] == ["DequantizeLinear", "QuantizeLinear"]
    assert walked.notes == (
        "3 of 5 steps have a finite difference beside them: a difference would see the steps of a later rounding, which "
        "the gradient ignores.",
    )
    with pytest.raises(OptionError, match="no quantization 'ste'"):
        refgrad.walk(model(), {"x": X}, quantization="ste")


def test_training() -> None:
    data = {"x": X}
    step = step_model(model(), None, SGD(), trainable=["w"], **STRAIGHT)
    training = Training(step, 0.1)
    training.epoch([data])
    w = np.array([[0.5, -0.25], [1, 0.75], [-1, 0.125]])
    np.testing.assert_allclose(training.weights["w"], w - 0.1 * expected()[1], rtol=1e-5)
    with pytest.raises(OptionError, match="no quantization 'ste'"):
        step_model(model(), None, quantization="ste")


def test_higher_and_split() -> None:
    tangent = run(refgrad.jvp(model(), ["x"], **STRAIGHT), x_tangent=np.ones_like(X))["y_tangent"]
    np.testing.assert_allclose(tangent, expected()[0].sum(), rtol=1e-5)
    parts = refgrad.split(model(), ["x"], **STRAIGHT)
    forward = run(parts.forward)
    fed = {v.name: ({"x": X, "y_grad": np.float32(1)} | forward)[v.name] for v in parts.backward.graph.input}
    got = get_backend("numpy").prepare(parts.backward).run(fed)["x_grad"]
    np.testing.assert_allclose(got, expected()[0], rtol=1e-5)
    with pytest.raises(OptionError, match="no choice of kinks 'pytorch'; there are 'refgrad', 'torch', 'onnxruntime'"):
        refgrad.jacobian(model(), kinks="pytorch")


@pytest.mark.torch
def test_torch() -> None:
    torch = pytest.importorskip("torch")
    from refgrad.torch import Module

    layer = Module(model(), ["w"], backend="numpy", **STRAIGHT)
    x = torch.tensor(X, requires_grad=True)
    layer(x).backward()
    np.testing.assert_allclose(x.grad.numpy(), expected()[0], rtol=1e-5)
    np.testing.assert_allclose(dict(layer.named_parameters())["w"].grad.numpy(), expected()[1], rtol=1e-5)
    with pytest.raises(OptionError, match="no quantization 'ste'"):
        Module(model(), quantization="ste")


def test_estimators() -> None:
    pytest.importorskip("sklearn")
    from refgrad.training.estimators import OnnxRegressor

    line = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 1] x) => (float[N, 1] y) '
        "<float[1, 1] w = {0.5}, float s = {0.125}, int8 z = {0}> "
        "{ q = QuantizeLinear (w, s, z) d = DequantizeLinear (q, s, z) y = MatMul (x, d) }"
    )
    x = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    fitted = OnnxRegressor(line, learning_rate_init=0.05, max_iter=60, random_state=0, **STRAIGHT).fit(x, 2 * x[:, 0])
    assert abs(fitted.predict(np.float32([[1]]))[0] - 2) < 0.2
    assert fitted.get_params()["quantization"] == "straight-through"


@pytest.mark.parametrize(
    "command",
    [
        "grad {model} --wrt x --cotangent ones -o {out}",
        "recipe saliency {model} --wrt x --of y -o {out}",
        "recipe sensitivity {model} --feeds {feeds}",
        "walk {model} --wrt x --feeds {feeds}",
        "train {model} --loss none --trainable w --data {feeds} -o {out}",
        "training-model {model} --loss none --trainable w -o {out}",
        "jvp {model} --wrt x -o {out}",
    ],
)
def test_commands(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"model": tmp_path / "m.onnx", "feeds": tmp_path / "f.npz", "out": tmp_path / "out.onnx"}
    onnx.save(model(), names["model"])
    np.savez(names["feeds"], x=X)
    words = command.format(**names).split()
    assert main([*words, "--quantization", "straight-through", "--kinks", "torch"]) == 0
    capsys.readouterr()
    assert main([*words, "--quantization", "ste"]) == 2
    assert "--quantization 'ste' is not known. There are" in capsys.readouterr().err


def test_a_record_is_a_set_of_options() -> None:
    chosen = Conventions(kinks="torch", quantization="clipped")
    assert Conventions(**chosen.options) == chosen
