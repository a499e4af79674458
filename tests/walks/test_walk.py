"""A walk shows the numbers of the gradient, and every contribution, alias, fan-out and broadcast once."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import numpy as np
import onnx
import onnx.parser
import pytest
from rich.console import Console
from walk_checking import check, one_element

import refgrad
from refgrad.cli import main
from refgrad.conformance.cases import every_case
from refgrad.conformance.cases.kinks import at
from refgrad.conformance.problems.feeds import write_arrays
from refgrad.errors import FeedError, NoGradientError, OptionError, UnknownNameError
from refgrad.escaping import REPLACEMENT
from refgrad.reverse.record import SweepRecord
from refgrad.tables.kinks import KINKS
from refgrad.tables.registry import RULES
from refgrad.walks import kinks, text
from refgrad.walks.formulas import formula_text
from refgrad.walks.numbers import as_json, inline, lines, plain
from refgrad.walks.walk import walk

pytestmark = pytest.mark.interpreter

HEAD = '<ir_version: 10, opset_import: ["": 18]> g'


def graph(body: str, inputs: str = "float[2, 3] x, float[3] b", outputs: str = "float loss", constants: str = ""):
    return onnx.parser.parse_model(f"{HEAD} ({inputs}) => ({outputs}) {constants} {{ {body} }}")


def mlp():
    return graph(
        "h = MatMul(x, w) a = Add(h, b) r = Relu(a) s = Mul(r, a) loss = ReduceSum <keepdims = 0> (s)",
        inputs="float[2, 3] x, float[4] b",
        constants="<float[3, 4] w = {1, 2, 3, 4, 5, 6, -7, 8, 9, -1, 2, 3}>",
    )


@pytest.mark.parametrize("operator", sorted({case.operator for case in every_case()}))
def test_every_operator(operator):
    """By its first case without empty tensors."""
    cases = (case for case in every_case() if case.operator == operator)
    case = next(case for case in cases if all(array.size for array in case.feeds.values()))
    try:
        of = one_element(case.model, case.feeds, case.outputs)
        if of is None:
            pytest.skip("its first case has no float output with an element")
        found = walk(case.model, dict(case.feeds), wrt=case.wrt, of=of, differences=False)
    except NoGradientError:
        pytest.skip("it has no gradient")
    check(found)


def test_slices_that_the_gradient_puts_side_by_side():
    """The gradient adds nothing and has no zeros; the walk shows each contribution between its zeros."""
    model = graph(
        "l = Slice(x, o, h, e) r = Slice(x, h, w, e) p = Mul(l, r) loss = ReduceSum <keepdims = 0> (p)",
        inputs="float[2, 4] x",
        constants="<int64[1] o = {0}, int64[1] h = {2}, int64[1] w = {4}, int64[1] e = {1}>",
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = walk(model, {"x": x})
    check(found)
    assert "Pad" not in [node.op_type for node in found.gradient.graph.node]
    assert [node.op_type for node in found.more] == ["Pad", "Pad"]
    left, right = (found.values[part.value] for part in found.cotangents["x"].contributions)
    np.testing.assert_array_equal(left, np.hstack((x[:, 2:], np.zeros((2, 2)))))
    np.testing.assert_array_equal(right, np.hstack((np.zeros((2, 2)), x[:, :2])))


# By hand


def test_a_value_that_is_read_twice_by_one_node():
    """z = x·x: both operands contribute, and the contributions add to 2x."""
    found = walk(graph("z = Mul(x, x)", "float x", "float z"), {"x": np.float32(3)})
    [step] = found.steps
    assert [(part.of, part.position) for part in step.outgoing] == [("x", 0), ("x", 1)]
    assert [float(found.values[part.value]) for part in step.outgoing] == [3, 3]
    cotangent = found.cotangents["x"]
    assert found.values[cotangent.value] == 6
    assert [one.operator for one in cotangent.emitted] == ["Add"]
    assert step.difference.of == "x"
    assert abs(step.difference.difference - 6) < 1e-9
    check(found)


def test_an_mlp_by_hand():
    model = mlp()
    x, b = np.float32([[1, 0, 2], [-1, 1, 0.5]]), np.float32([1, -1, 0, 2])
    w = onnx.numpy_helper.to_array(model.graph.initializer[0])
    found = walk(model, {"x": x, "b": b})
    check(found)
    a = x @ w + b
    r = np.maximum(a, 0)
    ds = np.ones_like(r)
    da = (ds * a + ds * r) * 0 + np.where(a > 0, ds * a, 0) + ds * r
    np.testing.assert_allclose(found.values["a_grad"], da)
    np.testing.assert_allclose(found.values[found.cotangents["b"].value], da.sum(axis=0))
    np.testing.assert_allclose(found.values[found.cotangents["w"].value], x.T @ da)
    np.testing.assert_allclose(found.values[found.cotangents["x"].value], da @ w.T)
    by_operator = {step.operator: step for step in found.steps}
    assert [step.operator for step in found.steps] == ["ReduceSum", "Mul", "Relu", "Add", "MatMul"]
    assert [part.step for part in found.cotangents["a"].contributions] == [3, 2]
    assert found.cotangents["h"].alias == "a"
    [to_h, to_b] = by_operator["Add"].outgoing
    assert (to_h.before, to_b.before, to_b.axes) == ("", "a_grad", (0,))
    assert set(by_operator["MatMul"].read) == {"x", "w"}
    assert by_operator["Add"].read == ()
    for step in found.steps:
        assert step.difference.error < 1e-4 * abs(step.difference.gradient)


def test_sub_negates_what_it_sums():
    found = walk(graph("s = Sub(x, b) e = Exp(s) loss = ReduceSum <keepdims = 0> (e)"))
    check(found)
    [to_x, to_b] = next(step for step in found.steps if step.operator == "Sub").outgoing
    assert to_x.before == ""
    assert (to_b.before, to_b.axes) == ("s_grad", (0,))
    np.testing.assert_allclose(found.values[to_b.summed], found.values["s_grad"].sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(found.values[to_b.value], -found.values[to_b.summed])


def test_an_operand_whose_sizes_only_the_run_tells():
    model = graph("s = Mul(x, b) loss = ReduceSum <keepdims = 0> (s)", "float[N, M] x, float[K] b")
    for shape in ((3,), (1,)):
        found = walk(model, {"x": np.ones((2, 3), np.float32), "b": np.full(shape, 2, np.float32)})
        check(found)
        assert found.steps[-1].outgoing[1].axes == ((0,) if shape == (3,) else (0, 1))
    found = walk(model, {"x": np.ones((1, 3), np.float32), "b": np.ones(3, np.float32)})
    assert [part.axes for part in found.steps[-1].outgoing] == [(), (0,)]


def test_bookkeeping_of_shapes_is_marked():
    model = graph("s = Mul(x, b) loss = ReduceSum <keepdims = 0> (s)", "float[N, M] x, float[K] b")
    marked = {node.operator: node.is_shape for step in walk(model).steps for node in step.emitted}
    assert all(marked[name] for name in ("Shape", "Equal", "Not", "NonZero"))
    assert not any(marked[name] for name in ("Mul", "ReduceSum", "Expand"))


def test_an_element_of_an_output():
    model = graph("y = MatMul(x, w)", "float[2, 3] x", "float[2, 2] y", "<float[3, 2] w = {1, 2, 3, 4, 5, 6}>")
    for of, row, column in (("y[0, 1]", 0, 1), ("y[-1,0]", 1, 0), (" y [1, 1]", 1, 1)):
        found = walk(model, {"x": np.ones((2, 3), np.float32)}, of=of)
        assert found.of == f"y[{row}, {column}]"
        expected = np.zeros((2, 3))
        expected[row] = [[1, 3, 5], [2, 4, 6]][column]
        np.testing.assert_array_equal(found.values[found.cotangents["x"].value], expected)
        check(found)


def test_an_output_whose_name_looks_like_an_element():
    model = graph("t = Neg(x) y = Identity(t)", "float x", "float y")
    model.graph.node[1].output[0] = model.graph.output[0].name = "y[0]"
    assert walk(model, of="y[0]").of == "y[0]"


def test_a_node_with_a_body_is_one_step():
    case = next(case for case in every_case() if case.operator == "Loop")
    found = walk(case.model, dict(case.feeds), of=one_element(case.model, case.feeds))
    check(found)
    step = next(step for step in found.steps if step.operator == "Loop")
    assert "body" in step.attributes
    backward = next(node for node in step.emitted if node.operator in ("Loop", "Scan"))
    assert "agraph" in backward.attributes["body"] or "=>" in backward.attributes["body"]
    assert step.difference.error < 1e-3 * max(abs(step.difference.gradient), 1e-3)
    check_text(found)


def test_a_local_function_is_one_step_or_inlined():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18, "local": 1]>
        g (float[3] x) => (float loss) { a = local.f(x) b = local.f(a) loss = ReduceSum <keepdims = 0> (b) }
        <domain: "local", opset_import: ["": 18]> f (v) => (w) { e = Tanh(v) w = Mul(e, v) }"""
    )
    found = walk(model)
    check(found)
    calls = [step for step in found.steps if step.operator == "f"]
    assert len(calls) == 2
    for step in calls:
        assert step.difference.error < 1e-4 * abs(step.difference.gradient)
        assert any(
            "Tanh" in str(node.attributes.get("body", "")) or node.operator.startswith("local.f")
            for node in step.emitted
        )


