"""Functions that are called more than once stay functions in the gradient: it is compared with that of the inlined model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import FunctionProto, ModelProto, helper, parser

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import InvalidModelError, NoGradientError, RuleError
from refgrad.model.inlining.inline import inline_functions
from refgrad.tables.registry import RULES

pytestmark = pytest.mark.interpreter

BACKENDS = ("numpy", "ort-cpu")


def model_of(graph: str, *functions: str, opset: int = 18) -> ModelProto:
    """A model in onnx's text form whose functions are of the domain `l`."""
    imports = f'opset_import: ["": {opset}, "l": 1]'
    text = "\n".join(f'<{imports}, domain: "l"> {function}' for function in functions)
    return parser.parse_model(f"<ir_version: 10, {imports}> {graph} {text}")


def inlined(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return inline_functions(copy)


def names(model: ModelProto) -> list[str]:
    return sorted(function.name for function in model.functions)


def feeds_of(model: ModelProto, seed: int = 0, free: int = 3) -> dict[str, Any]:
    """Normally distributed numbers; a size that is not declared is `free`, an integer 2, a condition true."""
    random, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [dim.dim_value if dim.HasField("dim_value") else free for dim in value.type.tensor_type.shape.dim]
        array = random.normal(size=shape) if kind.kind == "f" else np.full(shape, 2)
        feeds[value.name] = np.asarray(array, kind)
    return feeds


def assert_same(kept: ModelProto, other: ModelProto, feeds: Mapping[str, Any], tolerance: float = 2e-6) -> None:
    """Both give the same results on both runtimes; the arguments and results are in the same order."""
    onnx.checker.check_model(kept, full_check=True)
    given = dict(zip([v.name for v in other.graph.input], feeds.values(), strict=True))
    for backend in BACKENDS:
        mine = list(get_backend(backend).prepare(kept).run(feeds).values())
        theirs = list(get_backend(backend).prepare(other).run(given).values())
        for a, b in zip(mine, theirs, strict=True):
            scale = max(float(np.abs(b).max(initial=0)), 1.0)
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def compare(model: ModelProto, expected: list[str], **options: Any) -> ModelProto:
    """The gradient with functions, whose names are `expected`, after it was compared with that of the inlined model."""
    made = refgrad.gradient(model, **options)
    other = refgrad.gradient(inlined(model), **options)
    assert not other.functions
    assert names(made) == sorted(expected)
    assert_same(made, other, feeds_of(made))
    return made


F = "f (u, w) => (v) { t = MatMul(u, w) v = Tanh(t) }"
THRICE = "g (float[N,4] x, float[4,4] w) => (float[N,4] y) { a = l.f(x, w) b = l.f(a, w) y = l.f(b, w) }"


def test_a_function_is_differentiated_once() -> None:
    made = compare(model_of(THRICE, F), ["f", "f_grad"])
    assert Counter(node.op_type for node in made.graph.node) == {"f": 3, "f_grad": 3, "Sum": 1}


CASES: dict[str, tuple[ModelProto, list[str]]] = {
    "that stores what is neither read nor returned": (
        model_of(THRICE, "f (u, w) => (v) { t = MatMul(u, w) s = Sigmoid(t) v = Mul(s, u) }"),
        ["f_fwd", "f_grad"],
    ),
    "called once": (
        model_of("g (float[N,4] x, float[4,4] w) => (float[N,4] y) { y = l.f(x, w) }", F),
        [],
    ),
    "that calls others": (
        model_of(
            THRICE,
            "f (u, w) => (v) { t = MatMul(u, w) a = l.k(t) b = l.k(u) v = Mul(a, b) }",
            "k (u) => (v) { two = Constant<value_float = 2.0>() s = Sigmoid(u) v = Mul(s, two) }",
        ),
        ["f_fwd", "f_grad", "k_fwd", "k_grad"],
    ),
    "called once by one that stays": (
        model_of(THRICE, "f (u, w) => (v) { t = MatMul(u, w) v = l.k(t) }", "k (u) => (v) { v = Tanh(u) }"),
        ["f", "f_grad"],
    ),
    "called only by one that is called once": (
        model_of(
            "g (float[N,4] x) => (float[N,4] y) { y = l.f(x) }",
            "f (u) => (v) { a = l.k(u) b = l.k(a) v = l.k(b) }",
            "k (u) => (v) { v = Tanh(u) }",
        ),
        ["k", "k_grad"],
    ),
    "with attributes": (
        model_of(
            "g (float[N,4] x) => (float[N,4] y) { a = l.f<by = 0.5>(x) b = l.f<by = 0.5>(a) c = l.f(b) y = l.f(c) }",
            "f <by: float = 0.25> (u) => (v) { e = Elu<alpha: float = @by>(u) v = Sin(e) }",
        ),
        ["f_1_fwd", "f_1_grad", "f_fwd", "f_grad"],
    ),
    "with attributes that it hands on": (
        model_of(
            "g (float[N,4] x) => (float[N,4] y) { a = l.f<by = 0.5>(x) y = l.f<by = 0.5>(a) }",
            "f <by> (u) => (v) { e = l.k<by: float = @by>(u) h = l.k<by: float = @by>(e) v = Sin(h) }",
            "k <by> (u) => (v) { v = Elu<alpha: float = @by>(u) }",
        ),
        ["f_fwd", "f_grad", "k", "k_grad"],
    ),
    "with an input that is left out": (
        model_of(
            "g (float[N,4] x, float b) => (float[N,4] y) {"
            " a = l.f(x) c = l.f(a) d = l.f(c, b) e = l.f(d, b) y = Add(d, e) }",
            "f (u, low) => (v) { t = Clip(u, low) v = Sin(t) }",
        ),
        ["f_1_fwd", "f_1_grad", "f_fwd", "f_grad"],
    ),
    "of which an output is left out": (
        model_of(
            "g (float[N,4] x) => (float[N,4] y) { a, b = l.f(x) c = l.f(a) d, e = l.f(c) y = Add(b, e) }",
            "f (u) => (v, w) { v = Sin(u) w = Exp(v) }",
        ),
        ["f", "f_grad", "f_grad_1", "f_grad_2"],
    ),
    "that returns an input": (
        model_of(
            "g (float[N,4] x) => (float[N,4] y) { a, b = l.f(x) c, d = l.f(a) y = Add(b, d) }",
            "f (u) => (v, w) { v = Identity(u) w = Exp(u) }",
        ),
        ["f", "f_grad", "f_grad_1"],
    ),
    "given the same value twice": (
        model_of("g (float[4,4] x) => (float[4,4] y) { a = l.f(x, x) y = l.f(a, a) }", F),
        ["f", "f_grad"],
    ),
    "of other sizes": (
        model_of(
            "g (float[N,4] x, float[4,6] w, float[6,4] q) => (float[N,4] y) {"
            " a = l.f(x, w) b = l.f(a, q) c = l.f(b, w) y = l.f(c, q) }",
            F,
        ),
        ["f", "f_grad", "f_grad_1"],
    ),
    "of broadcasting operands": (
        model_of(
            "g (float[N,4] x, float[4] w, float[1,4] q) => (float[N,4] y) {"
            " a = l.f(x, w) b = l.f(a, q) c = l.f(b, w) y = l.f(c, q) }",
            "f (u, w) => (v) { t = Mul(u, w) v = Tanh(t) }",
        ),
        ["f", "f_grad", "f_grad_1"],
    ),
    "that reads shapes": (
        model_of(
            "g (float[N,4] x) => (float[N,4] y) { a = l.f(x) y = l.f(a) }",
            "f (u) => (v) { s = Shape(u) one = Constant<value_ints = [-1]>() i = Constant<value_ints = [1, 0]>()"
            " r = Gather(s, i) t = Reshape(u, r) v = Sin(t) }",
        ),
        ["f_fwd", "f_fwd_1", "f_grad", "f_grad_1"],
    ),
    "given axes": (
        model_of(
            "g (float[2,3,4] x, float[3,2,4] z) => (float[3,4] y, float[3,4] q, float[2,4] r)"
            " { o = Constant<value_ints = [0]>() t = Constant<value_ints = [1]>()"
            " y = l.f(x, o) s = Transpose<perm = [1,0,2]>(z) q = l.f(s, o) r = l.f(x, t) }",
            "f (u, axes) => (v) { e = Exp(u) v = ReduceLogSum<keepdims = 0>(e, axes) }",
        ),
        ["f_fwd", "f_fwd_1", "f_grad", "f_grad_1"],
    ),
    "called in the branches of If": (
        model_of(
            "g (float[N,4] x, bool c) => (float[N,4] y) { y = If(c) <"
            "then_branch = t () => (float[N,4] p) { a = l.f(x) p = l.f(a) },"
            " else_branch = e () => (float[N,4] q) { q = l.f(x) }> }",
            "f (u) => (v) { s = Sigmoid(u) v = Mul(s, u) }",
        ),
        ["f_fwd", "f_grad"],
    ),
    "called in the body of Loop": (
        model_of(
            "g (float[3,4] x, float[4,4] w, int64 n) => (float[3,4] y) { t = Constant<value_int = 1>() c = Cast<to = 9>(t)"
            " y = Loop(n, c, x) <body = b (int64 k, bool go, float[3,4] s) => (bool on, float[3,4] r) {"
            " on = Identity(go) a = l.f(s, w) r = l.f(a, w) }> }",
            "f (u, w) => (v) { t = MatMul(u, w) s = Sigmoid(t) v = Mul(s, u) }",
        ),
        ["f_fwd", "f_grad"],
    ),
    "called in the body of Scan": (
        model_of(
            "g (float[3] x, float[5,3] z) => (float[3] y, float[5,3] h) { y, h = Scan(x, z) <num_scan_inputs = 1, body = b "
            "(float[3] s, float[3] e) => (float[3] r, float[3] o) { a = l.f(s, e) r = l.f(a, e) o = Identity(a) }> }",
            "f (u, w) => (v) { t = Mul(u, w) s = Sigmoid(t) v = Add(s, u) }",
        ),
        ["f_fwd", "f_grad"],
    ),
    "with an If in it": (
        model_of(
            "g (float[N,4] x) => (float[N,4] y) { a = l.f(x) y = l.f(a) }",
            "f (u) => (v) { m = ReduceSum<keepdims = 0>(u) z = Constant<value_float = 0.0>() c = Greater(m, z)"
            " v = If(c) <then_branch = t () => (p) { s = Sigmoid(u) p = Mul(s, u) },"
            " else_branch = e () => (q) { q = Sin(u) }> }",
        ),
        ["f_fwd", "f_grad"],
    ),
    "with a Loop in it": (
        model_of(
            "g (float[3,4] x) => (float[3,4] y) { a = l.f(x) y = l.f(a) }",
            "f (u) => (v) { n = Constant<value_int = 3>() v = Loop(n, , u)"
            " <body = b (int64 k, bool go, float[3,4] s) => (bool on, float[3,4] r) { on = Identity(go) e = Sigmoid(s)"
            " r = Mul(e, s) }> }",
        ),
        ["f_fwd", "f_fwd_1", "f_grad", "f_grad_1"],
    ),
    "of sequences": (
        model_of(
            "g (float[2,6] x) => (float[2,6] y) { s = SplitToSequence<axis = 1>(x) a = l.f(s) b = l.f(a)"
            " y = ConcatFromSequence<axis = 1>(b) }",
            "f (s) => (v) { i = Constant<value_int = 0>() e = SequenceAt(s, i) z = Sin(e) k = SequenceInsert(s, z)"
            " v = SequenceErase(k, i) }",
        ),
        ["f_fwd", "f_grad"],
    ),
    "with a sequence in it": (
        model_of(
            "g (float[2,6] x) => (float[2,6] y) { a = l.f(x) y = l.f(a) }",
            "f (u) => (v) { s = SplitToSequence<axis = 1>(u) i = Constant<value_int = 0>() e = SequenceAt(s, i) z = Sin(e)"
            " k = SequenceInsert(s, z) h = SequenceErase(k, i) w = ConcatFromSequence<axis = 1>(h) v = Mul(w, w) }",
        ),
        ["f_fwd", "f_fwd_1", "f_grad", "f_grad_1"],
    ),
    "whose operator has no rule but a body": (
        model_of("g (float[N,4] x) => (float[N,4] y) { a = l.f(x) y = l.f(a) }", "f (u) => (v) { v = Celu(u) }"),
        ["f", "f_grad"],
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_a_function(what: str) -> None:
    compare(*CASES[what])


@pytest.mark.parametrize("what", ["that calls others", "of broadcasting operands", "called in the body of Scan"])
def test_the_derivative_of_a_function_is_differentiated(what: str) -> None:
    model = CASES[what][0]
    first, other = refgrad.gradient(model, ["x"]), refgrad.gradient(inlined(model), ["x"])
    second, plain = refgrad.gradient(first, outputs=["x_grad"]), refgrad.gradient(other, outputs=["x_grad"])
    assert "f_grad_grad" in names(second)
    assert_same(second, plain, feeds_of(second), tolerance=2e-5)


@pytest.mark.parametrize("make", [refgrad.jvp, refgrad.hvp, refgrad.jacobian, refgrad.hessian])
def test_every_derivative_of_higher_order_has_functions(make: Any) -> None:
    model = model_of(THRICE, F)
    made = make(model, ["x"])
    assert "f" in names(made)
    assert_same(made, make(inlined(model), ["x"]), feeds_of(made), tolerance=2e-5)


def test_only_what_is_asked_for_is_in_the_function() -> None:
    model = model_of(THRICE, F)
    [backward] = [f for f in refgrad.gradient(model, ["x"]).functions if f.name == "f_grad"]
    assert list(backward.output) == ["u_grad"]
    assert {node.op_type for node in backward.node} >= {"Gemm"}
    [both] = [f for f in refgrad.gradient(model).functions if f.name == "f_grad"]
    assert list(both.output) == ["u_grad", "w_grad"]


def test_the_model_is_not_changed() -> None:
    model = CASES["with attributes"][0]
    before = model.SerializeToString(deterministic=True)
    refgrad.gradient(model)
    assert model.SerializeToString(deterministic=True) == before


def test_functions_of_the_same_name_and_another_overload() -> None:
    model = model_of(
        "g (float[4] x) => (float[4] y) { a = l.f(x) b = l.f(a) c = l.f(b) y = l.f(c) }", "f (u) => (v) { v = Sin(u) }"
    )
    other = model.functions.add()
    other.CopyFrom(model.functions[0])
    other.overload, other.node[0].op_type = "exp", "Exp"
    for node in list(model.graph.node)[2:]:
        node.overload = "exp"
    compare(model, ["f", "f_1", "f_1_grad", "f_grad"])


INLINED: dict[str, ModelProto] = {
    "of a domain that operators are known of": parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> g (float[4] x) => (float[4] y) {'
        " a = com.microsoft.Gelu(x) y = com.microsoft.Gelu(a) }"
        ' <opset_import: ["": 18], domain: "com.microsoft"> Gelu (u) => (v) { v = Sin(u) }'
    ),
    "of another opset": parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "l": 1]> g (float[4] x) => (float[4] y) { a = l.f(x) y = l.f(a) }'
        ' <opset_import: ["": 17], domain: "l"> f (u) => (v) { v = Sin(u) }'
    ),
}


@pytest.mark.parametrize("what", INLINED)
def test_a_function_that_does_not_stay(what: str) -> None:
    compare(INLINED[what], [])


def test_functions_in_which_a_rule_knows_too_little_are_inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of what Sin reads follow from a shape that is an argument: they are known at the calls alone."""

    def sin(op: Any, d_output: str, input: str) -> str:
        if op.static(input) is None:
            raise RuleError("too little is known")
        return str(op.Mul(d_output, op.Cos(input)))

    monkeypatch.setitem(RULES, ("", "Sin"), replace(RULES["", "Sin"], function=sin))
    model = model_of(
        "g (float[2,12] x) => (float[2,12] y) { n = Shape<end = 1>(x) m = Constant<value_ints = [2, 6]>()"
        " s = Concat<axis = 0>(n, m) a = l.f(x, s) y = l.f(a, s) }",
        "f (u, s) => (v) { t = Reshape(u, s) z = Sin(t) r = Shape(u) v = Reshape(z, r) }",
    )
    compare(model, [])
    unknown = model_of("g (float[N] x) => (float[N] y) { a = l.f(x) y = l.f(a) }", "f (u) => (v) { v = Sin(u) }")
    with pytest.raises(RuleError, match="too little"):
        refgrad.gradient(unknown)


def test_types_that_onnx_cannot_infer_are_declared() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18, "l": 1, "com.microsoft": 1]> g (float[2,4] x, float[4] w) => (float[2,4] y)'
        " <float[2,4] a> { a = l.f(x, w) y = l.f(a, w) }"
        ' <opset_import: ["": 18, "com.microsoft": 1], domain: "l"> f (u, w) => (v)'
        " { z = com.microsoft.BiasGelu(u, w) v = com.microsoft.QuickGelu(z) }"
    )
    compare(model, ["f_fwd", "f_grad"])


@pytest.mark.parametrize("options", [{"dialect": "ort"}, {"quantization": "straight-through"}, {"recompute": True}])
def test_options_that_inline(options: dict[str, Any]) -> None:
    assert not refgrad.gradient(model_of(THRICE, F), **options).functions


def test_numbers_hidden_in_text_are_refused() -> None:
    model = model_of(
        "g (float[4] x) => (float[4] y) { a = l.f(x) b = l.f(a) c = l.h(b) y = l.h(c) }",
        "f (u) => (v) { t = Cast<to = 8>(u) v = Cast<to = 1>(t) }",
        "h (u) => (v) { v = Sin(u) }",
    )
    with pytest.raises(NoGradientError, match="Cast"):
        refgrad.gradient(model)


def test_a_refusal_names_the_node_in_the_function() -> None:
    model = model_of(
        "g (float[4] x) => (float[4] y) { a = l.f(x) y = l.f(a) }", "f (u) => (v) { [within] v = Bernoulli(u) }"
    )
    model.functions[0].node[0].op_type = "Det"
    model.functions[0].node[0].domain = "other"
    model.opset_import.add(domain="other", version=1)
    model.functions[0].opset_import.add(domain="other", version=1)
    with pytest.raises(NoGradientError, match=r"other\.Det has no rule .*within"):
        refgrad.gradient(model)
    assert [row.operator for row in refgrad.preflight(model).refused] == ["other.Det"]


CYCLES = {
    "l.f -> l.f": ["f (u) => (v) { t = l.f(u) v = Sin(t) }"],
    "l.f -> l.k -> l.f": ["f (u) => (v) { v = l.k(u) }", "k (u) => (v) { v = l.f(u) }"],
    "l.k -> l.h -> l.k": [
        "f (u) => (v) { v = l.k(u) }",
        "k (u) => (v) { t = Sin(u) v = l.h(t) }",
        "h (u) => (v) { c = Constant<value = bool {1}>() v = If(c) <then_branch = t () => (p) { p = l.k(u) },"
        " else_branch = e () => (q) { q = Sin(u) }> }",
    ],
}


@pytest.mark.parametrize("cycle", CYCLES)
@pytest.mark.parametrize("use", [refgrad.gradient, refgrad.preflight, get_backend("numpy").prepare])
def test_a_function_that_calls_itself_is_refused(cycle: str, use: Any) -> None:
    model = model_of("g (float[4] x) => (float[4] y) { a = l.f(x) y = l.f(a) }", *CYCLES[cycle])
    with pytest.raises(InvalidModelError, match=f"calls itself: {cycle}[.]"):
        use(model)


def test_random_numbers_of_a_function_are_not_drawn_again() -> None:
    model = model_of(
        "g (float[K] x) => (float[K] y) { n = Constant<value_int = 3>() y = Loop(n, , x)"
        " <body = b (int64 k, bool go, float[M] s) => (bool on, float[M] r) { on = Identity(go) a = l.f(s) r = l.f(a) }> }",
        "f (u) => (v) { z = RandomNormalLike(u) s = Mul(z, u) v = Sin(s) }",
    )
    made = refgrad.gradient(model, keep_outputs=True)
    [backward] = [f for f in made.functions if f.name == "f_grad"]
    assert all(node.op_type != "RandomNormalLike" for node in backward.node)


def _random_function(draw: Any, name: str, callees: list[str]) -> FunctionProto:
    """A function of two matrices of one shape, of nodes of smooth operators and calls; it returns one or two values."""
    values, nodes = ["u", "w"], []
    for k in range(draw(st.integers(1, 4))):
        op = draw(st.sampled_from(["Sin", "Sigmoid", "Mul", "Add", "Tanh", *callees, *callees]))
        count = 1 if op in ("Sin", "Sigmoid", "Tanh") else 2
        reads = [draw(st.sampled_from(values)) for _ in range(count)]
        made = [f"t{k}", f"s{k}"] if op in callees else [f"t{k}"]
        nodes.append(helper.make_node(op, reads, made, domain="l" if op in callees else ""))
        values += made
    outputs = [values[-1], draw(st.sampled_from(values[2:]))]
    nodes += [helper.make_node("Identity", [value], [f"o{k}"]) for k, value in enumerate(outputs)]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("l", 1)]
    return helper.make_function("l", name, ["u", "w"], ["o0", "o1"], nodes, imports)


@st.composite
def models_with_functions(draw: Any) -> ModelProto:
    """Three functions, each of which may call those before it, and a graph that calls all of them."""
    functions: list[FunctionProto] = []
    for name in ("f", "g", "h"):
        functions.append(_random_function(draw, name, [function.name for function in functions]))
    values, nodes = ["x", "z"], []
    for k in range(draw(st.integers(2, 5))):
        op = draw(st.sampled_from(["f", "g", "h"]))
        reads = [draw(st.sampled_from(values)), draw(st.sampled_from(values))]
        made = draw(st.sampled_from([[f"a{k}", f"b{k}"], ["", f"b{k}"], [f"a{k}", ""]]))
        nodes.append(helper.make_node(op, reads, made, domain="l"))
        values += [name for name in made if name]
    kind = (onnx.TensorProto.DOUBLE, ["N", 3])
    nodes.append(helper.make_node("Mul", [values[-1], draw(st.sampled_from(values))], ["y"]))
    graph = helper.make_graph(
        nodes,
        "m",
        [helper.make_tensor_value_info(name, *kind) for name in ("x", "z")],
        [helper.make_tensor_value_info("y", *kind)],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("l", 1)]
    return helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=10)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(models_with_functions())
def test_random_models_with_functions(model: ModelProto) -> None:
    """In double precision, to rounding, and of second order too."""
    first, other = refgrad.gradient(model), refgrad.gradient(inlined(model))
    assert_same(first, other, feeds_of(first), tolerance=1e-13)
    second = refgrad.gradient(first, ["x", "z", "y_grad"])
    plain = refgrad.gradient(other, ["x", "z", "y_grad"])
    assert_same(second, plain, feeds_of(second), tolerance=1e-12)


@pytest.mark.parametrize("wrong", ["cotangent", "residual", "factor"])
def test_a_wrong_function_is_seen(wrong: str) -> None:
    made = refgrad.gradient(CASES["that calls others"][0])
    other = refgrad.gradient(inlined(CASES["that calls others"][0]))
    [backward] = [f for f in made.functions if f.name == "k_grad"]
    if wrong == "factor":
        backward.node[-1].op_type = "Add"
    else:
        place = 1 if wrong == "cotangent" else 0
        for node in backward.node:
            node.input[:] = [
                backward.input[1 - place] if name == backward.input[place] else name for name in node.input
            ]
    with pytest.raises(AssertionError):
        assert_same(made, other, feeds_of(made))
