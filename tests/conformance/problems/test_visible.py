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


def test_feeds_stay_in_the_domain_of_the_model():
    """Acosh is defined from 1 on: smaller feeds would leave the model without a value."""
    names = ("a", "b", "c")
    body = "  ".join(
        f"f{n} = Constant <value_float = 14.0> ()  m{n} = Mul({n}, f{n})  s{n} = Sigmoid(m{n})" for n in names
    )
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[4] a, float[4] b, float[4] c, float[4] z) => (float[4] y) '
        f"{{ {body}  h = Acosh(z)  y = Sum(sa, sb, sc, h) }}"
    )
    found = check(model, backends=["numpy"])
    assert found.feeds == "random (above 1)"
    assert "z" not in found.answer[1].partition("undecided")[2]
