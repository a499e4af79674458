"""Bodies of If, Loop and Scan: values returned twice, in functions too, branches of several ranks, names that collide."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.oracles.analytic import STEP
from refgrad.conformance.tools.fuzzing.graphs.evaluation import tangent
from refgrad.conformance.tools.fuzzing.graphs.growing import Sample
from refgrad.conformance.tools.fuzzing.graphs.validity import invalid
from refgrad.conformance.tools.fuzzing.graphs.verdicts import FOREIGN, judge
from refgrad.errors import InvalidModelError, NoGradientError
from refgrad.protos.traverse import names_of, subgraphs

HEAD = '<ir_version: 10, opset_import: ["": 21, "my": 1]> '
FUNCTION = ' <domain: "my", opset_import: ["": 21, "my": 1]> '
SCAN = "y, s = Scan<num_scan_inputs=1, body = b (float[2] st, float[2] e) => "
X, XW = {"x": (2,)}, {"x": (2,), "w": (3, 2)}
HOW: list[dict[str, Any]] = [{"recompute": True}, {"quantization": "straight-through"}, {"keep_outputs": True}]

RETURNED_TWICE: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # inputs, outputs, the nodes, what is fed
    "Scan": (
        "float[2] x, float[3,2] w",
        "float[2] y, float[3,2] s",
        SCAN + "(float[2] v, float[2] v) { t = Mul(st, e) v = Tanh(t) }>(x, w)",
        XW,
    ),
    "Scan, three times": (
        "float[2] x, float[3,2] w",
        "float[2] y, float[3,2] s, float[3,2] r",
        SCAN.replace("y, s", "y, s, r") + "(float[2] v, float[2] v, float[2] v) { t = Mul(st, e) v = Tanh(t) }>(x, w)",
        XW,
    ),
    "Scan whose state and slice are results": (
        "float[2] x, float[3,2] w",
        "float[2] y, float[3,2] s, float[3,2] r",
        SCAN.replace("y, s", "y, s, r")
        + "(float[2] v, float[2] st, float[2] st) { t = Mul(st, e) v = Tanh(t) }>(x, w)",
        XW,
    ),
    "Loop": (
        "float[2] x",
        "float[2] y, float[K,2] s",
        "n = Constant<value_int=3>() c = Constant<value_int=1>() cb = Cast<to=9>(c) y, s = Loop(n, cb, x)<body = b "
        "(int64 i, bool ci, float[2] st) => (bool co, float[2] v, float[2] v) { co = Identity(ci) v = Tanh(st) }>",
        X,
    ),
    **{
        f"If, {taken}": (
            "float[2] x, bool c",
            "float[2] y, float[2] s",
            "y, s = If(c)<then_branch = b () => (float[2] v, float[2] v) { v = Tanh(x) }, else_branch = e () => "
            "(float[2] u, float[2] q) { u = Sin(x) q = Cos(u) }>",
            {**X, "c": np.array(taken)},
        )
        for taken in (True, False)
    },
    "If within If": (
        "float[2] x, bool c",
        "float[2] y, float[2] s",
        "y, s = If(c)<then_branch = b () => (float[2] p, float[2] q) { p, q = If(c)<then_branch = b2 () => "
        "(float[2] v, float[2] v) { v = Tanh(x) }, else_branch = e2 () => (float[2] r, float[2] r) { r = Cos(x) }> }, "
        "else_branch = e () => (float[2] u, float[2] u) { u = Sin(x) }>",
        {**X, "c": np.array(True)},
    ),
    "an output left out": (
        "float[2] x, float[3,2] w",
        "float[3,2] s",
        SCAN.replace("y, s", '"", s') + "(float[2] v, float[2] v) { t = Mul(st, e) v = Tanh(t) }>(x, w)",
        XW,
    ),
}


def bare(declared: str) -> str:
    """Names without types."""
    return ", ".join(one.split()[-1] for one in declared.replace(",2]", ";2]").split(","))


def in_a_function(inputs: str, outputs: str, nodes: str) -> str:
    own, results = bare(inputs), bare(outputs)
    return f"{HEAD}g ({inputs}) => ({outputs}) {{ {results} = my.F({own}) }}{FUNCTION}F ({own}) => ({results}) {{ {nodes} }}"


def in_a_nested_function(inputs: str, outputs: str, nodes: str) -> str:
    own, results = bare(inputs), bare(outputs)
    call = f"{results} = my.F({own})"
    outer = f"{FUNCTION}G ({own}) => ({results}) {{ {call} }}"
    text = in_a_function(inputs, outputs, nodes)
    return text.replace(call, call.replace("my.F", "my.G")) + outer


def in_the_graph(inputs: str, outputs: str, nodes: str) -> str:
    return f"{HEAD}g ({inputs}) => ({outputs}) {{ {nodes} }}"


def sample(text: str, fed: dict[str, Any]) -> Sample:
    """A sample of a model; every float that has a shape in `fed` is drawn and differentiated by."""
    rng, model = np.random.default_rng(0), onnx.parser.parse_model(text)
    feeds = {n: x if isinstance(x, np.ndarray) else rng.uniform(0.2, 1.2, x).astype("f") for n, x in fed.items()}
    wrt = tuple(name for name, array in feeds.items() if array.dtype.kind == "f")
    return Sample(0, model, feeds, wrt, tuple(value.name for value in model.graph.output))


def is_right(made: Sample, dialects: bool = True) -> None:
    """The gradient and the second derivatives are what complex steps say, and onnx takes every model."""
    found = judge(made)
    assert [one for one in found.verdicts if one.kind != FOREIGN] == []
    assert not found.note
    assert {"gradient", "ort dialect", "jvp", "hvp", "again"} <= found.compared
    for how in HOW:
        assert not invalid(refgrad.gradient(made.model, made.wrt, made.outputs, **how)), how


def on(backend: str, made: Sample) -> None:
    """The gradient equals complex steps on a backend."""
    gradient = refgrad.gradient(made.model, made.wrt, made.outputs, cotangent="ones")
    results = get_backend(backend).prepare(gradient).run(made.feeds)
    rng = np.random.default_rng(1)
    for name in made.wrt:
        u = rng.standard_normal(made.feeds[name].shape)
        _, slopes, _ = tangent(made.model, made.feeds, {name: u}, STEP)
        wanted = sum(float(np.sum(slopes.get(output, 0.0))) for output in made.outputs)
        assert np.sum(results[f"{name}_grad"] * u) == pytest.approx(wanted, rel=2e-5, abs=2e-6), name


@pytest.mark.parametrize("where", [in_the_graph, in_a_function, in_a_nested_function])
@pytest.mark.parametrize("name", RETURNED_TWICE)
def test_a_body_that_returns_a_value_twice(name: str, where: Any) -> None:
    *text, fed = RETURNED_TWICE[name]
    made = sample(where(*text), fed)
    is_right(made)
    for backend in {"numpy", "ort-cpu"}.intersection(available()):
        on(backend, made)


FUNCTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "called twice, the second time with what the first returned": (
        "g (float[2] x, float[3,2] w) => (float[2] z, float[3,2] s, float[3,2] r) { y, s = my.F(x, w) z, r = my.F(y, s) }"
        + FUNCTION
        + "F (x, w) => (y, s) { "
        + SCAN
        + "(float[2] v, float[2] v) { t = Mul(st, e) v = Tanh(t) }>(x, w) }",
        XW,
    ),
    "called in a body": (
        "g (float[2] x, float[3,2] w) => (float[2] y, float[3,2] s) { y, s = my.G(x, w) }"
        + FUNCTION
        + "F (a, b) => (v, t) { t = Mul(a, b) v = Tanh(t) }"
        + FUNCTION
        + "G (x, w) => (y, s) { "
        + SCAN
        + "(float[2] v, float[2] v) { v, u = my.F(st, e) }>(x, w) }",
        XW,
    ),
    "an input is an output": (
        "g (float[2] x) => (float[2] y, float[2] s) { t = Exp(x) y, s = my.F(t) }"
        + FUNCTION
        + "F (x) => (x, v) { v = Tanh(x) }",
        X,
    ),
    "an input is an output, and the function is kept": (
        "g (float[2] x) => (float[2] y, float[2] s, float[2] p, float[2] q) { t = Exp(x) y, s = my.F(t) p, q = my.F(s) }"
        + FUNCTION
        + "F (x) => (x, v) { v = Tanh(x) }",
        X,
    ),
    "the identity": (
        "g (float[2] x) => (float[2] y) { t = Exp(x) s = my.F(t) u = my.F(s) y = Tanh(u) }"
        + FUNCTION
        + "F (x) => (x) { }",
        X,
    ),
    "the name that an output would get is taken": (
        "g (float[2] v, float[3,2] v_out) => (float[2] y, float[3,2] s) { y, s = my.F(v, v_out) }"
        + FUNCTION
        + "F (v_out, v) => (y, s) { "
        + SCAN
        + "(float[2] v_out_1, float[2] v_out_1) { v_1 = Mul(st, e) v_out_1 = Tanh(v_1) }>(v_out, v) }",
        {"v": (2,), "v_out": (3, 2)},
    ),
    "an optional input is left out, another one has an empty name": (
        'g (float[2] x, float h) => (float[2] y, float[2] s) { y, s = my.F(x, "", h) }'
        + FUNCTION
        + "F (x, lo, hi) => (v, c) { c = Clip(x, lo, hi) v = Tanh(c) }",
        {**X, "h": np.array(9.5, "f")},
    ),
    "an attribute is read in a body": (
        "g (float[2] x, float[3,2] w) => (float[2] y, float[3,2] s) { y, s = my.F<al=0.3>(x, w) }"
        + FUNCTION
        + "F <al> (x, w) => (y, s) { "
        + SCAN
        + "(float[2] v, float[2] v) { t = Sub(st, e) u = LeakyRelu<alpha: float = @al>(t) v = Tanh(u) }>(x, w) }",
        XW,
    ),
    "an attribute with a default is read in a body": (
        "g (float[2] x, float[3,2] w) => (float[2] y, float[3,2] s) { y, s = my.F(x, w) }"
        + FUNCTION
        + "F <al: float = 0.3> (x, w) => (y, s) { "
        + SCAN
        + "(float[2] v, float[2] v) { t = Sub(st, e) u = LeakyRelu<alpha: float = @al>(t) v = Tanh(u) }>(x, w) }",
        XW,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name: str) -> None:
    text, fed = FUNCTIONS[name]
    is_right(sample(HEAD + text, fed))


def test_a_kept_function_whose_bodies_have_the_same_names() -> None:
    body = "k = Constant<value_int=1>() m = Add(k, k) n = Cast<to=1>(m) u = {}(x) v = Mul(u, n)"
    branches = [f"{{ {body.format(operator)} }}" for operator in ("Sin", "Tanh")]
    text = (
        f"{HEAD}g (float[2] x, bool c) => (float[2] z) {{ y = my.F(x, c) z = my.F(y, c) }}{FUNCTION}F (x, c) => (y) "
        f"{{ y = If(c)<then_branch = b () => (float[2] v) {branches[0]}, else_branch = e () => (float[2] v) {branches[1]}> }}"
    )
    is_right(sample(text, {**X, "c": np.array(True)}))


def test_no_two_bodies_of_a_gradient_have_a_name_in_common() -> None:
    """onnx's inference takes what it knows of a name in one body for what it knows of the same name in another one."""
    *text, _ = RETURNED_TWICE["Scan"]
    gradient = refgrad.gradient(onnx.parser.parse_model(in_the_graph(*text)), recompute=True)
    bodies = [graph for node in gradient.graph.node for attribute in node.attribute for graph in subgraphs(attribute)]
    first, second = ({name for node in body.node for name in node.output} for body in bodies)
    assert not first & second
    assert not {value.name for value in bodies[0].input} & names_of(bodies[1])


