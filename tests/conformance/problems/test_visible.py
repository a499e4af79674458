"""Feeds at which rounding does not hide the gradient."""

import numpy as np
import onnx.parser
import pytest

from refgrad import gradient
from refgrad.conformance import check
from refgrad.conformance.problems.visible import visible

SURE = (
    '<ir_version: 8, opset_import: ["": 18]> m (float[2, 4] x) => (float[2, 1] y) '
    "<float[4, 1] w = {{90, 90, 90, 90}}> {{ {} }}"
)
SIGMOID = SURE.format(
    "z = MatMul(x, w)  c = Constant <value_float = 3.0> ()  a = Abs(z)  s = Add(a, c)  y = Sigmoid(s)"
)
LINEAR = SURE.format("y = MatMul(x, w)")
DEAD = SURE.format("c = Constant <value_float = -1e9> ()  z = MatMul(x, w)  s = Add(z, c)  y = Relu(s)")


def seen(text, **arrays):
    model = gradient(onnx.parser.parse_model(text))
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)} | arrays
    names = [value.name for value in model.graph.output if value.name.startswith(("x", "w"))]
    found, scale = visible(model, names, feeds, {"y_grad": np.ones((2, 1), np.float32)})
    return feeds, found, scale


def test_feeds_at_which_a_classifier_is_sure_of_its_answer_become_smaller():
    feeds, found, scale = seen(SIGMOID)
    assert scale < 1
    assert found["x"].dtype == np.float32
    np.testing.assert_array_equal(found["x"], (feeds["x"] * scale).astype(np.float32))


@pytest.mark.parametrize("text", [LINEAR, DEAD], ids=["visible as they are", "no better when smaller"])
def test_other_feeds_stay(text):
    feeds, found, scale = seen(text)
    assert scale == 1
    np.testing.assert_array_equal(found["x"], feeds["x"])


def test_a_check_says_that_its_feeds_are_smaller():
    found = check(onnx.parser.parse_model(SIGMOID), backends=["numpy"])
    assert found.answer[0] == "right"
    assert found.feeds.startswith("random (normal distribution, times ")
    own = check(onnx.parser.parse_model(SIGMOID), {"x": np.ones((2, 4), np.float32)}, backends=["numpy"])
    assert own.feeds == "your own"