def test_the_metadata_say_which_value_is_the_cotangent_of_which():
    model = graph(
        "a = Add(x, b) e = Exp(a) p = Mul(e, a) loss = ReduceSum <keepdims = 0> (p)", "float[2, 3] x, float[3] b"
    )
    made = refgrad.gradient(model)
    told = {
        value.name: json.loads(entry.value)
        for value in (*made.graph.input, *made.graph.output, *made.graph.value_info)
        for entry in value.metadata_props
        if entry.key == "refgrad.cotangent_of"
    }
    assert told == {
        "loss_grad": ["loss"], "p_grad": ["p"], "e_grad": ["e"], "a_grad": ["a", "x"], "x_grad": ["x"], "b_grad": ["b"]
    }  # fmt: skip
    again = refgrad.gradient(made, outputs=["x_grad"])
    for value in (*again.graph.input, *again.graph.output, *again.graph.value_info):
        assert len(value.metadata_props) <= 1
    quoted = graph("e = Exp(x) loss = ReduceSum <keepdims = 0> (e)", "float[3] x")
    quoted.graph.node[0].output[0] = quoted.graph.node[1].input[0] = 'e"\\ü'
    made = refgrad.gradient(quoted)
    assert ['e"\\ü'] in [json.loads(p.value) for v in made.graph.value_info for p in v.metadata_props]


