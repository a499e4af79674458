"""`refgrad.expand_gradients`: what Gradient stands for, against differences of what is differentiated and against formulas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper, numpy_helper
from onnx.backend.test import loader
from onnx.reference import ReferenceEvaluator

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.derivatives import expansion
from refgrad.errors import BackendError, ExpansionError, NoGradientError
from refgrad.protos.traverse import every_node

pytestmark = pytest.mark.interpreter

TRAINING = "ai.onnx.preview.training"
Arrays = Mapping[str, Any]


def parsed(
    body: str, inputs: str, outputs: str, *, opset: int = 18, tensors: str = "", functions: str = ""
) -> ModelProto:
    """A model in onnx's text form, in which Gradient stands for the operator of its domain and local functions are of `l`."""
    domains = f'"" : {opset}, "{TRAINING}" : 1, "l" : 1'
    text = (
        f"<ir_version: 8, opset_import: [{domains}]> g ({inputs}) => ({outputs}) <{tensors}> {{ {body} }} {functions}"
    )
    return onnx.parser.parse_model(text.replace("<>", "").replace("Gradient", f"{TRAINING}.Gradient"))


def function(text: str) -> str:
    return f'<domain: "l", opset_import: ["" : 18, "{TRAINING}" : 1, "l" : 1]> {text}'


def run(model: ModelProto, feeds: Arrays, executor: str = "numpy") -> dict[str, Any]:
    if executor != "onnx.reference":
        return dict(get_backend(executor).prepare(model).run(feeds))
    reference = ReferenceEvaluator(model)
    return dict(zip(reference.output_names, reference.run(None, dict(feeds)), strict=True))


def expanded(model: ModelProto) -> ModelProto:
    """`model` expanded: a valid model that has no Gradient, and whose own nodes are there once."""
    before = model.SerializeToString(deterministic=True)
    made = refgrad.expand_gradients(model)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(made, full_check=True)
    assert not any(node.op_type == "Gradient" for node in every_node(made))
    assert TRAINING not in {o.domain for o in made.opset_import}
    for ours, theirs in ((made.graph.input, model.graph.input), (made.graph.output, model.graph.output)):
        assert list(ours) == list(theirs)
    return made


def differences(model: ModelProto, feeds: Arrays, x: str, y: str) -> np.ndarray:
    """The derivative of the sum of the output `y` of a model by its input `x`, element by element, by central differences."""
    prepared = get_backend("numpy").prepare(model)
    slope = np.zeros_like(feeds[x])
    for index in np.ndindex(slope.shape):
        ends = []
        for step in (1e-5, -1e-5):
            moved = np.array(feeds[x])
            moved[index] += step
            ends.append(np.sum(prepared.run({**feeds, x: moved})[y]))
        slope[index] = (ends[0] - ends[1]) / 2e-5
    return slope


# Each: the inputs, the nodes that make y, xs, zs, and what else the model has.
LOOP = """n = Constant <value = int64 {3}> () c = Constant <value = bool {1}> ()
    s = Loop (n, c, x) <body = b (int64 i, bool k, double[3] p) => (bool q, double[3] r) {
        q = Identity (k) t = Sin (p) r = Mul (t, w) }>  y = Mul (s, s)"""
SCAN = """s, o = Scan <num_scan_inputs = 1, body = b (double[2] p, double[2] r) => (double[2] q, double[2] t) {
        u = Mul (p, r) q = Tanh (u) t = Add (q, r) }> (w, x)  y = Mul (o, o)"""
IF = """z = Constant <value = double {0.0}> () m = ReduceSum <keepdims = 0> (x) c = Greater (m, z)
    a = If (c) <then_branch = t () => (double[3] p) { p = Mul (x, w) }, else_branch = f () => (double[3] q) { q = Sin (x) }>
    y = Exp (a)"""
