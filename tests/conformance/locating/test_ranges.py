"""Values that leave their types are causes, for `nan`, `compare` and `check` alike, also where every result is finite."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from refgrad.conformance import check, compare, nonfinite
from refgrad.conformance.problems.ranges import OVERFLOW, UNDERFLOW, changing, leaving
from refgrad.conformance.reports.comparisons import lines_of

pytestmark = pytest.mark.interpreter


def model(text):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')


def half(*numbers):
    return np.array(numbers, np.float16)


RMS = "g (float16[4] x) => (float16[4] y) { [square] s = Mul(x, x)  m = ReduceMean(s)  r = Sqrt(m)  y = Div(x, r) }"
# 60000/(1 + exp(12)) is 0.37, and 0 where exp(12) overflows.
SIGMOID = """
    g (float16[2] x) => (float16[2] y) <float16 one = {1}, float16 many = {60000}>
    { [exp] e = Exp(x)  s = Add(e, one)  r = Reciprocal(s)  y = Mul(r, many) }
"""
# x² = 10⁻⁸ is 0 in float16, and 60000·x² is 6·10⁻⁴.
SMALL = "g (float16[2] x, float16[2] z) => (float16[2] y) { [small] p = Mul(x, x)  y = Mul(p, z) }"
CASES = [
    (RMS, {"x": half(300, 300, 1, 2)}, OVERFLOW, "square", "s"),
    (SIGMOID, {"x": half(12, 12)}, OVERFLOW, "exp", "e"),
    (SMALL, {"x": half(1e-4, 1e-4), "z": half(6e4, 6e4)}, UNDERFLOW, "small", "p"),
]


@pytest.mark.parametrize(("text", "feeds", "kind", "node", "output"), CASES)
def test_what_leaves_its_type_and_changes_results_is_found(text, feeds, kind, node, output):
    [found] = changing(model(text), feeds)
    assert (found.kind, found.node, found.output, found.dtype) == (kind, node, output, "float16")
    assert found.changes[0].name == "y"
    assert found.at == (0,)


@pytest.mark.parametrize(("text", "feeds", "kind", "node", "output"), CASES)
def test_nan_names_it(text, feeds, kind, node, output):
    found = nonfinite(model(text), feeds, forward=True)
    assert not found.origins
    assert not found.results
    assert not found.ok
    assert [(one.kind, one.node) for one in found.ranges] == [(kind, node)]


@pytest.mark.parametrize(("text", "feeds", "kind", "node", "output"), CASES)
def test_compare_names_it_as_the_cause(text, feeds, kind, node, output):
    found = compare(model(text), "refgrad@numpy", "refgrad@numpy:float64", feeds)
    [tensor] = [tensor for tensor in found.tensors if tensor.kind == "output"]
    assert (tensor.a.verdict, tensor.a.cause, tensor.b.verdict) == ("wrong", f"{kind} of {output!r}", "right")
    assert (node, kind) in {(one.node, one.kind) for one in found.a.ranges}
    assert found.b.ranges == ()
    assert not any("is right for its inputs" in line for line in lines_of(found.a))


def test_a_value_that_leaves_its_type_at_both_ends_has_a_cause_for_each():
    """x = (300, 0.004) has the squares 9·10⁴ and 1.6·10⁻⁵. The first overflows and makes y 0; the second loses digits."""
    quotient = model("g (float16[2] x) => (float16[2] y) { [square] s = Mul(x, x)  r = Sqrt(s)  y = Div(x, r) }")
    found = {one.kind: one for one in changing(quotient, {"x": half(300, 0.004)})}
    assert found[OVERFLOW].at == (0,)
    assert found[OVERFLOW].changes[0].at == (0,)
    assert UNDERFLOW not in found or found[UNDERFLOW].changes[0].at == (1,)


def test_check_names_the_same_value():
    text, feeds, *_ = CASES[0]
    notes = {row.note for row in check(model(text), feeds, backends=["numpy"]).rows if row.verdict == "undecided"}
    assert notes == {"'s' is 9e+04, more than float16 can hold"}


def test_an_overflow_that_changes_nothing_is_no_cause():
    """A mask of −10⁹ is −∞ in float16, and Softmax makes 0 of both."""
    masked = model("""
        g (float16[1, 3] x) => (float16[1, 3] y) <float[3] mask = {0, 0, -1000000000.0}>
        { [cast] m = Cast <to = 10> (mask)  s = Add(x, m)  y = Softmax(s) }
    """)
    feeds = {"x": np.array([[1, 2, 3]], np.float16)}
    assert [one.node for one in leaving(masked, feeds)] == ["cast"]
    assert changing(masked, feeds) == ()
    assert nonfinite(masked, feeds, forward=True).ok


def test_small_numbers_that_nobody_needs_are_no_cause():
    softmax = model("g (float16[1, 3] x) => (float16[1, 3] y) { y = Softmax(x) }")
    feeds = {"x": np.array([[0, 30, 3]], np.float16)}
    assert nonfinite(softmax, feeds).ok


def test_a_value_that_follows_from_another_is_not_listed():
    chain = model(
        "g (float16[2] x) => (float16[2] y) { [first] a = Mul(x, x)  b = Mul(a, a)  c = Sqrt(b)  y = Div(x, c) }"
    )
    assert [one.node for one in changing(chain, {"x": half(300, 300)})] == ["first"]


def test_double_has_no_narrow_range():
    wide = model("g (double[2] x) => (double[2] y) { y = Mul(x, x) }")
    assert changing(wide, {"x": np.array([1e200, 1.0])}) == ()


def test_an_infinite_result_is_told_once():
    overflow = model("g (float16[2] x) => (float16[2] y) { [square] y = Mul(x, x) }")
    found = nonfinite(overflow, {"x": half(300, 1)}, forward=True)
    assert [origin.node for origin in found.origins] == ["square"]
    assert found.ranges == ()


def test_an_output_without_a_shape_is_looked_at():
    """A gradient of another builder may declare no sizes, where onnx infers none."""
    shapeless = model("g (float16[2] x, int64[1] s) => (float16 y) { [square] h = Mul(x, x)  y = Reshape(h, s) }")
    shapeless.graph.output[0].type.tensor_type.ClearField("shape")
    [found] = changing(shapeless, {"x": half(300, 1), "s": np.array([2])})
    assert (found.node, found.kind) == ("square", "overflow")
