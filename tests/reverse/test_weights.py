"""What becomes of the weights of a model in its gradient: overridable inputs, constants, or inputs without a default."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper, numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.cli import main
from refgrad.errors import FeedError, OptionError

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 3 - 1
W = np.arange(12, dtype=np.float32).reshape(3, 4) / 7 - 0.8
FEEDS = {"x": X, "y_grad": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}


def model(listed: bool = False) -> ModelProto:
    """y = tanh(x·w + b); `listed`: the weights are graph inputs too."""
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        layer (float[N, 3] x) => (float[N, 4] y) { p = MatMul(x, w) s = Add(p, b) y = Tanh(s) }"""
    )
    weights = numpy_helper.from_array(W, "w"), numpy_helper.from_array(W[0], "b")
    made.graph.initializer.extend(weights)
    if listed:
        made.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in weights)
    return made


def inputs(made: ModelProto) -> list[str]:
    return [value.name for value in made.graph.input]


def initializers(made: ModelProto) -> set[str]:
    return {tensor.name for tensor in made.graph.initializer} & {"w", "b"}


@pytest.mark.parametrize("listed", [False, True])
def test_they_are_inputs_with_a_default(listed: bool) -> None:
    made = refgrad.gradient(model(listed))
    assert set(inputs(made)) == {"x", "y_grad", "w", "b"}
    assert initializers(made) == {"w", "b"}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("wrt", [None, ["x", "w"]])
def test_constants_are_no_inputs(listed: bool, wrt: list[str] | None) -> None:
    made = refgrad.gradient(model(listed), wrt, weights="constants")
    onnx.checker.check_model(made, full_check=True)
    assert inputs(made) == ["x", "y_grad"]
    assert initializers(made) == {"w", "b"}


@pytest.mark.parametrize("listed", [False, True])
def test_inputs_have_no_default(listed: bool) -> None:
    made = refgrad.gradient(model(listed), ["x", "w"], weights="inputs")
    onnx.checker.check_model(made, full_check=True)
    assert "w" in inputs(made)
    assert initializers(made) == {"b"}
    with pytest.raises(FeedError, match="No feed for w"):
        get_backend("numpy").prepare(made).run(FEEDS)


@pytest.mark.parametrize("name", ["numpy", "ort-cpu"])
def test_the_gradients_are_the_same(name: str) -> None:
    if name not in available():
        pytest.skip(f"needs {name}")
    backend = get_backend(name)
    expected = backend.prepare(refgrad.gradient(model())).run(FEEDS)
    constants = backend.prepare(refgrad.gradient(model(), weights="constants")).run(FEEDS)
    fed = backend.prepare(refgrad.gradient(model(), weights="inputs")).run({**FEEDS, "w": W, "b": W[0]})
    for found in (constants, fed):
        assert set(found) == set(expected) == {"x_grad", "w_grad", "b_grad"}
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value)


def test_recomputation_and_kept_outputs_go_with_it() -> None:
    made = refgrad.gradient(model(), recompute=True, keep_outputs=True, weights="constants")
    assert inputs(made) == ["x", "y_grad"]
    results = get_backend("numpy").prepare(made).run(FEEDS)
    np.testing.assert_allclose(results["y"], np.tanh(X @ W + W[0]), rtol=1e-6)


def test_another_word_is_refused() -> None:
    with pytest.raises(OptionError, match="'overridable', 'constants', 'inputs'"):
        refgrad.gradient(model(), weights="constant")


def test_the_command(tmp_path, capsys) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    result = tmp_path / "g.onnx"
    assert main(["grad", str(tmp_path / "m.onnx"), "-o", str(result), "--weights", "constants"]) == 0
    assert inputs(onnx.load(result)) == ["x", "y_grad"]
    assert main(["grad", str(tmp_path / "m.onnx"), "-o", str(result), "--weights", "nothing"]) == 2
    assert "overridable" in capsys.readouterr().err
