"""A whole operator from outside: no schema, one module, and everything that refgrad says of an operator holds for it."""

from collections.abc import Iterator
from typing import Any, Optional

import numpy as np
import onnx
import pytest
from registering import forgetting

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance import check, node_case, select, strategies, tables
from refgrad.conformance.oracles import get_oracle
from refgrad.conformance.oracles.complex_step import Tangent
from refgrad.conformance.problems.observation import NotApplicable
from refgrad.conformance.problems.problem import ask
from refgrad.errors import BackendError, InvalidModelError, NoGradientError, PluginError, RuleError
from refgrad.extend import (
    Arguments,
    UnsupportedFormError,
    body,
    case,
    forward,
    kernel,
    kernel_of_body,
    no_derivative,
    rule,
    strategy,
    zero,
)
from refgrad.protos.types import FLOATS
from refgrad.show.explain import explain
from refgrad.tables import definitions
from refgrad.tables.definitions import Ints
from refgrad.tables.operators import operators

pytestmark = pytest.mark.interpreter

NAME = "my.domain.SquaredHinge"
RNG = np.random.default_rng(0)
SCORES = RNG.standard_normal((4, 3)).astype(np.float32)
LABELS = np.where(RNG.standard_normal((4, 3)) > 0, 1, -1).astype(np.float32)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with forgetting():
        yield


def define(factor: float = -2.0) -> None:
    """SquaredHinge; with another factor its rule is wrong."""

    @rule("SquaredHinge", domain="my.domain")
    def squared_hinge(op: Any, d_loss: str, scores: str, labels: str, *, margin: float = 1.0) -> Any:
        """dscores = −2·labels·max(0, margin − labels·scores)·dloss, dlabels = −2·scores·max(0, …)·dloss"""
        gap = op.Mul(op.Mul(op.Relu(op.Sub(margin, op.Mul(labels, scores))), factor), d_loss)
        return op.Mul(labels, gap), op.Mul(scores, gap)

    @kernel("SquaredHinge", domain="my.domain")
    def in_numpy(scores: np.ndarray, labels: np.ndarray, *, margin: float = 1.0) -> np.ndarray:
        return np.maximum(0, margin - labels * scores) ** 2

    @forward("SquaredHinge", domain="my.domain", analytic=True)
    def by_cases(scores: np.ndarray, labels: np.ndarray, margin: float = 1.0) -> np.ndarray:
        gap = margin - labels * scores
        return np.where(gap.real > 0, gap * gap, 0)

    @case("SquaredHinge", domain="my.domain")
    def cases(make: Any) -> Iterator[Any]:
        for shapes in ("static", "symbolic", "unknown"):
            yield make(SCORES, LABELS, shapes=shapes)
            yield make(SCORES, LABELS, margin=2.0, shapes=shapes)

    @strategy("SquaredHinge", domain="my.domain")
    def drawn(d: Any) -> Any:
        shape = d.shape()
        return d.case(d.normal(shape), d.normal(shape), margin=d.pick(None, 2.0))