# Differences and planted faults


@pytest.mark.parametrize("operator", ["Tanh", "Mul", "ReduceSum", "MatMul"])
def test_a_wrong_rule_shows_beside_the_difference(operator, monkeypatch):
    model = graph(
        "t = Tanh(x) h = MatMul(t, w) m = Mul(h, h) loss = ReduceSum <keepdims = 0> (m)",
        "float[2, 3] x",
        constants="<float[3, 2] w = {1, 2, 3, 4, 5, 6}>",
    )
    rule = RULES["", operator]

    def wrong(op, *arguments, **keywords):
        made = rule.function(op, *arguments, **keywords)
        first = op.Mul(made[0] if isinstance(made, tuple) else made, 2.001)
        return (first, *made[1:]) if isinstance(made, tuple) else first

    right = walk(model)
    monkeypatch.setitem(RULES, ("", operator), dataclasses.replace(rule, function=wrong))
    found = walk(model)
    shown = {step.operator: step.difference for step in found.steps}
    assert shown[operator].error > 0.3 * abs(shown[operator].difference)
    assert all(step.difference.error < 1e-4 * abs(step.difference.difference) for step in right.steps)


@pytest.mark.parametrize("fault", ["lost", "twice", "elsewhere", "no sum"])
def test_a_wrong_record_does_not_pass(fault, monkeypatch):
    def watched(self, graph, node, pairs):
        for name, adjoint in original(self, graph, node, pairs):
            if node.op_type == "Mul" and self.given[-1].position == 1:
                if fault == "lost":
                    self.given.pop()
                elif fault == "twice":
                    self.given.append(self.given[-1])
                elif fault == "elsewhere":
                    self.given[-1] = self.given[-1]._replace(position=0)
            if fault == "no sum":
                self.summed.clear()
            yield name, adjoint

    original = SweepRecord.watched
    check(walk(mlp(), differences=False))
    monkeypatch.setattr(SweepRecord, "watched", watched)
    with pytest.raises(AssertionError):
        check(walk(mlp(), differences=False))


def test_the_differences_can_be_left_out_and_are_none_for_random_models():
    assert all(step.difference is None for step in walk(mlp(), differences=False).steps)
    drawn = graph("n = RandomNormalLike(x) y = Mul(n, x) loss = ReduceSum <keepdims = 0> (y)", "float[3] x")
    found = walk(drawn)
    assert all(step.difference is None for step in found.steps)
    assert "There are no finite differences: the model draws random numbers in each run." in found.notes


def test_a_walk_is_the_same_each_time():
    assert json.dumps(walk(mlp(), seed=3).to_dict()) == json.dumps(walk(mlp(), seed=3).to_dict())
    assert json.dumps(walk(mlp(), seed=3).to_dict()) != json.dumps(walk(mlp(), seed=4).to_dict())


# Kinks