GRAPHS: dict[str, tuple[str, str, list[str], list[str], dict[str, Any]]] = {
    "elementwise, broadcast": (
        "double[2,3] x, double[3] w",
        "a = Sin (x) b = Mul (a, w) y = Div (b, w)",
        ["x", "w"],
        [],
        {},
    ),
    "matrix with an initializer": (
        "double[N,2] x, double[2] w",
        "a = Add (x, w) b = MatMul (a, m) y = Tanh (b)",
        ["x", "w"],
        [],
        {"tensors": "double[2,2] m = {1, 2, 3, 4}"},
    ),
    "convolution": (
        "double[1,2,4,4] x, double[3,2,2,2] w",
        "a = Conv (x, w) b = Softplus (a) y = AveragePool <kernel_shape = [2, 2]> (b)",
        ["w"],
        ["x"],
        {"opset": 12},
    ),
    "a loss with labels": (
        "double[4,3] x, int64[4] w",
        "p = LogSoftmax <axis = 1> (x) y = NegativeLogLikelihoodLoss (p, w)",
        ["x"],
        ["w"],
        {"opset": 13},
    ),
    "several outputs": (
        "double[6] x, double[3] w",
        "a, b = Split <num_outputs = 2> (x) c = Mul (a, b) y = Mul (c, w)",
        ["x", "w"],
        [],
        {},
    ),
    "norms and sums": (
        "double[2,3] x, double[3] w",
        "p = Softmax (x) a = Mul (p, w) b = ReduceL2 (a) c = CumSum (a, k) y = Mul (b, c)",
        ["w", "x"],
        [],
        {"tensors": "int64 k = {1}"},
    ),
    "a function body": (
        "double[2,3] x, double[3] w",
        "a = Mul (x, w) y = l.Swoosh (a)",
        ["x"],
        ["w"],
        {"functions": function("Swoosh (a) => (b) { s = Sigmoid (a) b = Mul (s, a) }")},
    ),
    "an operator's own body": (
        "double[2,3] x, double[2,3] w",
        "a = Mul (x, w) y = SoftmaxCrossEntropyLoss (a, k)",
        ["x", "w"],
        [],
        {"tensors": "int64[2] k = {1, 2}"},
    ),
    "recurrence": (
        "double[3,1,2] x, double[1,6,2] w",
        "a, b = GRU <hidden_size = 2> (x, w, r) y = Mul (a, a)",
        ["x", "w"],
        [],
        {"tensors": "double[1,6,2] r = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, -0.1, -0.2, -0.3, 0.4, 0.2, 0.1}"},
    ),
    "indices": (
        "double[4,3] x, int64[2] w",
        "a = Gather (x, w) b = Exp (a) y = ReduceProd (b)",
        ["x"],
        ["w"],
        {"opset": 21},
    ),
    "a branch": ("double[3] x, double[3] w", IF, ["x", "w"], [], {}),
    "a loop": ("double[3] x, double[3] w", LOOP, ["x", "w"], [], {}),
    "a scan": ("double[3,2] x, double[2] w", SCAN, ["w", "x"], [], {}),
}


