"""Trainings of models that round: with a derivative of quantization, and refused if no weight gets a gradient."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.cli import main
from refgrad.errors import ModelWarning, NoGradientError
from refgrad.training import SGD, Arrays, Run, Training, batches, step_model, write_artifacts

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
RNG = np.random.default_rng(0)
W = RNG.normal(0, 0.3, (4, 3)).astype(np.float32)
X = RNG.standard_normal((64, 4)).astype(np.float32)
Y = X @ RNG.standard_normal((4, 3)).astype(np.float32)


def rounded(nodes: str, more: str = "") -> onnx.ModelProto:
    """A product with a weight that `nodes` round: wd is made of w."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (float[N, 4] x) => (float[N, 3] y) '
        f"<float s = {{0.05}}, float[3] rows = {{0.04, 0.05, 0.06}}, int8 z = {{0}}, int8[3] zeros = {{0, 0, 0}}> "
        f"{{ {nodes} {more or 'y = MatMul(x, wd)'} }}"
    )
    model.graph.initializer.append(numpy_helper.from_array(W, "w"))
    return model


QDQ = {
    "tensor": "wq = QuantizeLinear(w, s, z) wd = DequantizeLinear(wq, s, z)",
    "channels": "wq = QuantizeLinear<axis=1>(w, rows, zeros) wd = DequantizeLinear<axis=1>(wq, rows, zeros)",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", QDQ)
@pytest.mark.parametrize("quantization", ["straight-through", "clipped"])
def test_a_quantized_weight_is_trained_by_the_gradient_of_its_convention(
    quantization: str, model: str, backend: str
) -> None:
    """NumPy takes the same steps with the derivative by `refgrad.gradient`."""
    source = rounded(QDQ[model])
    step = step_model(source, "squared_error", SGD(), trainable=["w"], quantization=quantization)
    training = Training(step, 0.1, backend)
    gradient = get_backend("numpy").prepare(
        refgrad.gradient(source, ["w"], keep_outputs=True, quantization=quantization)
    )
    w = W
    for epoch in range(8):
        chosen = list(batches({"x": X, "label": Y}, 16, np.random.default_rng(epoch)))
        training.epoch(chosen)
        for batch in chosen:
            y = gradient.run({"x": batch["x"], "w": w, "y_grad": np.zeros((16, 3), np.float32)}, ["y"])["y"]
            cotangent = (2 * (y - batch["label"]) / y.size).astype(np.float32)
            w = w - np.float32(0.1) * gradient.run({"x": batch["x"], "w": w, "y_grad": cotangent}, ["w_grad"])["w_grad"]
    np.testing.assert_allclose(training.weights["w"], w, rtol=1e-4, atol=1e-5)
    assert training.losses[-1] < training.losses[0] / 3


NO_GRADIENT = {
    "QuantizeLinear": (QDQ["tensor"], "quantization='straight-through' or quantization='clipped'"),
    "Round": ("wd = Round(w)", "no derivative passes through Round"),
    "Cast": ("i = Cast<to=6>(w) wd = Cast<to=1>(i)", "no derivative passes through Cast"),
    "Sign": ("p = Sign(w) wd = Mul(p, s)", "no derivative passes through Sign"),
    "shape": ("n = Shape(w) f = Cast<to=1>(n) t = ReduceMean(f) wd = Expand(t, n)", "0: no output"),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_a_training_that_would_change_nothing_is_refused(name: str, tmp_path: Path) -> None:
    nodes, message = NO_GRADIENT[name]
    model = rounded(nodes)
    for loss in ("squared_error", "elastic", "cross_entropy"):
        with pytest.raises(
            NoGradientError, match=f"^Training would change nothing. The gradient of 'w' is .*{re.escape(message)}"
        ):
            step_model(model, loss, trainable=["w"])
    with pytest.raises(NoGradientError, match="Training would change nothing"):
        write_artifacts(tmp_path / "files", model, trainable=["w"])


def test_weights_that_share_a_reason_are_named_together() -> None:
    both = "n = Size(u) k = Cast<to=1>(n) p = MatMul(x, wd) y = Mul(p, k)"
    model = rounded(QDQ["tensor"], both)
    model.graph.initializer.append(numpy_helper.from_array(W, "u"))
    with pytest.raises(NoGradientError, match="'w' is always 0") as caught:
        step_model(model, trainable=["w", "u"])
    assert "The gradient of 'u' is 0: no output" in str(caught.value)
    assert len(caught.value.nodes) == 1


def test_many_weights_have_one_remedy() -> None:
    """Weights behind a QuantizeLinear each: three are explained, the others counted, and the remedy comes once."""
    names = [f"w{k}" for k in range(6)]
    nodes = " ".join(
        f"q{n} = QuantizeLinear({n}, s, z) d{n} = DequantizeLinear(q{n}, s, z) y{n} = MatMul(x, d{n})" for n in names
    )
    model = rounded(nodes, f"y = Sum({', '.join(f'y{n}' for n in names)})")
    model.graph.initializer.extend(numpy_helper.from_array(W, name) for name in names)
    with pytest.raises(NoGradientError) as refused:
        step_model(model, trainable=names)
    said = str(refused.value)
    assert said.count("is always 0") == 3
    assert said.count("Use quantization=") == 1
    assert "The gradients of 'w3', 'w4', 'w5' are always 0, too. Use quantization='straight-through'" in said
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "b"))
    model.graph.node[-1].input.append("b")
    with pytest.warns(ModelWarning) as noticed:
        step_model(model, trainable=[*names, "b"])
    assert len(noticed) == 4


def test_one_weight_with_a_gradient_is_enough() -> None:
    model = rounded(QDQ["tensor"], "p = MatMul(x, wd) y = Add(p, b)")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "b"))
    with pytest.warns(ModelWarning, match="The gradient of 'w' is always 0"):
        step = step_model(model, trainable=["w", "b"])
    training = Training(step, 0.1)
    training.epoch(batches({"x": X, "label": Y + 1}, 16))
    np.testing.assert_array_equal(training.weights["w"], W)
    assert (training.weights["b"] != 0).all()


def test_artifacts_take_the_derivative_of_quantization(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    write_artifacts(tmp_path / "files", rounded(QDQ["tensor"]), trainable=["w"], quantization="clipped")
    assert (tmp_path / "files" / "training_model.onnx").exists()


def test_the_shell_refuses_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(rounded(QDQ["tensor"]), "qat.onnx")
    np.savez("data.npz", x=X, y=Y)
    words = "train qat.onnx --data data.npz --trainable w --rate 0.05 -o t.onnx"
    assert main(words.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Training would change nothing." in said
    assert "Use --quantization straight-through or --quantization clipped." in said
    assert not Path("t.onnx").exists()
    assert main(f"{words} --quantization straight-through --json".split()) == 0
    tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load("t.onnx").graph.initializer}
    assert np.abs(tensors["w"] - W).max() > 0.1


def test_weights_beyond_the_range_are_noticed() -> None:
    """Every weight is clipped, so that the clipped derivative is 0 in each step."""
    model = rounded(QDQ["tensor"])
    model.graph.initializer.append(numpy_helper.from_array(np.full_like(W, 100), "w"))
    del model.graph.initializer[-2]
    step = step_model(model, optimizer=SGD(), trainable=["w"], quantization="clipped")
    run = Run(Training(step, 0.1), Arrays(step, {"x": X, "label": Y}), 2, 16)
    with pytest.warns(ModelWarning, match="No weight has changed in 8 steps: the gradients were 0"):
        run.run()