def test_every_condition_is_one_of_a_row_of_the_table():
    rows = {(kink.operator, kink.where) for kink in KINKS}
    assert set(kinks._CONDITIONS) <= rows
    operators = {operator for operator, _ in kinks._CONDITIONS}
    without = {row for row in rows - set(kinks._CONDITIONS) if row[0] in operators}
    assert without == {("Clip", "min > max")}, "an operator has conditions for all of its rows, or is searched"


@pytest.mark.parametrize("kink", KINKS, ids=lambda kink: f"{kink.operator}: {kink.where}")
def test_the_points_of_the_table_are_found(kink):
    case = at(kink, np.float64)
    of = one_element(case.model, case.feeds)
    found = walk(case.model, dict(case.feeds), of=of, differences=False)
    steps = [step for step in found.steps if step.operator == kink.operator]
    if not steps or kink.where in UNSEEN:
        pytest.skip("the derivative is zero everywhere, or nobody can see the kink from one element alone")
    assert any(one.text.startswith(f"{kink.operator} at ") for step in steps for one in step.kinks)


UNSEEN = frozenset(
    (
        "min > max",
        "every element is −∞",
        "a point lies on an element",
        "the crop ends at the border",
        "an element occurs twice",
    )
)


# The function is infinite there, or it is 0/0, or several kinks lie within the search's reach.
NOT_SEARCHED = frozenset(("Atanh", "Log", "Reciprocal", "ReduceLogSum", "LpNormalization", "Pow", "Mod"))


@pytest.mark.parametrize("operator", sorted({operator for operator, _ in kinks._CONDITIONS} - NOT_SEARCHED))
def test_a_condition_agrees_with_the_search(operator, monkeypatch):
    """The search knows nothing of the operator: it looks for another slope on each side of an element."""
    kink = next(kink for kink in KINKS if kink.operator == operator)
    case = at(kink, np.float64)
    of = one_element(case.model, case.feeds)

    def elements():
        steps = walk(case.model, dict(case.feeds), of=of, differences=False).steps
        return {(one.input, at) for step in steps for one in step.kinks for at in one.elements}

    by_condition = elements()
    monkeypatch.setattr(kinks, "_CONDITIONS", {})
    assert elements() == by_condition


def test_a_derivative_that_another_input_decides_about_is_not_said():
    feeds = {"x": np.float32([0, 1]), "s": np.float32([0.1, 0.1])}
    found = walk(graph("r = PRelu(x, s) loss = ReduceSum <keepdims = 0> (r)", "float[2] x, float[2] s"), feeds)
    assert {kink.text for step in found.steps for kink in step.kinks} == {"PRelu at x = 0: the slope of x < 0"}


def test_a_difference_stays_away_from_kinks():
    x = np.float32([0, 0, 1, -1])
    found = walk(graph("r = Relu(x) loss = ReduceSum <keepdims = 0> (r)", "float[4] x"), {"x": x})
    step = found.steps[-1]
    [kink] = step.kinks
    assert kink.input == "x"
    assert kink.elements == ((0,), (1,))
    assert kink.text == "Relu at x = 0: the derivative 0 is taken: the result is as flat as for x < 0"
    assert step.difference.element == (2,)
    everywhere = walk(
        graph("r = Relu(x) loss = ReduceSum <keepdims = 0> (r)", "float[2] x"), {"x": np.zeros(2, np.float32)}
    )
    assert everywhere.steps[-1].difference is None


# Bad input


def test_no_loss_or_several_outputs():
    two = graph("y = Exp(x) z = Sin(x)", "float[2] x", "float[2] y, float[2] z")
    with pytest.raises(OptionError, match=r"2 float outputs: 'y', 'z'\. Say which one is walked back from: of='y', or"):
        walk(two)
    whole = graph("y = Cast <to = 7> (x)", "float[2] x", "int64[2] y")
    with pytest.raises(
        OptionError, match=r"no float output that could be walked back from; its outputs: 'y'\. Add a loss"
    ):
        walk(whole)
    with pytest.raises(OptionError, match="'y' is int64: it has no derivative"):
        walk(whole, of="y[0]")


@pytest.mark.parametrize("of", [None, "y"])
def test_of_several_elements_the_largest_is_walked_back_from(of):
    found = walk(
        graph("y = Exp(x)", "float[2, 2] x", "float[2, 2] y"), {"x": np.float32([[0, np.nan], [2, -9]])}, of=of
    )
    assert found.of == "y[1, 0]"
    assert found.notes[0] == (
        "The output 'y' has 4 elements: the walk starts from the largest, y[1, 0]. "
        "To choose another: --of 'y[0, 0]' (in Python of=…)."
    )
    np.testing.assert_array_equal(found.values["y_grad"], [[0, 0], [1, 0]])
    alone = walk(graph("y = Exp(x)", "float[1] x", "float[1] y"), {"x": np.zeros(1, np.float32)})
    assert (alone.of, alone.notes) == ("y", ())