def drawn(model: ModelProto, seed: int = 0) -> dict[str, Any]:
    """Values for the inputs of a model, with 2 for a dimension that has a name; integers are below 3."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value or 2 for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[value.name] = (
            rng.integers(0, 3, shape) if dtype == np.int64 else rng.uniform(0.3, 1.2, shape).astype(dtype)
        )
    return feeds


def names(listed: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in listed) + "]"


def gradient_node(xs: list[str], zs: list[str], given: list[str] | None = None, y: str = "y") -> str:
    made = ", ".join(f"d{x}" for x in xs)
    also = f"zs = {names(zs)}, " if zs else ""
    return f'{made} = Gradient <xs = {names(xs)}, {also}y = "{y}"> ({", ".join(given or [*xs, *zs])})'


@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
@pytest.mark.parametrize("executor", ["numpy", "ort-cpu", "onnx.reference"])
def test_the_node_tests_of_onnx_pass(name: str, executor: str) -> None:
    [test] = [test for test in loader.load_model_tests(kind="simple") if test.name == name]
    folder = Path(test.model_dir)
    model = onnx.load(folder / "model.onnx")
    made = expanded(model)

    def load(kind: str, values: Any) -> dict[str, np.ndarray]:
        tensors = [onnx.load_tensor(folder / "test_data_set_0" / f"{kind}_{k}.pb") for k in range(len(values))]
        return {value.name: numpy_helper.to_array(t) for value, t in zip(values, tensors, strict=True)}

    results = run(made, load("input", model.graph.input), executor)
    for output, expected in load("output", model.graph.output).items():
        np.testing.assert_array_equal(results[output], expected)


def gradient_agrees(graph: str, elsewhere: bool) -> None:
    """The expansion agrees with differences, at the named values or at others."""
    inputs, body, xs, zs, more = GRAPHS[graph]
    plain = parsed(body, inputs, "double[] y", **more)
    feeds = at = drawn(plain)
    given = [*xs, *zs]
    declared = inputs
    if elsewhere:
        at = drawn(plain, seed=1)
        feeds = feeds | {f"{name}_1": value for name, value in at.items()}
        given = [f"{name}_1" for name in given]
        declared = ", ".join([inputs, *(f"{value}_1" for value in inputs.split(", "))])
    outputs = ", ".join(f"double{shape_of(inputs, x)} d{x}" for x in xs)
    made = expanded(parsed(f"{body} {gradient_node(xs, zs, given)}", declared, outputs, **more))
    results = run(made, feeds)
    for x in xs:
        np.testing.assert_allclose(results[f"d{x}"], differences(plain, at, x, "y"), rtol=1e-6, atol=1e-8)
    for name, value in run(made, feeds, "ort-cpu").items() if graph not in NOT_IN_DOUBLE else ():
        np.testing.assert_allclose(value, results[name], rtol=1e-9, atol=1e-12)


NOT_IN_DOUBLE = {"convolution", "recurrence"}  # ONNX Runtime has no kernels for it there


def shape_of(inputs: str, name: str) -> str:
    """The dimensions of an input as the text has them."""
    [declared] = [value.strip() for value in inputs.split(", ") if value.split()[-1] == name]
    return declared.split()[0].removeprefix("double")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["at the named values", "at others"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_agrees_with_differences(graph: str, elsewhere: bool) -> None:
    gradient_agrees(graph, elsewhere)


def test_a_wrong_derivative_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken at the named values, or of something else, it does not agree."""
    with monkeypatch.context() as planted:
        planted.setattr(expansion._Expansion, "_evaluate", lambda *arguments: {})
        with pytest.raises(AssertionError):
            gradient_agrees("a loop", elsewhere=True)
    with monkeypatch.context() as planted:
        right = expansion.names_in

        def swapped(model: ModelProto) -> tuple[dict[str, str], dict[str, str]]:
            cotangents, gradients = right(model)
            return cotangents, dict(zip(gradients, reversed(gradients.values()), strict=True))

        planted.setattr(expansion, "names_in", swapped)
        with pytest.raises(AssertionError):
            gradient_agrees("a loop", elsewhere=False)


