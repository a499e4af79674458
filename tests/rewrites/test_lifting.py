"""Weights out of attributes: the same results on both executors, labels that follow the weights, and the way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.checker
import pytest
from onnx import TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.errors import OptionError
from refgrad.training import SGD, Training, batches, step_model

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
# onnxruntime-training 1.19 returns the score itself where LOGISTIC is asked of one score; later releases its sigmoid.
SIGMOID_OF_ONE = [name for name in BACKENDS if "training" not in get_backend(name).description()]
X = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
CLASSES: dict[str, dict[str, Any]] = {
    "three": {"classlabels_ints": [4, 5, 9]},
    "three texts": {"classlabels_strings": ["a", "b", "c"]},
    "two texts": {"classlabels_strings": ["u", "v"]},
    "one score": {"classlabels_ints": [4, 5]},
    "targets": {"targets": 2},
}
ROWS = {"three": 3, "three texts": 3, "two texts": 2, "one score": 1, "targets": 2}


def _linear(which: str, post: str, opset: int, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    rng, rows = np.random.default_rng(1), ROWS[which]
    is_classifier = which != "targets"
    node = helper.make_node(
        "LinearClassifier" if is_classifier else "LinearRegressor",
        ["x"],
        ["l", "y"] if is_classifier else ["y"],
        "linear",
        domain="ai.onnx.ml",
        coefficients=(0.1 * rng.standard_normal(3 * rows)).tolist(),
        intercepts=(0.1 * rng.standard_normal(rows)).tolist(),
        post_transform=post,
        **CLASSES[which],
    )
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", None])]
    if is_classifier:
        text = "classlabels_strings" in CLASSES[which]
        outputs.append(helper.make_tensor_value_info("l", TensorProto.STRING if text else TensorProto.INT64, ["N"]))
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", kind, ["N", 3])], outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize("opset", [12, 21])
@pytest.mark.parametrize("post", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"])
@pytest.mark.parametrize("which", CLASSES)
def test_a_lifted_model_returns_what_the_model_returns(which: str, post: str, opset: int) -> None:
    model = _linear(which, post, opset)
    if post == "SOFTMAX_ZERO" and opset < 13:
        with pytest.raises(OptionError, match="written in operators of opset 13"):
            refgrad.lift_weights(model)
        return
    if which == "one score" and post not in ("NONE", "LOGISTIC"):
        with pytest.raises(
            OptionError, match=r"node 'linear' \(LinearClassifier\) cannot be lifted: runtimes disagree"
        ):
            refgrad.lift_weights(model)
        return
    lifted = refgrad.lift_weights(model)
    onnx.checker.check_model(lifted, full_check=True)
    assert all(node.domain == "" for node in lifted.graph.node)
    for backend in SIGMOID_OF_ONE if (which, post) == ("one score", "LOGISTIC") else BACKENDS:
        feed = {"x": 0.1 * X}
        expected = get_backend(backend).prepare(model).run(feed)
        for name, value in get_backend(backend).prepare(lifted).run(feed).items():
            if value.dtype.kind == "f":
                np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
            else:
                assert value.tolist() == expected[name].tolist()


@pytest.mark.parametrize("kind", [TensorProto.DOUBLE, TensorProto.INT64])
def test_inputs_that_are_not_float_are_cast(kind: int) -> None:
    model = _linear("three", "SOFTMAX", 15, kind)
    feed = {"x": np.round(3 * X).astype(helper.tensor_dtype_to_np_dtype(kind))}
    lifted = refgrad.lift_weights(model)
    for backend in BACKENDS:
        expected = get_backend(backend).prepare(model).run(feed)["y"]
        np.testing.assert_allclose(get_backend(backend).prepare(lifted).run(feed)["y"], expected, rtol=1e-5)


def test_the_weights_are_named_after_the_node() -> None:
    found = refgrad.weights(refgrad.lift_weights(_linear("three", "SOFTMAX", 15)))
    assert found.trainable == ["linear.coefficients", "linear.intercepts"]
    assert [found[name].shape for name in found.trainable] == [(3, 3), (3,)]


def test_two_nodes_of_one_name_have_weights_of_their_own() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 15, "ai.onnx.ml": 1]>
        two (float[N, 1] x) => (float[N, 1] y) {
            h = ai.onnx.ml.LinearRegressor <coefficients = [2.0], intercepts = [1.0]> (x)
            y = ai.onnx.ml.LinearRegressor <coefficients = [3.0]> (h)
        }""")
    lifted = refgrad.lift_weights(model)
    assert len(refgrad.weights(lifted).trainable) == 3
    [y] = get_backend("numpy").prepare(lifted).run({"x": np.float32([[5]])}).values()
    assert y.tolist() == [[33]]


def test_a_model_without_such_nodes_is_a_copy() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 15]> f (float[N] x) => (float[N] y) { y = Neg(x) }'
    )
    assert refgrad.lift_weights(model) == model


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_linear_regressor_is_trained_and_written_back_into_its_attributes(backend: str) -> None:
    model = _linear("targets", "NONE", 15)
    y = X @ np.float32([[1, 2], [3, 4], [5, 6]]) + np.float32([7, 8])
    training = Training(step_model(model, optimizer=SGD(momentum=0.9)), 0.1, backend)
    for _ in range(150):
        training.epoch(batches({"x": X, "label": y}, 20))
    trained = training.write_to(model)
    settings = {attribute.name: list(attribute.floats) for attribute in trained.graph.node[0].attribute}
    np.testing.assert_allclose(settings["coefficients"], [1, 3, 5, 2, 4, 6], atol=5e-3)
    np.testing.assert_allclose(settings["intercepts"], [7, 8], atol=5e-3)
    lifted = training.write_to(refgrad.lift_weights(model))
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in lifted.graph.initializer}
    np.testing.assert_array_equal(values["linear.coefficients"], training.weights["linear.coefficients"])
    for one in (trained, lifted):
        [result] = get_backend(backend).prepare(one).run({"x": X}).values()
        np.testing.assert_allclose(result, y, atol=1e-2)