def test_an_inner_result_is_differentiated():
    model = graph(
        "h = Exp(x) k = Mul(h, x) q = Add(x, b) loss = ReduceSum <keepdims = 0> (k)", "float[2] x, float[2] b"
    )
    x = np.float32([1, 2])
    found = walk(model, {"x": x}, of="h[1]")
    assert found.of == "h[1]"
    assert found.notes == ()  # b is not needed, and not drawn
    np.testing.assert_allclose(found.values["x_grad"], [0, np.exp(2)], rtol=1e-6)
    assert walk(model, {"x": x, "b": x}, of="h[1]").feeds.keys() == {"x", "b"}
    with pytest.raises(OptionError, match=r"'h' has the shape \[2\], and no element \[7\]"):
        walk(model, {"x": x}, of="h[7]")


def test_the_name_of_a_node_leads_to_its_output():
    model = graph("[first] h = Exp(x) loss = ReduceSum <keepdims = 0> (h)", "float[2] x")
    with pytest.raises(UnknownNameError, match="'first' is a node, and its output is 'h'"):
        walk(model, of="first")


def test_an_element_that_does_not_exist():
    model = graph("y = Exp(x)", outputs="float[2, 3] y", inputs="float[2, 3] x")
    with pytest.raises(OptionError, match=r"shape \[2, 3\], and no element \[3\]\. The last one is y\[1, 2\]\."):
        walk(model, of="y[3]")
    with pytest.raises(OptionError, match=r"no element \[2, 0\]"):
        walk(model, of="y[2, 0]")
    with pytest.raises(OptionError, match=r"an element is written with its indices, such as y\[0, 3\]"):
        walk(model, of="y[1-2]")
    with pytest.raises(UnknownNameError, match=r"of='loss': the model has no output 'loss'\. Its outputs are 'y'\."):
        walk(model, of="loss")
    with pytest.raises(OptionError, match="of=3 is not a text"):
        walk(model, of=3)
    empty = graph("y = Exp(x)", outputs="float[N] y", inputs="float[N] x")
    with pytest.raises(OptionError, match=r"shape \[0\], and no element\. Feed something larger"):
        walk(empty, {"x": np.zeros(0, np.float32)}, of="y[0]")


def test_missing_feeds_are_random_and_said():
    assert walk(mlp(), seed=5).notes == ("'x', 'b' were not fed: they are random, drawn with seed 5.",)
    assert walk(mlp(), {"x": np.ones((2, 3), np.float32)}).notes == (
        "'b' was not fed: it is random, drawn with seed 0.",
    )
    assert walk(mlp(), {"x": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}).notes == ()
    symbolic = graph("y = Add(x, b) loss = ReduceSum <keepdims = 0> (y)", "float[N] x, float[N] b")
    assert walk(symbolic, {"x": np.ones(7, np.float32)}).feeds["b"].shape == (7,)
    assert walk(symbolic, sizes={"N": 2}).feeds["b"].shape == (2,)
    positive = graph("y = Log(x) loss = ReduceSum <keepdims = 0> (y)", "float[9] x")
    assert "between 0 and 1" in walk(positive).notes[0]


def test_feeds_that_do_not_fit():
    with pytest.raises(FeedError, match="have 'y', but the model has no such input"):
        walk(mlp(), {"y": np.ones(3, np.float32)})
    with pytest.raises(FeedError):
        walk(mlp(), {"x": np.ones((2, 4), np.float32), "b": np.ones(4, np.float32)})
    with pytest.raises(UnknownNameError):
        walk(mlp(), wrt=["nothing"])
    impossible = graph(
        "y = Reshape(x, s) loss = ReduceSum <keepdims = 0> (y)", "float[N] x", constants="<int64[1] s = {7}>"
    )
    with pytest.raises(FeedError, match="runs with none of the sizes that were tried"):
        walk(impossible)


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, None])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(OptionError, match="seed is an integer that is not negative, not"):
        walk(mlp(), seed=seed)


@pytest.mark.parametrize("feeds", [[1, 2], [], np.ones(3), "x", 3])
def test_feeds_are_given_by_name(feeds):
    with pytest.raises(FeedError, match=r"Feeds are arrays by the names of inputs, as in \{'x': array\}, not"):
        walk(mlp(), feeds)