# Each: nodes, the outputs, and their derivatives at x in closed form.
E = np.exp
HIGHER = {
    "x exp(x), three times": (
        """a = Exp (x) y = Mul (a, x)
        d = Gradient <xs = ["x"], y = "y"> (x) e = Gradient <xs = ["x"], y = "d"> (x) f = Gradient <xs = ["x"], y = "e"> (x)""",
        {"d": lambda x, w: (x + 1) * E(x), "e": lambda x, w: (x + 2) * E(x), "f": lambda x, w: (x + 3) * E(x)},
    ),
    "x to the third, at other values": (
        """a = Mul (x, x) y = Mul (a, x)
        d = Gradient <xs = ["x"], y = "y"> (x) e = Gradient <xs = ["x"], y = "d"> (w) f = Gradient <xs = ["w"], y = "e"> (x)""",
        {"d": lambda x, w: 3 * x**2, "e": lambda x, w: 6 * w, "f": lambda x, w: 6 + 0 * x},
    ),
    "mixed": (
        """a = Sin (x) y = Mul (a, w) d = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w)
        e, f = Gradient <xs = ["x", "w"], y = "d"> (x, w)""",
        {"d": lambda x, w: w * np.cos(x), "e": lambda x, w: -w * np.sin(x), "f": lambda x, w: np.cos(x)},
    ),
    "of a derivative at other values": (
        """a = Sin (x) y = Mul (a, a) s = Mul (w, w) d = Gradient <xs = ["x"], y = "y"> (s)
        e = Gradient <xs = ["w"], y = "d"> (w)""",
        {"d": lambda x, w: np.sin(2 * w**2), "e": lambda x, w: 4 * w * np.cos(2 * w**2)},
    ),
    "of what is linear": (
        """y = Mul (x, w) d = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w)
        e, f = Gradient <xs = ["x", "w"], y = "d"> (x, w)""",
        {"d": lambda x, w: w, "e": lambda x, w: 0 * x, "f": lambda x, w: 1 + 0 * w},
    ),
    "of intermediate values": (
        """h = Mul (x, x) y = Exp (h) d = Gradient <xs = ["h"], y = "y"> (h) e = Gradient <xs = ["h"], y = "d"> (w)
        f = Gradient <xs = ["x"], y = "d"> (x)""",
        {"d": lambda x, w: E(x**2), "e": lambda x, w: E(w), "f": lambda x, w: 2 * x * E(x**2)},
    ),
    "of the value itself": (
        """y = Mul (x, w) d = Gradient <xs = ["y"], y = "y"> (y) e = Gradient <xs = ["y"], y = "y"> (x)""",
        {"d": lambda x, w: 1 + 0 * x, "e": lambda x, w: 1 + 0 * x},
    ),
    "some are left out": (
        """a = Mul (x, x) y = Mul (a, w) "", d = Gradient <xs = ["x", "w"], y = "y"> (x, w)
        e = Gradient <xs = ["x", "w"], y = "y"> (x, w)""",
        {"d": lambda x, w: x**2, "e": lambda x, w: 2 * x * w},
    ),
    "one value for two names": (
        """a = Mul (x, x) y = Mul (a, w) d, e = Gradient <xs = ["x", "w"], y = "y"> (x, x)""",
        {"d": lambda x, w: 2 * x**2, "e": lambda x, w: x**2},
    ),
    "a part of what a node makes": (
        """p = Concat <axis = 0> (k, k) a, b = Split <num_outputs = 2> (p) y = Mul (a, b)
        d = Gradient <xs = ["a"], y = "y"> (a) e = Gradient <xs = ["a"], y = "y"> (x)""",
        {"d": lambda x, w: [2, 3, 4], "e": lambda x, w: [2, 3, 4]},
    ),
    "of a derivative with constants of its own": (
        """n = ReduceSum (x, zero) o = Mul (n, n) y = Expand (o, three) d = Gradient <xs = ["x"], y = "y"> (x)
        e = Gradient <xs = ["x"], y = "d"> (w)""",
        {"d": lambda x, w: 6 * x.sum() + 0 * x, "e": lambda x, w: 18 + 0 * w},
    ),
    "of a derivative of a scan": (
        """t = Unsqueeze (x, one) v = Unsqueeze (w, one) b = Constant <value = double[1] {1.0}> ()
        s, y = Scan <num_scan_inputs = 1, body = b (double[1] p, double[1] r) => (double[1] q, double[1] o) {
            q = Mul (p, r) o = Identity (q) }> (b, t)
        g = Gradient <xs = ["t"], y = "y"> (t) h = Gradient <xs = ["t"], y = "g"> (v)
        d = Reshape (g, three) e = Reshape (h, three)""",
        {
            "d": lambda x, w: [1 + x[1] + x[1] * x[2], x[0] + x[0] * x[2], x[0] * x[1]],
            "e": lambda x, w: [1 + w[1] + w[2], 1 + w[0] + w[2], w[0] + w[1]],
        },
    ),
    "in functions": (
        "d, e = l.Both (x, w) f, z = l.Both (x, x)",
        {
            "d": lambda x, w: w + 2 * x * w**2,
            "e": lambda x, w: x + 2 * w * x**2,
            "f": lambda x, w: x + 2 * x**3,
            "z": lambda x, w: x + 2 * x**3,
        },
    ),
    "in a function of a function": (
        "t = Sin (x) d = l.Outer (x, t)",
        {"d": lambda x, w: np.sin(x) + 2 * x * np.sin(x) ** 2},
    ),
    "in a branch": (
        """n = ReduceSum <keepdims = 0> (x) o = ReduceSum <keepdims = 0> (w) c = Greater (n, o) s = Mul (x, x)
        d = If (c) <then_branch = t () => (double[3] p) { p = Identity (x) },
            else_branch = f () => (double[3] q) { r = Mul (s, w) q = Gradient <xs = ["x"], zs = ["w"], y = "r"> (x, w) }>
        e = If (c) <then_branch = t () => (double[3] p) { p = Identity (x) },
            else_branch = f () => (double[3] q) { q = Gradient <xs = ["x"], y = "s"> (w) }>
        f = Gradient <xs = ["w"], zs = ["x"], y = "d"> (w, x)""",
        {"d": lambda x, w: 2 * x * w, "e": lambda x, w: 2 * w, "f": lambda x, w: 2 * x},
    ),
    "of what is linear in a branch": (
        """n = ReduceSum <keepdims = 0> (x) o = ReduceSum <keepdims = 0> (w) c = Greater (n, o) s = Mul (x, w)
        y = If (c) <then_branch = t () => (double[3] p) { p = Identity (x) },
            else_branch = f () => (double[3] q) { q = Gradient <xs = ["x"], zs = ["w"], y = "s"> (x, w) }>
        d, e = Gradient <xs = ["x", "w"], y = "y"> (x, w)""",
        {"d": lambda x, w: 0 * x, "e": lambda x, w: 1 + 0 * w},
    ),
    "descent in a loop": (
        """n = Constant <value = int64 {5}> () c = Constant <value = bool {1}> ()
        d = Loop (n, c, x) <body = b (int64 i, bool g, double[3] p) => (bool q, double[3] r) {
            q = Identity (g) t = Sub (p, w) u = Mul (t, t) v = Mul (u, k)
            s = Gradient <xs = ["p"], zs = ["w"], y = "v"> (p, w) h = Mul (s, l) r = Sub (p, h) }>""",
        {"d": lambda x, w: w + (x - w) * (1 - 0.2 * np.array([2, 3, 4])) ** 5},
    ),
    "through a loop of derivatives": (
        """n = Constant <value = int64 {2}> () c = Constant <value = bool {1}> ()
        y = Loop (n, c, x) <body = b (int64 i, bool g, double[3] p) => (bool q, double[3] r) {
            q = Identity (g) u = Mul (p, p) v = Mul (u, p) r = Gradient <xs = ["p"], y = "v"> (p) }>
        d = Gradient <xs = ["x"], y = "y"> (x)""",
        {"d": lambda x, w: 4 * 27 * x**3},
    ),
}
BOTH = """Both (a, b) => (p, q) {
    a_own = Mul (a, b) c = Identity (a_own) s = Mul (c, c) y = Add (c, s) p, q = Gradient <xs = ["a", "b"], y = "y"> (a, b)
}"""
FUNCTIONS = " ".join(map(function, (BOTH, "Outer (a, b) => (p) { p, q = l.Both (a, b) }")))


