"""Two graphs are the same, or they are not, and the answer says where."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

import refgrad
from refgrad.conformance.tools.parity.structure import OVERLOOKED, compare
from refgrad.errors import InvalidModelError, OptionError
from refgrad.show import demo

HEAD = '<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> g (float[N, 3] x, float[3] b)'


def graph(body: str, outputs: str = "float[N, 3] y", constants: str = "") -> ModelProto:
    return onnx.parser.parse_model(f"{HEAD} => ({outputs}) {constants} {{ {body} }}")


SAME = {
    "names of values": ("t = Exp(x) y = Mul(t, b)", "s = Exp(x) y = Mul(s, b)"),
    "order of nodes": ("s = Exp(x) t = Sin(x) y = Add(s, t)", "t = Sin(x) s = Exp(x) y = Add(s, t)"),
    "order of the operands of a sum": ("t = Exp(x) y = Sum(t, x, b)", "t = Exp(x) y = Sum(b, t, x)"),
    "order of the operands of a bitwise operator": (
        "i = Cast<to = 7>(x) j = Cast<to = 7>(b) k = BitwiseXor(i, j) y = Cast<to = 1>(k)",
        "i = Cast<to = 7>(x) j = Cast<to = 7>(b) k = BitwiseXor(j, i) y = Cast<to = 1>(k)",
    ),
    "a node that occurs twice": ("s = Exp(x) y = Add(s, s)", "s = Exp(x) t = Exp(x) y = Add(s, t)"),
    "a node that nobody needs": ("y = Exp(x)", "t = Sin(x) y = Exp(x)"),
    "a default that is written": ("y = Softmax(x)", "y = Softmax<axis = -1>(x)"),
    "a default of the forward operator": (
        "y = com.microsoft.LeakyReluGrad(x, x)",
        "y = com.microsoft.LeakyReluGrad<alpha = 0.01>(x, x)",
    ),
    "an Identity": ("y = Exp(x)", "t = Identity(x) s = Exp(t) y = Identity(s)"),
    "a trailing empty input": ("y = Clip(x)", 'y = Clip(x, "", "")'),
    "a subgraph under other names": (
        "c = Constant<value = bool {1}>() y = If(c)<then_branch = t () => (float[N, 3] u) { u = Exp(x) }, "
        "else_branch = e () => (float[N, 3] v) { v = Sin(x) }>",
        "d = Constant<value = bool {1}>() y = If(d)<then_branch = a () => (float[N, 3] p) { p = Exp(x) }, "
        "else_branch = o () => (float[N, 3] q) { q = Sin(x) }>",
    ),
}
DIFFERENT = {
    "another operator": ("y = Exp(x)", "y = Sin(x)"),
    "another operand": ("y = Add(x, b)", "y = Add(x, x)"),
    "operands exchanged where order counts": ("y = Sub(x, b)", "t = Add(b, x) y = Sub(t, b)"),
    "another attribute": ("y = Softmax<axis = 0>(x)", "y = Softmax(x)"),
    "another output of a node": ("y, t = Split<axis = 1>(x)", "t, y = Split<axis = 1>(x)"),
    "another constant": (
        "c = Constant<value = float {1}>() y = Add(x, c)",
        "c = Constant<value = float {2}>() y = Add(x, c)",
    ),
    "a constant of another shape": (
        "c = Constant<value = float {1}>() y = Add(x, c)",
        "c = Constant<value = float[1] {1}>() y = Add(x, c)",
    ),
    "another domain": ("y = Gelu(x)", "y = com.microsoft.Gelu(x)"),
    "another branch": (
        "c = Constant<value = bool {1}>() y = If(c)<then_branch = t () => (float[N, 3] u) { u = Exp(x) }, "
        "else_branch = e () => (float[N, 3] v) { v = Sin(x) }>",
        "c = Constant<value = bool {1}>() y = If(c)<then_branch = t () => (float[N, 3] u) { u = Exp(x) }, "
        "else_branch = e () => (float[N, 3] v) { v = Sin(b) }>",
    ),
    "an operand once and twice": ("y = Sum(x, b)", "y = Sum(x, b, b)"),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME.keys())
def test_what_does_not_count(pair):
    left, right = map(graph, pair)
    assert compare(left, right).isomorphic
    assert str(compare(left, right)) == "isomorphic"


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_counts(pair):
    left, right = map(graph, pair)
    found = compare(left, right)
    assert not found
    assert {difference.tensor for difference in found.differences} <= {"y", "t", "c"}
    assert found.differences
    assert bool(compare(left, left)) is bool(compare(right, right)) is True


def test_a_constant_node_is_an_initializer():
    node = graph("c = Constant<value = float[3] {1, 2, 3}>() y = Add(x, c)")
    assert compare(node, graph("y = Add(x, c)", constants="<float[3] c = {1, 2, 3}>"))
    assert compare(graph("c = Constant<value_int = 2>() t = Cast<to = 1>(c) y = Add(x, t)"),
                   graph("t = Cast<to = 1>(c) y = Add(x, t)", constants="<int64 c = {2}>"))  # fmt: skip


def test_an_initializer_that_the_other_has_as_an_input_is_matched_by_name():
    inside = graph("y = Add(x, w)", constants="<float[3] w = {1, 2, 3}>")
    outside = onnx.parser.parse_model(
        f"{HEAD.replace('float[3] b', 'float[3] b, float[3] w')} => (float[N, 3] y) {{ y = Add(x, w) }}"
    )
    assert compare(inside, outside)
    assert not compare(inside, graph("y = Add(x, w)", constants="<float[3] w = {1, 2, 4}>"))


def test_a_value_that_one_is_fed_and_the_other_computes_is_not_the_same():
    fed = onnx.parser.parse_model(f"{HEAD.replace('x,', 'x, float[N, 3] t,')} => (float[N, 3] y) {{ y = Mul(t, b) }}")
    assert not compare(fed, graph("t = Exp(x) y = Mul(t, b)"))


def test_nodes_may_come_in_any_order():
    turned = graph("s = Exp(x) t = Sin(s) y = Add(t, b)")
    turned.graph.node.insert(0, turned.graph.node.pop())
    assert compare(turned, graph("s = Exp(x) t = Sin(s) y = Add(t, b)"))


def test_a_difference_shows_the_nodes_between_the_tensors_that_both_name():
    left = graph("a = Exp(x) m = Sin(a) n = Mul(m, b) k = Cos(n) y = Neg(k)")
    right = graph("a = Exp(x) q = Sin(a) n = Div(q, b) k = Cos(n) y = Neg(k)")
    [difference] = compare(left, right).differences
    assert difference.tensor == "n"
    assert difference.left == ("m = Sin(a)", "n = Mul(b, m)")
    assert difference.right == ("q = Sin(a)", "n = Div(q, b)")
    assert str(difference).splitlines() == [
        "n:",
        "  left   m = Sin(a)",
        "  left   n = Mul(b, m)",
        "  right  q = Sin(a)",
        "  right  n = Div(q, b)",
    ]


def test_an_output_that_one_lacks():
    found = compare(graph("y = Exp(x) z = Sin(x)", "float[N, 3] y, float[N, 3] z"), graph("y = Exp(x)"))
    assert not found
    [difference] = found.differences
    assert (difference.tensor, difference.left, difference.right) == ("z", ("z = Sin(x)",), ())
    assert "right  is not computed" in str(difference)


def test_training_operators_and_names_of_gradients_are_compared_by_themselves():
    left = graph("x_grad_0 = com.microsoft.ReluGrad(x, x) x_grad = Sum(x_grad_0, x) y = Exp(x_grad)")
    right = graph("t = com.microsoft.TanhGrad(x, x) x_grad = Sum(t, x) y = Exp(x_grad)")
    found = compare(left, right)
    assert not found.same_operators
    assert dict(found.operators[0]) == {"ReluGrad": 1}
    assert dict(found.operators[1]) == {"TanhGrad": 1}
    assert not found.same_names
    assert found.names == (frozenset({"x_grad_0"}), frozenset())


def test_a_name_that_only_looks_like_a_gradient_is_none():
    assert compare(graph("of_grad = Exp(x) y = Neg(of_grad)"), graph("t = Exp(x) y = Neg(t)")).same_names


def test_differences_that_are_overlooked():
    with_zero = graph("s = Shape(x) y = Reshape<allowzero = 1>(x, s)")
    assert not compare(with_zero, graph("s = Shape(x) y = Reshape(x, s)"))
    assert compare(with_zero, graph("s = Shape(x) y = Reshape(x, s)"), ["allowzero"])
    scalar, single = map(graph, DIFFERENT["a constant of another shape"])
    assert not compare(scalar, single, ["allowzero"])
    assert compare(scalar, single, OVERLOOKED)


def test_bad_input():
    with pytest.raises(
        OptionError, match="There is no difference 'size' to overlook; there are 'allowzero', 'one element'"
    ):
        compare(graph("y = Exp(x)"), graph("y = Exp(x)"), ["size"])
    broken = graph("y = Exp(x)")
    broken.graph.node[0].input[0] = "nowhere"
    with pytest.raises(InvalidModelError, match=r"The node 'Exp' reads 'nowhere', which nothing gives\."):
        compare(broken, graph("y = Exp(x)"))
    cycle = graph("t = Exp(x) y = Add(t, x)")
    cycle.graph.node[0].input[0] = "y"
    with pytest.raises(InvalidModelError, match="The graph has a cycle through the node 'Exp'"):
        compare(cycle, graph("y = Exp(x)"))


def test_the_models_are_not_modified():
    left, right = graph("s = Exp(x) y = Add(s, b)"), graph("y = Exp(x)")
    before = left.SerializeToString(), right.SerializeToString()
    compare(left, right)
    assert before == (left.SerializeToString(), right.SerializeToString())


def test_the_same_gradient_twice_is_isomorphic_and_in_two_dialects_is_not():
    model = demo.regression()
    left, right = (refgrad.gradient(model, outputs=["loss"], dialect=dialect) for dialect in ("onnx", "ort"))
    assert compare(left, left)
    found = compare(left, right)
    assert not found
    assert found.operators[0] == {}
    assert found.operators[1]["SliceGrad"] == 2


def test_a_long_chain_needs_no_recursion():
    count = 20_000
    nodes = [helper.make_node("Neg", [f"v{k}"], [f"v{k + 1}"]) for k in range(count)]
    value = helper.make_tensor_value_info
    chain = helper.make_model(
        helper.make_graph(nodes, "g", [value("v0", 1, [3])], [value(f"v{count}", 1, [3])]), ir_version=10
    )
    assert compare(chain, chain)


def test_large_constants_and_those_in_files_are_told_apart():
    array = np.arange(1000, dtype=np.float32)
    model = graph("y = Add(x, c)")
    model.graph.initializer.append(numpy_helper.from_array(array.reshape(1, 1000), "c"))
    other = ModelProto()
    other.CopyFrom(model)
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(array.reshape(1, 1000) + 1, "c"))
    assert not compare(model, other)
    apart = ModelProto()
    apart.CopyFrom(model)
    tensor = apart.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    assert compare(apart, apart)
    assert not compare(apart, model)