@pytest.mark.parametrize(
    ("feed", "said"),
    [
        (3.0, r"give np\.asarray\(\.\.\., 'float32'\) if"),
        ([3.0], r"give np\.asarray\(\.\.\., 'float32'\) if"),
        (np.float64(3), r"convert it with \.astype\('float32'\) if"),
        (np.ones(2), r"convert it with \.astype\('float32'\) if"),
        ("three", r"Give an array of float32: strings cannot"),
        (3j, r"Give an array of float32: complex numbers cannot"),
        (np.ones((), complex), r"Give an array of float32: complex numbers cannot"),
        (None, r"Give an array of float32: Python objects cannot"),
    ],
)
def test_a_feed_of_another_type_says_what_is_expected(feed, said):
    model = graph("z = Mul(x, x)", "float x", "float z")
    with pytest.raises(FeedError, match=f"Input 'x' has dtype float32, the feed .*{said}"):
        walk(model, {"x": feed})


def test_numbers_for_strings_and_a_derivative_by_integers():
    model = graph("w = Mul(x, x) z = Identity(t)", "string t, float x", "float w, string z")
    with pytest.raises(
        FeedError, match=r"Input 't' takes strings, the feed has dtype float32\. Give an array of strings"
    ):
        walk(model, {"t": np.float32(1)})
    numbered = graph("z = Cast <to = 1> (i)", "int64 i", "float z")
    with pytest.raises(UnknownNameError, match=r"The model has no float inputs or initializers\."):
        walk(numbered, wrt=["i"])
    with pytest.raises(UnknownNameError, match=r"The model has the float inputs or initializers 'x'\."):
        walk(model, wrt=["t"], of="w")


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_the_extreme_of_nothing(operator):
    found = walk(graph(f"z = {operator} <keepdims = 0> (x)", "float[N] x", "float z"), {"x": np.zeros(0, np.float32)})
    assert np.isinf(found.values["z"])
    assert found.values["x_grad"].shape == (0,)
    assert found.steps[0].kinks == ()
    check(found)


@pytest.mark.parametrize("x", [[np.inf, 1], [np.nan, 1], [0, 1], [-1, 1], [1e30, -1e30]])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_where_the_output_is_not_finite_there_are_no_differences_and_one_note_says_so(x):
    model = graph("e = Exp(x) l = Log(x) q = Mul(e, l) z = ReduceSum <keepdims = 0> (q)", "float[2] x", "float z")
    found = walk(model, {"x": np.float32(x)})
    assert found.notes == ("There are no finite differences: the output 'z' is not finite at these feeds.",)
    assert not any(step.difference for step in found.steps)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_output_that_only_float64_can_hold():
    found = walk(graph("z = Exp(x)", "float x", "float z"), {"x": np.float32(100)})
    assert found.notes == (
        "0 of 1 steps have a finite difference beside them: the output 'z' is not finite in float32 at these feeds.",
    )


def test_a_weight_may_be_fed():
    w = np.ones((3, 4), np.float32)
    found = walk(mlp(), {"w": w})
    np.testing.assert_array_equal(found.values["w"], w)
    check(found)


def test_a_gradient_that_is_zero_everywhere():
    stopped = walk(graph("f = Floor(x) loss = ReduceSum <keepdims = 0> (f)", "float[2] x"))
    assert "The gradient of 'x' is always 0: no derivative passes through Floor" in stopped.notes[-1]
    check(stopped)
    dead = walk(graph("r = Relu(x) loss = ReduceSum <keepdims = 0> (r)", "float[2] x"), {"x": np.float32([-1, -2])})
    assert "is 0 in every element at these feeds. The derivative becomes 0 in step 2, Relu" in dead.notes[-1]
    check(dead)
    check_text(stopped)


def test_a_gradient_without_elements_is_not_called_zero():
    empty = walk(graph("loss = ReduceSum <keepdims = 0> (x)", "float[0, 3] x"), {"x": np.zeros((0, 3), np.float32)})
    assert not empty.notes
    check(empty)


def test_constants_are_left_out_unless_they_are_named():
    model = graph("p = Pow(x, two) loss = ReduceSum <keepdims = 0> (p)", "float[2] x", constants="<float two = {2}>")
    assert walk(model).wrt == ("x",)
    assert walk(model, {"x": np.float32([1, 2])}, wrt=["x", "two"]).wrt == ("x", "two")


# How it looks