@pytest.mark.parametrize("case", HIGHER)
def test_agrees_with_formulas(case: str) -> None:
    body, expected = HIGHER[case]
    outputs = ", ".join(f"double[3] {name}" for name in expected)
    tensors = "double[3] k = {2, 3, 4}, double l = {0.1}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] three = {3}"
    made = expanded(parsed(body, "double[3] x, double[3] w", outputs, tensors=tensors, functions=FUNCTIONS))
    x, w = np.array([0.5, -1.0, 0.25]), np.array([0.75, 1.5, -0.5])
    for executor in ("numpy", "ort-cpu"):
        results = run(made, {"x": x, "w": w}, executor)
        for name, formula in expected.items():
            np.testing.assert_allclose(results[name], formula(x, w), rtol=1e-13, atol=1e-14)


def test_of_a_vector_it_is_the_derivative_of_the_sum() -> None:
    made = expanded(
        parsed('y = MatMul (m, x) d = Gradient <xs = ["x"], y = "y"> (x)', "float[2] x", "float[2] d", tensors=M)
    )
    np.testing.assert_array_equal(run(made, {"x": np.float32([7, 9])})["d"], [4, 6])


M = "float[2,2] m = {1, 2, 3, 4}"


@pytest.mark.parametrize("kind", ["float", "double", "float16"])
def test_keeps_types(kind: str) -> None:
    made = expanded(parsed('y = Exp (x) d = Gradient <xs = ["x"], y = "y"> (x)', f"{kind}[2] x", f"{kind}[2] d"))
    x = np.zeros(2, helper.tensor_dtype_to_np_dtype(made.graph.input[0].type.tensor_type.elem_type))
    [result] = run(made, {"x": x}).values()
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, 1)