def test_bodies_beside_the_path_keep_no_names_in_common() -> None:
    """onnx takes n of one branch for n of the other: the gradient is not by way of them, and has to pass inference."""
    branches = [f"n = Constant<value_ints={ints}>() o = Expand(w, n) p = Shape(o)" for ints in ("[1,2]", "[2,1,1,2]")]
    text = (
        f"{HEAD}g (float[2] x, float[2] w, bool c) => (float[2] z) {{ y = Tanh(x) q = If(c)<then_branch = b () => "
        f"(int64[K] p) {{ {branches[0]} }}, else_branch = e () => (int64[L] p) {{ {branches[1]} }}> s = Size(q) "
        "t = Cast<to=1>(s) z = Mul(y, t) }"
    )
    gradient = refgrad.gradient(onnx.parser.parse_model(text), ["x"])
    bodies = [graph for node in gradient.graph.node for attribute in node.attribute for graph in subgraphs(attribute)]
    first, second = map(names_of, bodies)
    assert first & second == {"w"}
    assert not invalid(gradient)


def test_a_body_keeps_the_types_that_it_declares() -> None:
    """onnx infers no type for GroupNormalization in a body. The model declares g as an output, or within."""
    for results, declared in (("float[2] v, float[1,4,3] g", ""), ("float[2] v", "<float[1,4,3] g>")):
        made = "y, s" if "g" in results else "y"
        text = (
            f"{HEAD}h (float[2] x, float[1,4,3] w, float[4] r) => (float[2] y) {{ {made} = "
            f"Scan<num_scan_inputs=1, body = b (float[2] st, float e) => ({results}) {declared} {{ "
            "g = GroupNormalization<num_groups=2>(w, r, r) t = Tanh(g) m = ReduceMean<keepdims=0>(t) u = Mul(st, m) "
            "v = Add(u, e) }>(x, r) }"
        )
        model = onnx.parser.parse_model(text)
        assert not invalid(model)
        for wrt in (["x"], ["x", "w"]):
            assert not invalid(refgrad.gradient(model, wrt))


