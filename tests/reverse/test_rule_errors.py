"""A rule that asks for what there is not, or returns what it must not, is told which rule, node and input it was."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import refgrad
from refgrad.backends import get_backend
from refgrad.builder.function import FunctionEmitter
from refgrad.errors import BrokenRuleError, RuleError, UnknownOperatorError
from refgrad.rules.control_flow import If
from refgrad.tables.registry import RULES, rule

pytestmark = pytest.mark.interpreter

MUL = """<ir_version: 8, opset_import: ["": 18]> m (float[2] a, float[2] b) => (float[2] y)
{ [times] c = Mul(a, b) y = Exp(c) }"""
SUM = """<ir_version: 8, opset_import: ["": 18]> m (float[2] a, float[2] b) => (float[2] y)
{ [plus] c = Sum(a, b) y = Exp(c) }"""
OF = {"Mul": MUL, "Sum": SUM, "Exp": MUL}


def fail_with(monkeypatch: pytest.MonkeyPatch, operator: str, function: Callable[..., Any]) -> str:
    """What `gradient` says of a rule for `operator`."""
    monkeypatch.setitem(RULES, ("", operator), RULES["", operator])
    rule(operator, replace=True)(function)
    with pytest.raises(RuleError) as caught:
        refgrad.gradient(onnx.parser.parse_model(OF[operator]))
    return str(caught.value)


RETURNED = {
    "None": (None, "returned None for node 'times'; expected one each for A, B: return a tuple of 2"),
    "one name": ("c", "returned the name 'c' for node 'times'; expected one each for A, B"),
    "a list": (["c", "c"], "returned a list of 2 for node 'times'; expected one each for A, B"),
    "three": (("c", "c", "c"), "returned 3 cotangents for node 'times'"),
    "a number": (
        ("c", 2.0),
        "returned the number 2.0 for input B of node 'times': a number is emitted with op.full_like",
    ),
    "an array": ((np.ones(2), "c"), r"returned an array of shape (2,) for input A of node 'times'"),
    "a name": (("c", "nobody"), "returned the name 'nobody' for input B of node 'times', which no node, input or"),
    "a near name": (("times_Gra", "c"), "for input A of node 'times'"),
    "outputs": ((("c", "c"), "c"), "returned a tuple of 2 for input A of node 'times': take one of them"),
    "list within": ((["c"], "c"), "returned a list of 1 for input A of node 'times', which is not variadic"),
    "an object": ((object(), "c"), "returned an object of type object for input A of node 'times'"),
}


@pytest.mark.parametrize("which", RETURNED)
def test_what_a_rule_must_not_return_is_said(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, message = RETURNED[which]
    said = fail_with(monkeypatch, "Mul", lambda op, d_C: result)
    assert "The rule for Mul" in said
    assert message in said


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("c", "returned the name 'c' for the variadic input data_0 of node 'plus'; return a list of 2 cotangents"),
        (None, "returned None for the variadic input data_0 of node 'plus'"),
        (["c"], "returned a list of 1 for the variadic input data_0 of node 'plus'"),
        (["c", 1.0], "returned the number 1.0 for input data_0[1] of node 'plus'"),
    ],
)
def test_a_variadic_input_takes_a_list(result: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert message in fail_with(monkeypatch, "Sum", lambda op, d_sum: result)


def test_a_list_for_a_variadic_input_may_be_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, ("", "Sum"), RULES["", "Sum"])
    rule("Sum", replace=True)(lambda op, d_sum: (d_sum, None))
    made = refgrad.gradient(onnx.parser.parse_model(SUM), wrt=["a", "b"])
    assert [output.name for output in made.graph.output] == ["a_grad", "b_grad"]


BRANCH = """<ir_version: 8, opset_import: ["": 18]> m (bool c, float[2] a, float[2] b) => (float[2] y) {
    [choose] y = If (c) <then_branch = g1 () => (float[2] s) { s = Mul(a, a) },
                         else_branch = g2 () => (float[2] t) { t = Neg(b) }>
}"""
STRUCTURED = {
    "None": (
        None,
        "returned None for node 'choose'; differentiate gives pairs: the name of a value that the node reads",
    ),
    "a name": ("a", "returned the name 'a' for node 'choose'; differentiate gives pairs"),
    "names": (["a", "b"], "returned the name 'a' as a pair for node 'choose'; differentiate gives pairs"),
    "a triple": ([("a", "y", "y")], "returned a tuple of 3 as a pair for node 'choose'"),
    "another's": (
        [("t", "y")],
        "returned a cotangent of the name 't' for node 'choose', which reads 'c', 'a', 'b'; differentiate gives pairs",
    ),
    "an object": ([(object(), "y")], "returned a cotangent of an object of type object for node 'choose'"),
    "an array": ([(np.ones(2), "y")], "returned a cotangent of an array of shape (2,) for node 'choose'"),
    "a number": ([("a", 2.0)], "returned the number 2.0 for value 'a' of node 'choose': a number is emitted with"),
    "nobody": ([("b", "nobody")], "returned the name 'nobody' for value 'b' of node 'choose', which no node, input or"),
}


@pytest.mark.parametrize("which", STRUCTURED)
def test_what_a_control_flow_rule_must_not_return_is_said(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, message = STRUCTURED[which]
    monkeypatch.setattr(If, "differentiate", lambda self, op, route, cotangents: result)
    with pytest.raises(RuleError) as caught:
        refgrad.gradient(onnx.parser.parse_model(BRANCH), wrt=["a", "b"])
    assert str(caught.value).startswith("The control-flow rule If returned")
    assert message in str(caught.value)


def test_a_control_flow_rule_may_return_pairs_in_any_order_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"b": None, "a": "y_grad", "c": None}
    monkeypatch.setattr(If, "differentiate", lambda self, op, route, cotangents: given.items())
    made = refgrad.gradient(onnx.parser.parse_model(BRANCH), wrt=["a", "b"])
    read = {node.output[0]: (node.op_type, node.input[0]) for node in made.graph.node}
    assert read["a_grad"] == ("Identity", "y_grad")


TWO_TYPES = (
    """<ir_version: 8, opset_import: ["": 18]> m (float[2] a, double[2] b) => (float[2] c) { [power] c = Pow(a, b) }"""
)


@pytest.mark.parametrize("kind", ["float", "double", "float16"])
def test_the_numbers_of_a_where_have_the_type_of_the_float_inputs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, ("", "Mul"), RULES["", "Mul"])
    rule("Mul", replace=True)(lambda op, d_C, A, B: (op.Where(op.Greater(A, B), 1, 0.5), None))
    made = refgrad.gradient(onnx.parser.parse_model(MUL.replace("float", kind)), wrt=["a"])
    onnx.checker.check_model(made, full_check=True)
    numbers = {t.data_type for t in made.graph.initializer}
    assert numbers == {getattr(onnx.TensorProto, kind.upper())}


def test_a_number_without_a_type_says_how_to_give_it_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "no operand says of which type it is. Write op.const(1.0, like=x)"
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Add(1.0, 2.0), None))
    assert "The rule for Mul of node 'times' gives op.Add the number" in said
    assert hint in said
    monkeypatch.setitem(OF, "Pow", TWO_TYPES)
    said = fail_with(monkeypatch, "Pow", lambda op, d_Z, X, Y: (op.Where(op.Equal(X, X), 1.0, 0.0), None))
    assert "The rule for Pow of node 'power' gives op.Where the number 1.0" in said
    assert hint in said


def test_a_misspelt_operator_says_rule_node_and_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Sqare(A), B))
    assert "The rule for Mul of node 'times' uses op.Sqare" in said
    assert "Did you mean" in said
    assert "Sqrt" in said
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Sogmoid(A), B))
    assert "Did you mean Sigmoid" in said
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.zero_like(A), B))
    assert "op.zero_like, which is neither" in said
    assert "zeros_like" in said
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.grad.ReluGard(A), B))
    assert "The rule for Mul of node 'times' uses op.grad.ReluGard" in said
    assert "Did you mean ReluGrad" in said


def test_a_node_that_its_schema_does_not_allow_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Add(A, B, axis=3), B))
    assert said.startswith("The rule for Mul of node 'times' gives op.Add the attribute 'axis'.")
    assert "it takes A, B, has the attributes none, and returns C" in said
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.ReduceSum(A, axes=[0]), B))
    assert "gives op.ReduceSum the attribute 'axes'" in said
    assert "it takes data, axes, has the attributes 'keepdims', 'noop_with_empty_axes'" in said
    monkeypatch.setitem(RULES, ("", "Mul"), RULES["", "Mul"])
    rule("Mul", replace=True)(lambda op, d_C, A, B: (op.Clip(d_C, None, None), op.Neg(d_C, None)))
    refgrad.gradient(onnx.parser.parse_model(MUL))
    assert "gives op.Neg 2 inputs" in fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Neg(A, B), B))
    assert "gives op.Add 1 inputs" in fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Add(A), B))
    assert "gives op.Neg 2 outputs" in fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: op.Neg(A, outputs=2))
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Gelu(A), B))
    assert "op.Gelu, which ai.onnx has from opset 20 on" in said


def test_a_body_does_not_lose_the_fraction_of_a_number() -> None:
    op = FunctionEmitter(18, "Threshold", "first")
    op.types["k"] = TensorProto.INT64, 0
    with pytest.raises(BrokenRuleError, match=r"node 'first' gives 1\.05; expected int64"):
        op.Add("k", 1.05)


def test_python_may_still_ask_whether_there_is_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def mul(op: Any, d_C: str) -> Any:
        asked.extend(hasattr(op, name) for name in ("Sqare", "Sqrt", "__array__"))
        asked.append(hasattr(op.grad, "Nothing"))
        return d_C, d_C

    monkeypatch.setitem(RULES, ("", "Mul"), RULES["", "Mul"])
    rule("Mul", replace=True)(mul)
    refgrad.gradient(onnx.parser.parse_model(MUL))
    assert asked == [False, True, False, False]
    assert issubclass(UnknownOperatorError, RuleError)


def test_an_argument_that_names_no_value_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Mul(d_C, "A"), d_C))
    assert said.startswith("The rule for Mul of node 'times' reads 'A', which no node, input or constant is called.")
    said = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (op.Neg(op.Split(A, outputs=2)), d_C))
    assert "The rule for Mul of node 'times' gives several values as one argument: 'times_Grad/Split_0_0'" in said
    assert "take one of them" in said


def test_an_error_of_python_in_a_rule_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, ("", "Mul"), RULES["", "Mul"])
    rule("Mul", replace=True)(lambda op, d_C, A, B: 1 / 0)
    with pytest.raises(BrokenRuleError) as caught:
        refgrad.gradient(onnx.parser.parse_model(MUL))
    line = inspect.currentframe().f_lineno - 3  # type: ignore[union-attr]
    assert str(caught.value).startswith(
        f"In the rule for Mul of node 'times', at {__file__}:{line}: ZeroDivisionError: division by zero. The node reads "
        "'a' float[2], 'b' float[2]. "
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (lambda op, d: op.Transpose(d, perm=[0.0]), "gives op.Transpose perm=[0.0], which is FLOATS: it takes INTS"),
        (lambda op, d: op.Transpose(d, perm=[False]), "gives op.Transpose perm=[False], which takes INTS"),
        (
            lambda op, d: op.Transpose(d, perm={"a": 1}),
            "gives op.Transpose perm={'a': 1}, which is STRINGS: it takes INTS",
        ),
        (lambda op, d: op.Cast(d, to="float"), "gives op.Cast to='float', which is STRING: it takes INT"),
        (lambda op, d: op.com_microsoft("Own", d, of=object), "an attribute is a number, a string, a tensor, a graph"),
        (lambda op, d: op.full([2], None, like=d), "gives None; expected a number"),
        (lambda op, d: op.Mul(d, op.const(None, like=d)), "gives None; expected a number"),
        (lambda op, d: op.full([2], 1.5, like=op.Shape(d)), "gives 1.5; expected int64"),
        (lambda op, d: op.const([np.ones(2)], like=d), "of a list with an array of shape (2,)"),
        (lambda op, d: op.const([[np.arange(2)]]), "of a list with an array of shape (2,)"),
        (lambda op, d: op.Mul(d, [[d], [1]]), "gives several values as one argument"),
    ],
)
def test_a_setting_or_a_constant_that_cannot_be_written_is_said(
    written: Callable[[Any, str], str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = fail_with(monkeypatch, "Mul", lambda op, d_C, A, B: (written(op, d_C), None))
    assert message.startswith("The rule for Mul of node 'times' ")
    assert said in message


def test_settings_that_are_equal_and_written_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeakyRelu(−1, α) is −α: of 0.0 and −0.0 the inverses have different signs. An integer is written as a float is."""

    def mul(op: Any, d_C: str, A: str, B: str) -> Any:
        below = [op.LeakyRelu(op.Neg(op.Mul(A, A)), alpha=alpha) for alpha in (0.0, -0.0, 1, 1.0)]
        assert below[2] == below[3]
        return tuple(op.Clip(op.Div(1.0, value), -7.0, 7.0) for value in below[:2])

    monkeypatch.setitem(RULES, ("", "Mul"), RULES["", "Mul"])
    rule("Mul", replace=True)(mul)
    made = refgrad.gradient(onnx.parser.parse_model(MUL))
    feeds = {value.name: np.ones(2, np.float32) for value in made.graph.input}
    with np.errstate(divide="ignore"):
        found = get_backend("numpy").prepare(made).run(feeds)
    assert set(found["a_grad"].ravel()) == {-7}
    assert set(found["b_grad"].ravel()) == {7}