def test_the_values_given_may_have_another_shape() -> None:
    made = expanded(
        parsed('y = Exp (x) d = Gradient <xs = ["x"], y = "y"> (w)', "double[2] x, double[1,3] w", "double[1,3] d")
    )
    w = np.array([[0.0, 1.0, 2.0]])
    np.testing.assert_allclose(run(made, {"x": np.zeros(2), "w": w})["d"], E(w), rtol=1e-15)


@pytest.mark.parametrize("graph", GRAPHS)
def test_nothing_is_computed_twice(graph: str) -> None:
    """At the named values the nodes that are there stay what they are, and are there once."""
    inputs, body, xs, zs, more = GRAPHS[graph]
    outputs = ", ".join(f"double{shape_of(inputs, x)} d{x}" for x in xs)
    more = {**more, "opset": max(more.get("opset", 18), 16)}
    model = parsed(f"{body} {gradient_node(xs, zs)}", inputs, outputs, **more)
    made = expanded(model)
    theirs = [name for node in model.graph.node if node.op_type != "Gradient" for name in node.output if name]
    rules = {entry.value for node in made.graph.node for entry in node.metadata_props if entry.key == "refgrad.rule"}
    own = [node for node in made.graph.node if not any(entry.key == "refgrad.rule" for entry in node.metadata_props)]
    assert rules
    assert [name for name in theirs if sum(name in node.output for node in own) != 1] == []
    if graph == "a function body":
        return
    summed = graph == "a loop"  # its result has no known rank: the elements are added up first
    assert len(own) == len(model.graph.node) - 1 + summed


MOMENTUM = f'{TRAINING}.Momentum <alpha = 0.5, beta = 0.5, mode = "standard", norm_coefficient = 0.0>'
STEP = f"u, n = {MOMENTUM} (r, t, x, g, v)"


@pytest.mark.parametrize(("y", "slope"), [("u", -0.05), ("n", 0.5)])
def test_a_body_takes_the_place_of_its_operator(y: str, slope: float) -> None:
    """Where an operator is differentiated through its body, only that is left."""
    made = expanded(
        parsed(
            f'{STEP} d = Gradient <xs = ["g"], zs = ["r", "t", "x", "v"], y = "{y}"> (g, r, t, x, v)',
            "float r, int64 t, float[2] x, float[2] g, float[2] v",
            "float[2] d, float[2] u, float[2] n",
        )
    )
    feeds = {"r": np.float32(0.1), "t": np.array(1), "x": np.float32([1, 2]), "g": np.float32([3, 5])}
    results = run(made, feeds | {"v": np.float32([2, 4])})
    np.testing.assert_allclose(results["d"], [slope, slope], rtol=1e-6)
    np.testing.assert_allclose(results["n"], [2.5, 4.5], rtol=1e-6)  # 0.5 v + 0.5 g
    np.testing.assert_allclose(results["u"], [0.75, 1.55], rtol=1e-6)  # x - 0.1 n


def test_an_operator_stays_beside_its_body_where_that_makes_less() -> None:
    """What the operator makes of the cut is no result of the body."""
    tensors = "float r = {0.1}, int64 t = {1}, float[2] x = {1, 2}, float[2] g = {3, 5}, float[2] v = {2, 4}"
    body = f'{STEP} y = Mul (u, n) d = Gradient <xs = ["n"], y = "y"> (n) e = Gradient <xs = ["n"], y = "y"> (w)'
    made = refgrad.expand_gradients(parsed(body, "float[2] w", "float[2] d, float[2] e, float[2] y", tensors=tensors))
    onnx.checker.check_model(made, full_check=True)
    results = run(made, {"w": np.float32([7, 9])})
    for name, expected in (("d", [0.75, 1.55]), ("e", [0.75, 1.55]), ("y", [0.75 * 2.5, 1.55 * 4.5])):
        np.testing.assert_allclose(results[name], expected, rtol=1e-6)