# Branches of other ranks and sizes: the condition is fed as `c`.

SAME_SIZE = "a = Constant<value_ints=[0]>()"
BRANCHES: dict[str, tuple[str, dict[str, Any], tuple[bool, ...]]] = {
    "torch's squeeze of a dimension that may be 1": (
        "(float[1,N,4] x, bool c) => (float[1,N,4] z) { zero = Constant<value_ints=[0]>() s = Squeeze(x, zero) "
        f"y = If(c)<then_branch = t () => (float[] u) {{ {SAME_SIZE} u = Squeeze(s, a) }}, else_branch = e () => "
        "(float[] v) { v = Identity(s) }> z = Unsqueeze(y, zero) }",
        {"x": (1, 1, 4)},
        (False,),  # else z has two axes, which its declaration denies
    ),
    "a sum of it": (
        f"(float[1,4] x, bool c) => (float z) {{ y = If(c)<then_branch = t () => (float[4] u) {{ {SAME_SIZE} "
        "u = Squeeze(x, a) }, else_branch = e () => (float[1,4] v) { v = Sin(x) }> e = Exp(y) z = ReduceSum<keepdims=0>(e) }",
        {"x": (1, 4)},
        (True, False),
    ),
    "reshaped": (
        f"(float[1,4] x, bool c) => (float[2,2] z) {{ y = If(c)<then_branch = t () => (float[4] u) {{ {SAME_SIZE} "
        "u = Squeeze(x, a) }, else_branch = e () => (float[1,4] v) { v = Sin(x) }> e = Exp(y) "
        "sh = Constant<value_ints=[2,2]>() z = Reshape(e, sh) }",
        {"x": (1, 4)},
        (True, False),
    ),
    "another size": (
        f"(float[4] x, bool c) => (float[N] z) {{ y = If(c)<then_branch = t () => (float[2] u) {{ {SAME_SIZE} "
        "b = Constant<value_ints=[2]>() q = Sin(x) u = Slice(q, a, b) }, else_branch = e () => (float[4] v) "
        "{ v = Sin(x) }> z = Exp(y) }",
        {"x": (4,)},
        (True, False),
    ),
    "a size that only one branch has is declared": (
        f"(float[4] x, bool c) => (float[4] z) {{ y = If(c)<then_branch = t () => (float[2] u) {{ {SAME_SIZE} "
        "b = Constant<value_ints=[2]>() q = Sin(x) r = Slice(q, a, b) w = Constant<value_floats=[1.0,2.0]>() "
        "u = Mul(r, w) }, else_branch = e () => (float[4] v) { v = Sin(x) }> z = Exp(y) }",
        {"x": (4,)},
        (False,),
    ),
    "a rank that only one branch has is declared": (
        f"(float[1,4] x, bool c) => (float[1,4] z) {{ y = If(c)<then_branch = t () => (float[4] u) {{ q = Sin(x) "
        f"{SAME_SIZE} r = Squeeze(q, a) w = Constant<value_floats=[1.0,2.0,3.0,4.0]>() u = Mul(r, w) }}, "
        "else_branch = e () => (float[1,4] v) { v = Sin(x) }> z = Exp(y) }",
        {"x": (1, 4)},
        (False,),
    ),
    "a rank that nobody knows in one branch": (
        "(float[3,4] x, int64[K] k, float[2,3,4] w, bool c) => (float[3,4] z) { y = If(c)<then_branch = t () => (float[] u) "
        "{ r = Reshape(x, k) u = Mul(r, w) }, else_branch = e () => (float[3,4] v) { v = Sin(x) }> z = Exp(y) }",
        {"x": (3, 4), "k": np.array([3, 4]), "w": (2, 3, 4)},
        (False,),
    ),
    "a branch within a branch": (
        "(float[1,1,4] x, bool c) => (float z) { y = If(c)<then_branch = t () => (float[] u) { u = If(c)<then_branch = "
        "t2 () => (float[4] u2) { a = Constant<value_ints=[0,1]>() u2 = Squeeze(x, a) }, else_branch = e2 () => "
        f"(float[1,4] v2) {{ {SAME_SIZE} v2 = Squeeze(x, a) }}> }}, else_branch = e () => (float[1,1,4] v) "
        "{ v = Sin(x) }> f = Exp(y) z = ReduceSum<keepdims=0>(f) }",
        {"x": (1, 1, 4)},
        (True, False),
    ),
    "one of two outputs": (
        f"(float[1,4] x, bool c) => (float[A] z, float[B,A] q) {{ y, q = If(c)<then_branch = t () => (float[4] u, "
        f"float[1,4] u2) {{ {SAME_SIZE} u = Squeeze(x, a) u2 = Exp(x) }}, else_branch = e () => (float[1,4] v, "
        "float[1,4] v2) { v = Sin(x) v2 = Mul(v, x) }> m = Constant<value_ints=[-1]>() z = Reshape(y, m) }",
        {"x": (1, 4)},
        (True, False),
    ),
    "in a Loop": (
        '(float[1,4] x, bool c) => (float[1,4] z) { n = Constant<value_int=3>() z = Loop(n, "", x)<body = b (int64 i, '
        "bool ci, float[1,4] st) => (bool co, float[1,4] v) { co = Identity(ci) y = If(c)<then_branch = t () => (float[4] u) "
        f"{{ {SAME_SIZE} u = Squeeze(st, a) }}, else_branch = e () => (float[1,4] p) {{ p = Sin(st) }}> f = Exp(y) "
        "q = Neg(f) sh = Constant<value_ints=[1,4]>() v = Reshape(q, sh) }> }",
        {"x": (1, 4)},
        (True, False),
    ),
    "sequences of elements of other ranks": (
        "(float[2,3] x, bool c) => (float z) { y = If(c)<then_branch = t () => (seq(float[3]) u) "
        "{ u = SplitToSequence<axis=0, keepdims=0>(x) }, else_branch = e () => (seq(float[1,3]) v) "
        "{ v = SplitToSequence<axis=0, keepdims=1>(x) }> i = Constant<value_int=0>() q = SequenceAt(y, i) f = Exp(q) "
        "z = ReduceSum<keepdims=0>(f) }",
        {"x": (2, 3)},
        (True, False),
    ),
}