def check_text(found):
    shown = text.text_of(found)
    assert found.of in shown
    console = Console(width=80, file=io.StringIO(), record=True)
    text.show(found, console)
    assert all(len(line) <= 80 for line in console.export_text().splitlines())
    assert "<table" in found._repr_html_() or not found.steps
    for step in found.steps:
        assert step.operator in step._repr_html_()
        json.dumps(step.to_dict(), allow_nan=False)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_text_has_every_number():
    found = walk(mlp(), {"x": np.float32([[1, 0, 2], [-1, 1, 0.5]]), "b": np.float32([1, -1, 0, 2])})
    check_text(found)
    shown = text.text_of(found)
    for words in (
        "step 1  ReduceSum", "step 5  MatMul", "∂r = ∂s·a, ∂a = ∂s·r", "the sum of a_grad_0 + a_grad_1", "(step 2, Mul)",
        "a_grad summed over axis 0", "unchanged: the cotangent of a", "read  w: float32[3, 4]",
        "emits ", "check by ", "the seed",
    ):  # fmt: skip
        assert words in shown, words
    for name in ("loss_grad", "r_grad", "a", "a_grad", "a_grad_0", "x", "x_grad", "w", "w_grad", "b_grad"):
        for line in lines(found.values[name], 72):
            assert line in shown, name
    assert "[sizes]" in text.text_of(
        walk(graph("y = Mul(x, b) loss = ReduceSum <keepdims = 0> (y)", "float[N] x, float[M] b"))
    )


def test_a_small_array_is_shown_in_full_and_a_large_one_by_its_corner():
    assert lines(np.float32([[1, 2.5], [3, -4]])) == ["  1 2.5", "  3  -4"]
    long = lines(np.arange(60), 40)
    assert " ".join(long).split() == [str(k) for k in range(60)]
    assert all(len(line) <= 40 for line in long)
    large = lines(np.arange(200.0).reshape(20, 10))
    assert large[0].split() == ["0", "1", "2", "3", "..."]
    assert len(large) == 5
    assert large[-1] == "(the corner) min 0, mean 99.5, max 199, norm 1626.9, 1 of 200 are 0"
    assert lines(np.zeros((2, 0))) == ["(no elements)"]
    assert lines(np.ones((2, 1, 2), np.int64)) == ["[0]", "  1 1", "[1]", "  1 1"]
    assert lines([np.ones(2)]) == ["[0] float64[2]", "  1 1"]
    assert inline(np.float32([[1], [2]])) == "[[1] [2]]"
    assert as_json(np.float32([1, np.inf])) == {"dtype": "float32", "shape": [2], "elements": [1.0, "inf"]}
    assert "statistics" in as_json(np.zeros(5000))
    assert plain({"a": (np.int64(1), b"x", None)}) == {"a": [1, "x", None]}


def test_a_formula_of_several_paragraphs_is_whole_in_a_notebook():
    found = walk(graph("loss = SoftmaxCrossEntropyLoss (x, labels)", "float[2, 3] x, int64[2] labels"))
    (step,) = found.steps
    assert "\n\n" in step.formula
    assert "NegativeLogLikelihoodLoss The cotangent" in step._repr_html_()
    assert REPLACEMENT not in step._repr_html_()


def test_names_cannot_move_the_cursor():
    model = graph("e = Exp(x) loss = ReduceSum <keepdims = 0> (e)", "float[2] x")
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "e\x1b[2J"
    found = walk(model)
    assert "\x1b" not in text.text_of(found)
    assert "\x1b" not in found.steps[0]._repr_html_()


def test_the_text_says_which_input_a_contribution_comes_through():
    shown = text.text_of(walk(graph("s = Mul(x, x) loss = ReduceSum <keepdims = 0> (s)", "float[2] x"), seed=1))
    assert "(step 2, Mul, its input 0)" in shown
    assert "(step 2, Mul, its input 1)" in shown


def test_a_difference_stands_where_the_sum_is_complete():
    """x is read by both products. The step of the second one checks y instead, and completes nothing of x before step 3."""
    found = walk(graph("p = Mul(x, y) q = Mul(p, x) loss = ReduceSum <keepdims = 0> (q)", "float[2] x, float[2] y"))
    assert [step.difference.of for step in found.steps] == ["q", "p", "x"]
    assert "(the sum of all 2 contributions)" in text.text_of(found, 3)


def test_a_difference_of_a_sum_that_is_not_complete_says_so():
    found = walk(graph("p = Tanh(x) q = Mul(c, x) r = Add(p, q) loss = ReduceSum <keepdims = 0> (r)", "float[2] x",
                       constants="<float c = {2}>"), wrt=["x"])  # fmt: skip
    shown = [text.text_of(found, step.number) for step in found.steps]
    [at] = [k for k, step in enumerate(found.steps) if step.operator == "Mul"]
    assert "(the sum of all 2 contributions, complete at step 4)" in shown[at]
    assert "(the sum of all 2 contributions)" in shown[3]