def test_a_default_may_be_replaced_by_a_value_of_another_shape() -> None:
    model = parsed(
        'y = Mul (x, w) d = Gradient <xs = ["w"], zs = ["x"], y = "y"> (w, x)',
        "double[N] x, double[N] w",
        "double[N] d",
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([1.0, 2.0]), "w"))
    made = expanded(model)
    x = np.array([3.0, 4.0, 5.0])
    np.testing.assert_array_equal(run(made, {"x": x, "w": x})["d"], x)
    np.testing.assert_array_equal(run(made, {"x": x[:2]})["d"], x[:2])


# What remains of a model


def test_a_model_without_the_operator_is_copied() -> None:
    model = parsed("y = Exp (x)", "float[2] x", "float[2] y", opset=11)
    made = refgrad.expand_gradients(model)
    assert made == model
    assert made is not model


def test_the_domain_stays_while_somebody_uses_it() -> None:
    model = parsed(
        f'y = Mul (x, x) d = Gradient <xs = ["x"], y = "y"> (x) u, n = {MOMENTUM} (r, t, x, d, v)',
        "float r, int64 t, float[2] x, float[2] v",
        "float[2] u",
    )
    made = refgrad.expand_gradients(model)
    assert {o.domain for o in made.opset_import} == {"", TRAINING}
    feeds = {"r": np.float32(0.1), "t": np.array(1), "x": np.float32([1, 2]), "v": np.zeros(2, np.float32)}
    np.testing.assert_allclose(run(made, feeds)["u"], [0.9, 1.8], rtol=1e-6)


def test_external_data_is_referenced(tmp_path: Path) -> None:
    model = parsed(
        'a = MatMul (x, w) y = Mul (a, a) d = Gradient <xs = ["w"], zs = ["x"], y = "y"> (w, x)',
        "float[1,20] x",
        "float[20,20] d",
    )
    w = np.arange(400, dtype=np.float32).reshape(20, 20)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    made = refgrad.expand_gradients(path)
    [kept] = [tensor for tensor in made.graph.initializer if tensor.name == "w"]
    assert kept.data_location == onnx.TensorProto.EXTERNAL
    assert not kept.raw_data
    assert main(["expand", str(path), "-o", str(tmp_path / "made.onnx")]) == 0
    x = np.linspace(0, 1, 20, dtype=np.float32)[None]
    result = get_backend("numpy").prepare(tmp_path / "made.onnx").run({"x": x})["d"]
    np.testing.assert_allclose(result, x.T * (2 * x @ w), rtol=1e-5)


def test_what_is_made_can_be_differentiated() -> None:
    model = parsed('y = Exp (x) d = Gradient <xs = ["x"], y = "y"> (x)', "double[2] x", "double[2] d")
    with pytest.raises(NoGradientError, match=r"write that out with refgrad\.expand_gradients first"):
        refgrad.gradient(model)
    x = np.array([1.0, 2.0])
    np.testing.assert_allclose(
        run(refgrad.gradient(expanded(model), cotangent="ones"), {"x": x})["x_grad"], E(x), rtol=1e-15
    )


def test_the_interpreter_says_what_to_do() -> None:
    model = parsed('y = Exp (x) d = Gradient <xs = ["x"], y = "y"> (x)', "double[2] x", "double[2] d")
    with pytest.raises(BackendError, match=r"Gradient.*Write that out with refgrad\.expand_gradients"):
        get_backend("numpy").prepare(model)


# What is refused