@pytest.mark.parametrize(("name", "taken"), [(name, taken) for name, (*_, all_) in BRANCHES.items() for taken in all_])
def test_branches_that_differ_in_rank(name: str, taken: bool) -> None:
    text, fed, _ = BRANCHES[name]
    made = sample(f'<ir_version: 10, opset_import: ["": 18]> g {text}', {**fed, "c": np.array(taken)})
    is_right(made)
    for backend in {"numpy", "ort-cpu"}.intersection(available()):
        on(backend, made)


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
def test_the_branch_that_squeezes(backend: str) -> None:
    """z has two axes there, and its cotangent the three that are declared: the elements are the same."""
    if backend not in available():
        pytest.skip(f"{backend} is not installed")
    text = BRANCHES["torch's squeeze of a dimension that may be 1"][0]
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 16]> m {text}')
    dz = np.arange(1, 5, dtype="f").reshape(1, 1, 4)
    x = np.ones((1, 1, 4), "f")
    results = get_backend(backend).prepare(refgrad.gradient(model)).run({"x": x, "c": np.array(True), "z_grad": dz})
    np.testing.assert_array_equal(results["x_grad"], dz)


# Values without a shape


def parsed(graph: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g {graph}')


@pytest.mark.parametrize(
    ("graph", "name"),
    [
        ("(float[] x) => (float z) { z = ReduceSum<keepdims=0>(x) }", "x"),
        ("(float[4] x, int64[] k) => (float z) { e = Gather(x, k) z = ReduceSum<keepdims=0>(e) }", "k"),
        ("(float[4] x, float[] unread) => (float z) { z = ReduceSum<keepdims=0>(x) }", "unread"),
        ("(optional(float[]) x) => (float z) { q = OptionalGetElement(x) z = ReduceSum<keepdims=0>(q) }", "x"),
        ("(float[4] x) => (optional(float[]) z) { e = Exp(x) z = Optional(e) }", "z"),
    ],
)
def test_a_gradient_that_nobody_could_declare_is_refused(graph: str, name: str) -> None:
    for make in (refgrad.gradient, refgrad.split):
        with pytest.raises(InvalidModelError, match=rf"^'{name}' declares no shape, .* Declare its axes, by names"):
            make(parsed(graph))


@pytest.mark.parametrize(
    "graph",
    [
        "(seq(float[]) x) => (float z) { i = Constant<value_int=0>() q = SequenceAt(x, i) z = ReduceSum<keepdims=0>(q) }",
        "(optional(float[2]) x) => (float z) { q = OptionalGetElement(x) z = ReduceSum<keepdims=0>(q) }",
        "(float[4] x) => (seq(float[]) z) { k = Constant<value_ints=[2,2]>() e = Exp(x) z = SplitToSequence(e, k) }",
        "(float[4] x) => (float[] z) { z = Exp(x) }",
        "(float[4] x, float[] w) => (float[4] z) <float[4] w = {1, 2, 3, 4}> { z = Mul(x, w) }",
    ],
)
def test_values_whose_shape_follows_or_is_not_needed(graph: str) -> None:
    for how in ({}, {"keep_outputs": True}):
        assert not invalid(refgrad.gradient(parsed(graph), **how))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("v = Concat<axis=0>(t, st)", "size 4 along axis 0"),
        ("a = Constant<value_ints=[0]>() v = Unsqueeze(t, a)", "1 axes"),
    ],
)
def test_a_state_that_changes_its_shape_is_refused(step: str, reason: str) -> None:
    text = (
        '(float[4] x) => (float z) { n = Constant<value_int=2>() y = Loop(n, "", x)<body = b (int64 i, bool ci, float[] st) '
        f"=> (bool co, float[] v) {{ co = Identity(ci) t = Exp(st) {step} }}> z = ReduceSum<keepdims=0>(y) }}"
    )
    with pytest.raises(NoGradientError, match=f"its state 'st' has {reason}"):
        refgrad.gradient(parsed(text))