def model(body: str, type_of: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18, "my.domain": 3]>
        m ({type_of}[N, M] x, {type_of}[N, M] t, bool c) => ({type_of} y) {{ {body} }}"""
    )


HINGE = "s = Mul(x, x) l = my.domain.SquaredHinge <margin = 2.0> (s, t) m = Mul(l, l) y = ReduceSum <keepdims = 0> (m)"


@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("kind", ["float", "double"])
def test_the_gradient_is_right(kind: str, dialect: str) -> None:
    define()
    gradient = refgrad.gradient(model(HINGE, kind), wrt=["x", "t"], dialect=dialect)
    onnx.checker.check_model(gradient)
    dtype = np.float32 if kind == "float" else np.float64
    x, t = SCORES.astype(dtype), LABELS.astype(dtype)
    feeds = {"x": x, "t": t, "y_grad": np.array(3, dtype), "c": np.array(True)}
    prepared = get_backend("numpy").prepare(gradient)
    found = prepared.run({value.name: feeds[value.name] for value in prepared.inputs})
    gap = np.maximum(0, 2 - t * x**2)
    np.testing.assert_allclose(found["x_grad"], 3 * 4 * gap**3 * -t * 2 * x, rtol=1e-5)
    np.testing.assert_allclose(found["t_grad"], 3 * 4 * gap**3 * -(x**2), rtol=1e-5)


def test_the_checks_agree_and_see_a_wrong_rule() -> None:
    define()
    feeds = {"x": SCORES, "t": LABELS, "c": np.array(True)}
    rows = check(model(HINGE), feeds=feeds, backends=["numpy"]).rows
    assert {row.verdict for row in rows} == {"right"}


def test_a_wrong_rule_is_seen() -> None:
    define(factor=-2.002)
    rows = check(model(HINGE), feeds={"x": SCORES, "t": LABELS, "c": np.array(True)}, backends=["numpy"]).rows
    assert "wrong" in {row.verdict for row in rows}


def test_a_chain_of_operators_of_unknown_shape_has_types() -> None:
    """A number beside a result, a branch and a second operator all need the element type; so does the second derivative."""
    define()
    body = """l = my.domain.SquaredHinge (x, t) k = my.domain.SquaredHinge (l, t)
    z = If (c) <then_branch = g1 () => (double[N, M] a) { q = my.domain.SquaredHinge(k, t) a = Exp(q) },
        else_branch = g2 () => (double[N, M] b) { b = Neg(k) }>
    y = ReduceSum <keepdims = 0> (z)"""
    gradient = refgrad.gradient(model(body, "double"), wrt=["x"])
    types = {value.name: value.type.tensor_type.elem_type for value in gradient.graph.value_info}
    assert types["l"] == types["k"] == onnx.TensorProto.DOUBLE
    assert onnx.TensorProto.DOUBLE in FLOATS
    twice = refgrad.gradient(gradient, wrt=["x"], outputs=["x_grad"])
    onnx.checker.check_model(twice)


def test_it_is_listed_explained_and_on_the_path() -> None:
    define()
    explained = explain(NAME)
    assert (explained.verdict, explained.wrt) == ("rule", ("scores", "labels"))
    assert (explained.inputs, explained.outputs) == (("scores", "labels"), ("loss",))
    assert NAME in {row.operator for row in operators()}
    rows = {row.operator: row.verdict for row in refgrad.preflight(model(HINGE)).rows}
    assert rows[NAME] == "rule"


def test_the_suite_has_its_cases_and_draws_others() -> None:
    define()
    found = list(select(tables(), [NAME]))
    assert len(found) == 6
    assert {c.provenance for c in found} == {__name__}
    assert len(list(select(tables(), [NAME], dtype="float64"))) == 6
    assert NAME in strategies.operators()
    assert strategies.node(NAME) is not None


def test_its_forward_is_a_witness() -> None:
    define()
    problem = ask(node_case("SquaredHinge", SCORES, LABELS, domain="my.domain", opset=1), 0)
    moved = Tangent(problem).along({"scores": np.ones_like(SCORES, np.float64)})
    gap = np.maximum(0, 1 - LABELS.astype(np.float64) * SCORES)
    np.testing.assert_allclose(next(iter(moved.values())).reshape(4, 3), -2 * LABELS * gap, rtol=1e-12)
    observations = get_oracle("reference").observe(problem)
    assert observations
    assert not any(isinstance(one, NotApplicable) for one in observations)


MISFITS = {
    "l = my.domain.SquaredHinge <margin = 2> (x, t)": "its attribute 'margin' is of type INT, not FLOAT",
    "l = my.domain.SquaredHinge <marg = 2.0> (x, t)": "it has no attribute 'marg'. Did you mean 'margin'?",
    "l = my.domain.SquaredHinge (x)": "it has 1 inputs; the inputs are 'scores', 'labels'",
    "l = my.domain.SquaredHinge (x, t, t)": "it has 3 inputs",
    "l, r = my.domain.SquaredHinge (x, t)": "it has 2 outputs; the outputs are 'loss'",
    'l = my.domain.SquaredHinge ("", t)': "it leaves out the input 'scores', which is required",
}


@pytest.mark.parametrize("text", MISFITS)
def test_a_node_that_does_not_fit_the_signature_is_refused(text: str) -> None:
    define()
    with pytest.raises(InvalidModelError) as caught:
        refgrad.gradient(model(f"{text} y = ReduceSum <keepdims = 0> (l)"))
    said = str(caught.value)
    assert said.startswith(f"Node 'l' is not a valid {NAME}: {MISFITS[text]}")
    assert "SquaredHinge(scores, labels, *, margin=1.0) -> loss, says its rule" in said
    assert "test_extend.py:" in said


def test_a_function_of_the_model_may_have_the_name() -> None:
    define()
    text = """<ir_version: 8, opset_import: ["": 18, "my.domain": 1]>
    m (float[N] x) => (float[N] y) { y = my.domain.SquaredHinge (x) }
    <opset_import: ["": 18], domain: "my.domain"> SquaredHinge (a) => (b) { b = Exp(a) }"""
    gradient = refgrad.gradient(onnx.parser.parse_model(text))
    assert "Exp" in {node.op_type for node in gradient.graph.node}


# The convention


def test_a_variadic_input_is_starred_and_an_output_may_be_optional() -> None:
    @rule("SumOfSquares", domain="my.domain", outputs=("y", "count?:int64"))
    def sum_of_squares(op: Any, d_y: str, *xs: str, scale: float = 1.0) -> list[str]:
        """dxₖ = 2·scale·xₖ·dy"""
        return [op.Mul(op.Mul(x, 2 * scale), d_y) for x in xs]

    body = "a, k = my.domain.SumOfSquares <scale = 3.0> (x, t) b = my.domain.SumOfSquares (a) y = ReduceSum <keepdims = 0> (b)"
    gradient = refgrad.gradient(model(body), wrt=["x", "t"])
    types = {value.name: value.type.tensor_type.elem_type for value in gradient.graph.value_info}
    assert types["a"] == onnx.TensorProto.FLOAT
    numbers = {float(onnx.numpy_helper.to_array(t)) for t in gradient.graph.initializer}
    assert {6.0, 2.0} <= numbers


def test_an_optional_input_has_the_default_none() -> None:
    seen = []

    @rule("Scaled", domain="my.domain", wrt=["x"])
    def scaled(op: Any, d_y: str, x: str, scale: str | None = None) -> str:
        """dx = scale·dy"""
        seen.append(scale)
        return d_y if scale is None else op.Mul(d_y, scale)

    body = "a = my.domain.Scaled (x) b = my.domain.Scaled (a, t) y = ReduceSum <keepdims = 0> (b)"
    refgrad.gradient(model(body), wrt=["x"])
    assert seen == ["t", None]


def test_what_the_graph_of_a_node_captures_is_not_taken_for_constant() -> None:
    @rule("Wrapped", domain="my.domain")
    def wrapped(op: Any, d_y: str, x: str, *, body: onnx.GraphProto) -> str:
        """dx = t·dy"""
        return op.Mul(d_y, "t")

    inner = "g (float[N, M] u) => (float[N, M] v) { v = Mul(u, t) }"
    wrapping = model(f"a = my.domain.Wrapped <body = {inner}> (x) y = ReduceSum <keepdims = 0> (a)")
    refgrad.gradient(wrapping, wrt=["x"])
    with pytest.raises(
        NoGradientError, match=r"Wrapped has no derivative: its graphs capture a value that varies.*an input"
    ):
        refgrad.gradient(wrapping, wrt=["x", "t"])


def test_a_registered_schema_comes_first() -> None:
    formal = onnx.defs.OpSchema.FormalParameter
    schema = onnx.defs.OpSchema(
        "Doubled",
        "my.own",
        1,
        inputs=[formal("x", "T")],
        outputs=[formal("y", "T")],
        type_constraints=[("T", ["tensor(float)"], "")],
    )
    onnx.defs.register_schema(schema)
    try:
        with pytest.raises(RuleError, match=r"a parameter 'z', which its schema does not know\. Inputs: x"):
            rule("Doubled", domain="my.own")(lambda op, d_y, z: z)
        with pytest.raises(RuleError, match="Doubled has a schema, which says what its outputs are"):
            rule("Doubled", domain="my.own", outputs=("y",))(lambda op, d_y: d_y)
        rule("Doubled", domain="my.own")(lambda op, d_y: op.Mul(d_y, 2.0))
    finally:
        onnx.defs.deregister_schema("Doubled", 1, "my.own")


REFUSED = {
    "names no output": (lambda op, x: x, {}),
    "name its attributes in the rule": (lambda op, d_y, x, **attributes: x, {}),
    "does not say of which kind the attribute 'axis' is": (lambda op, d_y, x, *, axis: x, {}),
    "has 'z' in wrt; the inputs are x": (lambda op, d_y, x: x, {"wrt": ["z"]}),
    "'y z' is not the name of an output": (lambda op, d_y, x: x, {"outputs": ("y z",)}),
    "has an unknown type 'floaty'": (lambda op, d_y, x: x, {"outputs": ("y:floaty",)}),
    "keyword-only parameter: only attributes": (lambda op, x, *, d_y=1.0: x, {"outputs": ("y",)}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_signature_that_says_too_little_is_refused(message: str) -> None:
    function, options = REFUSED[message]
    with pytest.raises(RuleError, match=message):
        rule("Odd", domain="my.domain", **options)(function)


def test_a_misspelt_operator_of_onnx_is_no_operator_of_its_own() -> None:
    with pytest.raises(
        RuleError, match=r"ai\.onnx has no operator 'Softsgn'\. Did you mean 'Softsign'\?.*domain of your own"
    ):
        rule("Softsgn")(lambda op, d_output, input: input)


ANNOTATED: dict[Any, str] = {
    int: "INT",
    "int | None": "INT",
    float: "FLOAT",
    "Sequence[int] | None": "INTS",
    list[int]: "INTS",
    list[str]: "STRINGS",
    onnx.TensorProto: "TENSOR",
}


@pytest.mark.parametrize("annotation", ANNOTATED, ids=str)
def test_an_annotation_says_the_kind_of_an_attribute(annotation: Any) -> None:
    def odd(op: Any, d_y: str, x: str, *, axis: int) -> str:
        return x

    odd.__annotations__["axis"] = annotation
    rule("Odd", domain="my.domain")(odd)
    from refgrad.tables.signatures import SIGNATURES

    assert SIGNATURES["my.domain", "Odd"].schema.attributes["axis"].type.name == ANNOTATED[annotation]
    with pytest.raises(InvalidModelError, match="it lacks the attribute 'axis', which is required"):
        refgrad.gradient(model("a = my.domain.Odd (x) y = ReduceSum <keepdims = 0> (a)"))


def test_a_replaced_rule_brings_its_own_signature() -> None:
    define()
    with pytest.raises(RuleError, match=r"SquaredHinge has a rule already: .*test_extend"):
        rule("SquaredHinge", domain="my.domain")(lambda op, d_loss, scores: scores)
    rule("SquaredHinge", domain="my.domain", replace=True)(lambda op, d_loss, scores: d_loss)
    assert explain(NAME).inputs == ("scores",)


# Zero, and no derivative


def test_a_derivative_is_declared_zero_or_missing() -> None:
    zero("Bin", "the result is piecewise constant", domain="my.domain", inputs=["x"], outputs=["y"])
    no_derivative("Text", "it writes numbers as text", domain="my.domain", inputs=["x", "how?"], outputs=["y"])
    body = "a = my.domain.Bin (x) b = Add(a, x) y = ReduceSum <keepdims = 0> (b)"
    rows = {row.operator: (row.verdict, row.reason) for row in refgrad.preflight(model(body), wrt=["x"]).rows}
    assert rows["my.domain.Bin"] == ("zero", "the result is piecewise constant")
    refgrad.gradient(model(body), wrt=["x"])
    assert explain("my.domain.Bin").text == "the derivative is zero: the result is piecewise constant"
    with pytest.raises(NoGradientError, match=r"my\.domain\.Text has no derivative: it writes numbers as text"):
        refgrad.gradient(model("a = my.domain.Text (x) y = ReduceSum <keepdims = 0> (a)"), wrt=["x"])
    assert {"my.domain.Bin", "my.domain.Text"} <= {row.operator for row in operators()}


def test_a_declaration_and_a_rule_exclude_each_other() -> None:
    define()
    with pytest.raises(RuleError, match=r"SquaredHinge has a rule already: .*test_extend.*replace=True"):
        zero("SquaredHinge", "it is flat", domain="my.domain", inputs=["x"], outputs=["y"])
    zero("SquaredHinge", "it is flat", domain="my.domain", inputs=["x"], outputs=["y"], replace=True)
    assert explain(NAME).verdict == "zero"
    with pytest.raises(RuleError, match="is declared to have zero derivative: it is flat"):
        define()
    with pytest.raises(RuleError, match="has zero derivative already: it is flat"):
        no_derivative("SquaredHinge", "it is not", domain="my.domain", inputs=["x"], outputs=["y"])
    with pytest.raises(RuleError, match=r"has no schema: name its inputs and outputs"):
        zero("Bin", "it is flat", domain="my.domain")


def test_a_kernel_of_onnx_may_be_replaced() -> None:
    with pytest.raises(RuleError, match="Softsign has a kernel from version 1 on already"):
        kernel("Softsign")(lambda x: x)
    kernel("Softsign", replace=True)(lambda x: x + 1)
    text = '<ir_version: 8, opset_import: ["": 18]> m (float[N] x) => (float[N] y) { y = Softsign(x) }'
    found = get_backend("numpy").prepare(onnx.parser.parse_model(text)).run({"x": np.zeros(1, np.float32)})
    assert found["y"] == 1


def _raises(make: Any) -> Iterator[Any]:
    raise ValueError("boom")
    yield


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (_raises, "ValueError: boom ("),
        (lambda make: [3], "TypeError: it yields 3; yield what make(...) returns ("),
        (lambda make: None, "TypeError: 'NoneType' object is not iterable ("),
        (lambda make: [make([1.0])], "AttributeError: 'list' object has no attribute"),
    ],
)
def test_broken_cases_are_named_and_stop_their_own_operator_alone(broken: Any, what: str) -> None:
    define()
    rule("Broken", domain="my.domain")(lambda op, d_y, x: d_y)
    case("Broken", domain="my.domain")(broken)
    with pytest.raises(PluginError) as caught:
        list(tables(["my.domain.Broken"]))
    assert str(caught.value).startswith(f"The cases of my.domain.Broken, {broken.__module__}.")
    assert f"fail: {what}" in str(caught.value)
    assert len(list(select(tables([NAME]), [NAME]))) == 6


def test_an_input_that_wrt_leaves_out_is_refused() -> None:
    """Its derivative would be zero, whatever it is."""
    with forgetting():

        @rule("Scaled", domain="my.domain", wrt=["x"])
        def scaled(op: Any, d_y: str, x: str, t: str) -> Any:
            """dx = t·dy"""
            return op.Mul(d_y, t)

        model = onnx.parser.parse_model("""
            <ir_version: 8, opset_import: ["": 18, "my.domain": 1]>
            g (float[2] x, float[2] t) => (float[2] y) { y = my.domain.Scaled(x, t) }""")
        assert len(refgrad.gradient(model, wrt=["x"]).graph.node) == 1
        with pytest.raises(NoGradientError, match="its rule gives the derivative by x alone"):
            refgrad.gradient(model)


def test_a_rule_without_the_name_of_its_operator_is_refused() -> None:
    with pytest.raises(RuleError, match=r"@rule needs the name of the operator: @rule\('square'\)"):

        @rule
        def square(op: Any, d_y: str, x: str) -> Any:
            return op.Mul(op.Mul(x, 2.0), d_y)


def test_a_body_is_a_schema_a_derivative_and_what_lower_writes() -> None:
    @body("Cube", "y", domain="my.domain")
    def cube(op: Any, x: str, *, scale: float = 1.0) -> Any:
        """scale·x³"""
        return op.Mul(op.Mul(op.Mul(x, x), x), scale)

    kernel("Cube", domain="my.domain")(lambda x, *, scale=1.0: scale * x**3)
    cubed = model("a = my.domain.Cube <scale = 2.0> (x) y = ReduceSum <keepdims = 0> (a)")
    assert explain("my.domain.Cube").text == "through its function body: scale·x³"
    assert check(cubed, backends=["numpy"]).ok
    assert {node.op_type for node in refgrad.lower(cubed).graph.node} == {"Constant", "Mul", "ReduceSum"}


def test_annotations_are_read_as_types() -> None:
    @body("Marked", "y", domain="my.domain")
    def marked(op: Any, x: str, mask: Optional[str], *, axes: Optional[list[int]] = None, how: "Ints") -> Any:  # noqa: UP045
        """x"""
        return op.Identity(x)

    schema = definitions.DEFINITIONS["my.domain", "Marked"].schema
    options = onnx.defs.OpSchema.FormalParameterOption
    assert [p.option for p in schema.inputs] == [options.Single, options.Optional]
    kinds = {name: attribute.type for name, attribute in schema.attributes.items()}
    assert kinds == dict.fromkeys(("axes", "how"), onnx.defs.OpSchema.AttrType.INTS)
    assert [name for name, attribute in schema.attributes.items() if attribute.required] == ["how"]


def test_an_attribute_of_no_known_kind_is_refused() -> None:
    with pytest.raises(
        RuleError, match=r"body of my\.domain\.Marked does not say of which kind the attribute 'how' is"
    ):

        @body("Marked", "y", domain="my.domain")
        def marked(op: Any, x: str, *, how: dict[str, int]) -> Any:
            """x"""
            return op.Identity(x)


def test_a_kernel_of_a_body_shares_its_signature_and_its_check() -> None:
    def check_factor(shapes: Any, args: Arguments) -> None:
        if shapes.shape(args.factor) not in (None, ()):
            raise UnsupportedFormError(f"its input factor has the shape {list(shapes.shape(args.factor))}; it is []")

    @body("Scaled", "y", check=check_factor, domain="my.domain")
    def scaled(op: Any, x: str, factor: str, shift: str | None = None, *, times: float = 2.0) -> Any:
        """times·factor·x"""
        return op.Mul(op.Mul(x, factor), times)

    @kernel_of_body("Scaled", domain="my.domain")
    def scaled_in_numpy(args: Arguments) -> np.ndarray:
        assert args.shift is None
        return np.asarray(args.times * args.factor * args.x, args.x.dtype)

    text = "f = Constant <value = float {3}> () a = my.domain.Scaled (x, f) y = ReduceSum <keepdims = 0> (a)"
    assert check(model(text), backends=["numpy"]).ok
    wrong = model(text.replace("float {3}", "float[2] {3, 3}"))
    with pytest.raises(NoGradientError, match=r"its input factor has the shape \[2\]; it is \[\]"):
        refgrad.gradient(wrong)
    with pytest.raises(BackendError, match=r"its input factor has the shape \[2\]; it is \[\]"):
        get_backend("numpy").prepare(wrong).run({"x": SCORES, "t": SCORES, "c": np.array(True)})
    with pytest.raises(RuleError, match=r"my\.domain\.Unheard has no body: use @kernel"):
        kernel_of_body("Unheard", domain="my.domain")(scaled_in_numpy)