ERRORS = {
    "an unknown y": ('d = Gradient <xs = ["x"], y = "hh"> (x)', "names 'hh', which is not a value. Did you mean 'h'"),
    "an unknown x": ('d = Gradient <xs = ["X"], y = "h"> (x)', "names 'X', which is not a value"),
    "an unknown z": ('d = Gradient <xs = ["x"], zs = ["v"], y = "h"> (x, x)', "names 'v', which is not a value"),
    "made later": (
        'd = Gradient <xs = ["x"], y = "y"> (x) y = Exp (x)',
        "names 'y', which no node before it makes",
    ),
    "its own result": ('d = Gradient <xs = ["x"], y = "d"> (x)', "names 'd', which no node before it makes"),
    "of a body": (
        """e = If (b) <then_branch = t () => (double[2] p) { p = Exp (x) }, else_branch = f () => (double[2] q) { q = Exp (x) }>
        d = Gradient <xs = ["x"], y = "p"> (x)""",
        "names 'p', which is not a value",
    ),
    "too few inputs": ('d = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x)', "has 1 inputs. .* xs and zs, 'x', 'w'"),
    "too many inputs": ('d = Gradient <xs = ["x"], y = "h"> (x, w)', "has 2 inputs. .* xs and zs, 'x'"),
    "too many outputs": ('d, e = Gradient <xs = ["x"], y = "h"> (x)', "has 2 outputs for 1 names in xs"),
    "a name twice": (
        'd = Gradient <xs = ["x"], zs = ["x"], y = "h"> (x, x)',
        "has a name twice in xs and zs, 'x', 'x'",
    ),
    "no y": ('d = Gradient <xs = ["x"]> (x)', "lacks an attribute: .* y a name"),
    "no xs": ('d = Gradient <y = "h"> (x)', "lacks an attribute: xs is a list of names"),
    "an x that is no list": ('d = Gradient <xs = "x", y = "h"> (x)', "lacks an attribute: xs is a list of names"),
    "an x of integers": ('d = Gradient <xs = ["i"], y = "j"> (i)', "names 'i' of type int64: only float"),
    "a y of integers": ('d = Gradient <xs = ["x"], y = "j"> (x)', "names 'j' of type int64: only float"),
    "something is missing": (
        'y = Mul (h, w) d = Gradient <xs = ["x"], y = "y"> (x)',
        "'y', which depends on 'w' too.* to zs",
    ),
    "a part is missing": ('y = Mul (h, x) d = Gradient <xs = ["h"], y = "y"> (h)', "'y', which depends on 'x' too"),
    "a counter is missing": (
        """n = Constant <value = int64 {2}> () d = Loop (n, b, x) <body = g (int64 k, bool c, double[2] p)
        => (bool q, double[2] r) { q = Identity (c) f = Cast <to = 11> (k) y = Mul (p, f)
            r = Gradient <xs = ["p"], y = "y"> (p) }>""",
        "'y', which depends on 'k' too",
    ),
    "an x too many": (
        'd, e = Gradient <xs = ["x", "w"], y = "h"> (x, w)',
        "has 'w' in xs, on which 'h' does not depend",
    ),
    "an x behind a z": (
        'd = Gradient <xs = ["x"], zs = ["h"], y = "h"> (x, h)',
        "has 'x' in xs, on which 'h' does not depend",
    ),
    "of a derivative at other values": (
        'e = Gradient <xs = ["x"], y = "h"> (w) d = Gradient <xs = ["x"], y = "e"> (x)',
        "has 'x' in xs, on which 'e' does not depend|depends on 'w' too",
    ),
    "not independent": (
        'y = Mul (h, x) d, e = Gradient <xs = ["h", "x"], y = "y"> (h, x)',
        "has 'h' in xs or zs, which is computed from 'x': the names there",
    ),
    "of an unknown rank": (
        'r = Reshape (x, i) y = Exp (r) d = Gradient <xs = ["r"], y = "y"> (r)',
        "needs the type and the rank of 'r', which are not known. Declare them in value_info",
    ),
    "in a function": ("d = l.F (x)", "names 'z', which is not a value"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_says_what_is_wrong(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body, message = ERRORS[case]
    model = parsed(
        f"h = Exp (x) j = Shape (h) {body}",
        "double[2] x, double[2] w, bool b, int64[K] i",
        "double[2] d",
        functions=function('F (a) => (c) { y = Exp (a) c = Gradient <xs = ["a"], zs = ["z"], y = "y"> (a, a) }')
        if "l.F" in body
        else "",
    )
    model.graph.node[-1].name = "named"
    with pytest.raises(ExpansionError, match=f"Node .* \\(Gradient\\) .*({message}).*((?<!\\?)\\.|\\?)$"):
        refgrad.expand_gradients(model)
    onnx.save(model, tmp_path / "model.onnx")
    assert main(["expand", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "made.onnx")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "made.onnx").exists()


def test_an_operator_without_a_derivative_is_named() -> None:
    body = 'a = Cast <to = 8> (x) y = Cast <to = 1> (a) d = Gradient <xs = ["x"], y = "y"> (x)'
    with pytest.raises(NoGradientError, match="Cast"):
        refgrad.expand_gradients(parsed(body, "float[2] x", "float[2] d"))