def test_a_state_of_unknown_size_whose_final_value_is_longer() -> None:
    """Nobody knows that it grows: the zeros for its cotangent are as long as its final value."""
    text = (
        '(float[?,M] x, int64 n) => (float[?,?] z) { z = Loop(n, "", x)<body = b (int64 i, bool ci, float[] st) => '
        "(bool co, float[] v) { co = Identity(ci) t = Sin(st) v = Concat<axis=0>(t, st) }> }"
    )
    made = sample(f'<ir_version: 8, opset_import: ["": 16]> g {text}', {"x": (2, 3), "n": np.array(1)})
    found = judge(made)
    assert [one for one in found.verdicts if one.kind != FOREIGN] == []
    assert {"gradient", "ort dialect", "jvp", "hvp", "again"} <= found.compared


def test_an_unnamed_final_state_of_unknown_size_is_a_tensor() -> None:
    """Its cotangent is needed in every step, and no operator of an older opset tests whether a tensor has an element."""
    text = (
        '(float[2,3] x, float[3,3] w, int64[2] n) => (float[3,2,3] z) { "", z = Scan<num_scan_inputs=1, body = b '
        "(float[2,3] st, float[3] e) => (float[?,?] v, float[2,3] o) { t = Sin(st) u = Add(t, e) v = Reshape(u, n) "
        "o = Tanh(v) }>(x, w) }"
    )
    fed = {"x": (2, 3), "w": (3, 3), "n": np.array([2, 3])}
    found = judge(sample(f'<ir_version: 8, opset_import: ["": 16]> g {text}', fed))
    assert [one for one in found.verdicts if one.kind != FOREIGN] == []
    assert {"gradient", "ort dialect", "jvp", "hvp"} <= found.compared


def test_a_branch_that_is_never_taken_may_fit_no_shape() -> None:
    """No scalar has the shape [K, 4, 4] of the input, but Reshape checks that only when it runs."""
    text = (
        "(float[K,4,4] x, bool c) => (float[1,4,4] z) { s = Constant<value_ints=[1,4,4]>() none = Shape<start=3>(x) "
        "y = If(c)<else_branch = e () => (float[1,4,4] u) { r = Reshape(x, s) u = Sin(r) }, "
        "then_branch = t () => (float[1,4,4] v) { q = Reshape(x, none) v = Expand(q, s) }> z = Neg(y) }"
    )
    found = judge(sample(f"{HEAD}g {text}", {"x": (1, 4, 4), "c": np.array(False)}))
    assert [one for one in found.verdicts if one.kind != FOREIGN] == []
    assert {"gradient", "ort dialect", "jvp", "hvp"} <= found.compared