def test_the_formula_has_the_names_of_the_tensors():
    def formulas(body, **graph_options):
        return [formula_text(step) for step in walk(graph(body, **graph_options), differences=False).steps]

    assert formulas("y = Relu(x) loss = ReduceSum <keepdims = 0> (y)")[1] == "∂x = ∂y where y > 0, else 0"
    gemm = "y = Gemm <transA = {}, transB = {}> (x, b) loss = ReduceSum <keepdims = 0> (y)"
    square = "float[2, 2] x, float[2, 2] b"
    plain = formulas(gemm.format(0, 0), inputs=square)[1]
    assert plain.startswith("∂x = α·∂y·bᵀ, ∂b = α·xᵀ·∂y, ")
    turned = formulas(gemm.format(1, 1), inputs=square)[1]
    assert turned.startswith("∂xᵀ = α·∂y·b, ∂bᵀ = α·x·∂y, ")


def test_emitted_nodes_have_their_attributes():
    inputs = "float[2, 3] x, float[3, 4] b"
    shown = text.text_of(walk(graph("y = Gemm(x, b) r = Relu(y) loss = ReduceSum <keepdims = 0> (r)", inputs)))
    assert "b_grad = Gemm(x, y_grad) with beta = 0, transA = 1, transB = 0" in shown
    assert "with to = bool" in shown
    assert "loss = ReduceSum(r) with keepdims = 0" in shown


# The command


def command(*arguments, capsys):
    code = main([*map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "mlp.onnx"
    onnx.save(mlp(), path)
    return path


def test_the_command(saved, tmp_path, capsys):
    code, out, err = command("walk", saved, capsys=capsys)
    assert (code, err) == (0, "")
    assert "note: 'x', 'b' were not fed" in out
    assert "the gradients" in out
    code, out, _ = command("walk", saved, "--step", 3, capsys=capsys)
    assert code == 0
    assert re.match(r"loss, backwards through 5 nodes\nnote: 'x', 'b' were not fed.*\n\nstep 3  Relu", out)
    assert "step 4" not in out
    name = walk(mlp()).steps[2].node
    assert command("walk", saved, "--step", name, capsys=capsys)[1] == out
    write_arrays(tmp_path / "feeds.npz", {"x": np.ones((2, 3), np.float32)})
    code, out, _ = command("walk", saved, "--feeds", tmp_path / "feeds.npz", "--json", capsys=capsys)
    assert json.loads(out)["notes"] == ["'b' was not fed: it is random, drawn with seed 0."]
    assert json.loads(out) == json.loads(json.dumps(walk(mlp(), {"x": np.ones((2, 3), np.float32)}).to_dict()))
    code, out, _ = command("walk", saved, "--step", 1, "--json", "--no-differences", "--wrt", "w", capsys=capsys)
    assert json.loads(out)["difference"] is None
    assert json.loads(out)["values"]["loss_grad"]["elements"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--step", "9"],
            "There is no step 9. The steps, the last forward node first: 1 ReduceSum ReduceSum_4, 2 Mul Mul_3, 3 ",
        ),
        (["--step", "relu"], "There is no step relu. The steps, the last forward node first: 1 ReduceSum"),
        (["--step", "0"], "There is no step 0. The steps"),
        (["--of", "y"], "--of y: the model has no output 'y'. Its outputs are 'loss'."),
        (["--of", "loss[0]"], "has the shape [], and no element [0]"),
        (["--feeds", "nowhere.npz"], "nowhere.npz"),
        (["--wrt", "v"], "'v'"),
    ],
)
def test_the_command_refuses(saved, capsys, arguments, said):
    code, out, err = command("walk", saved, *arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_the_public_name_is_imported_when_it_is_asked_for():
    assert refgrad.walk is walk
    with pytest.raises(AttributeError, match="no attribute 'wlak'"):
        refgrad.wlak  # noqa: B018


def test_a_size_that_the_model_declares_wrongly_is_taken_from_the_run():
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N, 2] x) => (float[N] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> '
        "{ s = Constant <value_ints = [-1]> () z = MatMul(x, w) y = Reshape(z, s) }"
    )
    walked = walk(model, {"x": np.ones((1, 2), np.float32)}, wrt=["x"])
    [sent] = walked.steps[-1].outgoing
    np.testing.assert_array_equal(walked.values[sent.value], [[3, 6]])
