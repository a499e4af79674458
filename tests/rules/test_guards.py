"""Second derivatives at points where a formula replaces a number, such as a denominator of 0: what exists has to be right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import available, get_backend

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "ai.onnx.ml" : 5]> '
BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def run(model: onnx.ModelProto, backend: str = "numpy", **feeds: Any) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        return get_backend(backend).prepare(model).run({name: np.asarray(x) for name, x in feeds.items()})


def hessian(text: str, **feeds: Any) -> dict[str, np.ndarray]:
    return run(refgrad.hessian(parsed(text), list(feeds)), **feeds)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("x", "y"), [(23.0, 0.0), (2.0, 1.0), (0.5, 2.0), (1e-30, 0.0), (1.0, 0.0)])
def test_the_mixed_derivative_of_a_power(x: float, y: float, backend: str) -> None:
    """∂²(x^y)/∂x∂y = x^(y−1)·(1 + y·log x), smooth for x > 0."""
    model = refgrad.hessian(parsed("p (double x, double y) => (double z) { z = Pow(x, y) }"))
    got = run(model, backend, x=x, y=y)
    mixed = x ** (y - 1) * (1 + y * math.log(x))
    np.testing.assert_allclose([got["z_by_x_by_y"], got["z_by_y_by_x"]], mixed, rtol=1e-12)
    np.testing.assert_allclose(got["z_by_x_by_x"], y * (y - 1) * x ** (y - 2), rtol=1e-12)


def test_third_derivatives_of_a_power() -> None:
    """∂³(x^y)/∂x²∂y = x^(y−2)·(2·y − 1 + y·(y − 1)·log x)"""
    third = refgrad.jacobian(refgrad.hessian(parsed("p (double x, double y) => (double z) { z = Pow(x, y) }")))
    for x, y in ((2.0, 0.0), (3.0, 1.0), (0.5, 2.0)):
        got = run(third, x=x, y=y)
        expected = x ** (y - 2) * (2 * y - 1 + y * (y - 1) * math.log(x))
        for order in ("x_by_x_by_y", "x_by_y_by_x", "y_by_x_by_x"):
            np.testing.assert_allclose(got[f"z_by_{order}"], expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["float16", "float", "double"])
def test_a_power_of_zero_of_a_base_whose_reciprocal_overflows(kind: str) -> None:
    dtype = {"float16": np.float16, "float": np.float32, "double": np.float64}[kind]
    model = refgrad.gradient(parsed(f"p ({kind}[3] x, {kind}[3] y) => ({kind}[3] z) {{ z = Pow(x, y) }}"), ["x"])
    tiny = np.finfo(dtype).smallest_subnormal
    x, zeros = np.array([tiny, -tiny, 0], dtype), np.zeros(3, dtype)
    np.testing.assert_array_equal(run(model, x=x, y=zeros, z_grad=zeros + 1)["x_grad"], zeros)


# Squares of norms, and other smooth functions of them, with their Hessians at 0
SMOOTH = {
    "ReduceL2": ("(double[3] x)", "l = ReduceL2<keepdims=0>(x) y = Mul(l, l)", 2.0),
    "a power of ReduceL2": ("(double[3] x)", "l = ReduceL2<keepdims=0>(x) y = Pow(l, two)", 2.0),
    "of symbolic size": ("(double[N] x)", "l = ReduceL2<keepdims=0>(x) y = Mul(l, l)", 2.0),
    "with its axis": (
        "(double[3] x)",
        "l = ReduceL2<keepdims=1>(x, axis) s = Squeeze(l, axis) m = Mul(s, s) y = Identity(m)",
        2.0,
    ),
    "in another shape": (
        "(double[3] x)",
        "u = Unsqueeze(x, last) l = ReduceL2<keepdims=0>(u, last) r = Reshape(l, column) m = Mul(r, r) "
        "y = ReduceSum<keepdims=0>(m)",
        2.0,
    ),
    "a bell": ("(double[3] x)", "l = ReduceL2<keepdims=0>(x) m = Mul(l, l) n = Neg(m) y = Exp(n)", -2.0),
    "a sum": ("(double[3] x)", "l = ReduceL2<keepdims=0>(x) m = Mul(l, l) n = Pow(m, two) y = Add(m, n)", 2.0),
    "a root": ("(double[3] x)", "s = ReduceSumSquare<keepdims=0>(x) l = Sqrt(s) y = Mul(l, l)", 2.0),
    "a root in two nodes": (
        "(double[3] x)",
        "s = ReduceSumSquare<keepdims=0>(x) l = Sqrt(s) m = Sqrt(s) y = Mul(l, m)",
        2.0,
    ),
    "a power of ½": ("(double[3] x)", "s = ReduceSumSquare<keepdims=0>(x) l = Pow(s, half) y = Pow(l, two)", 2.0),
    "LpPool": (
        "(double[3] x)",
        "i = Unsqueeze(x, two_axes) l = LpPool<kernel_shape=[3]>(i) m = Mul(l, l) y = Squeeze(m)",
        2.0,
    ),
    "GlobalLpPool": (
        "(double[3] x)",
        "i = Unsqueeze(x, two_axes) l = GlobalLpPool(i) m = Mul(l, l) y = Squeeze(m)",
        2.0,
    ),
    "Abs": ("(double[3] x)", "a = Abs(x) m = Mul(a, a) y = ReduceSum<keepdims=0>(m)", 2.0),
    "a fourth power of Abs": ("(double[3] x)", "a = Abs(x) m = Pow(a, four) y = ReduceSum<keepdims=0>(m)", 0.0),
    "LpPool, p = 4": (
        "(double[3] x)",
        "i = Unsqueeze(x, two_axes) l = LpPool<kernel_shape=[3], p=4>(i) m = Pow(l, four) y = Squeeze(m)",
        0.0,
    ),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_of_a_norm_at_zero(name: str) -> None:
    inputs, nodes, curvature = SMOOTH[name]
    constants = (
        "<double half = {0.5}, double two = {2}, double four = {4}, int64[1] axis = {0}, int64[1] last = {1}, "
        "int64[2] two_axes = {0, 1}, int64[2] column = {3, 1}>"
    )
    model = parsed(f"n {inputs} => (double y) {constants} {{ {nodes} }}")
    for strong_zero in (False, True):
        got = run(refgrad.hessian(model, ["x"], strong_zero=strong_zero), x=np.zeros(3))
        np.testing.assert_allclose(got["y_by_x_by_x"], curvature * np.eye(3), atol=1e-14)


def test_one_row_of_zeros() -> None:
    text = """n (double[2, 2] x) => (double y) <int64[1] axis = {1}> {
        l = ReduceL2(x, axis) m = Mul(l, l) y = ReduceSum<keepdims=0>(m)
    }"""
    got = hessian(text, x=[[0.0, 0.0], [3.0, 4.0]])["y_by_x_by_x"]
    np.testing.assert_allclose(got.reshape(4, 4), 2 * np.eye(4), atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_square_of_a_distance(backend: str) -> None:
    text = """d (float[1, 2] a, float[1, 2] b) => (float y) {
        c = com.microsoft.CDist<metric="euclidean">(a, b) s = Mul(c, c) y = ReduceSum<keepdims=0>(s)
    }"""
    ones = np.ones((1, 2), np.float32)
    got = run(refgrad.hessian(parsed(text)), backend, a=ones, b=ones)
    np.testing.assert_allclose(got["y_by_a_by_a"].reshape(2, 2), 2 * np.eye(2))
    np.testing.assert_allclose(got["y_by_a_by_b"].reshape(2, 2), -2 * np.eye(2))


NORMS = (
    "l = ReduceL2<keepdims=0>(x) y = Identity(l)",
    "i = Unsqueeze(x, axes) l = LpPool<kernel_shape=[3]>(i) y = Squeeze(l)",
    "i = Unsqueeze(x, axes) l = GlobalLpPool<p=3>(i) y = Squeeze(l)",
    "l = ReduceL2<keepdims=0>(x) y = Cosh(l)",
)


@pytest.mark.parametrize("nodes", NORMS)
def test_no_finite_number_where_a_norm_has_no_second_derivative(nodes: str) -> None:
    text = f"n (double[3] x) => (double y) <int64[2] axes = {{0, 1}}> {{ {nodes} }}"
    first = run(refgrad.gradient(parsed(text)), x=np.zeros(3), y_grad=1.0)["x_grad"]
    np.testing.assert_array_equal(first, 0.0)  # the least subgradient
    assert not np.isfinite(hessian(text, x=np.zeros(3))["y_by_x_by_x"]).any()
    tangents = run(refgrad.jvp(parsed(text), ["x"]), x=np.zeros(3), x_tangent=np.ones(3))
    np.testing.assert_array_equal(tangents["y_tangent"], 0.0)


# Gradients as other builders write them: a product whose other factor is 0 where a guard stands
GUARDED_POWER = """
p (double b, double e) => (double d) <double zero = {0}, double one = {1}> {
    c = Equal(e, zero) w = Where(c, one, e) s = Sub(w, one) p = Pow(b, s) d = Mul(p, e)
}"""
GUARDED_NORM = """
n (float[2] x) => (float[2] d) <float zero = {0}, float one = {1}, float two = {2}> {
    l = ReduceL2<keepdims=0>(x) c = Equal(l, zero) w = Where(c, one, l) m = Mul(l, two) q = Div(m, w) d = Mul(x, q)
}"""
SELECTED_NORM = """
n (float[2, 2] x) => (float[2, 2] d) <float zero = {0}, float two = {2}, int64[1] axis = {1}> {
    l = ReduceL2<keepdims=0>(x, axis) c = Equal(l, zero) m = Mul(two, l) r = Div(m, l) q = Where(c, zero, r)
    u = Unsqueeze(q, axis) d = Mul(u, x)
}"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_guarded_power_of_a_model(backend: str) -> None:
    power = parsed(GUARDED_POWER)
    first = refgrad.jacobian(power, ["b", "e"], keep_outputs=True)
    got = run(first, backend, b=2.0, e=0.0)
    np.testing.assert_allclose(got["d_by_e"], 0.5)
    second = run(refgrad.jacobian(first, ["b", "e"], ["d_by_b", "d_by_e"]), backend, b=2.0, e=0.0)
    np.testing.assert_allclose(second["d_by_e_by_e"], 2 * math.log(2) / 2, rtol=1e-12)
    np.testing.assert_allclose([second["d_by_e_by_b"], second["d_by_b_by_e"]], -0.25, rtol=1e-12)
    for b in (0.0, np.finfo(float).smallest_subnormal):  # where the guard is needed
        assert run(first, backend, b=b, e=0.0)["d"] == 0 == run(power, backend, b=b, e=0.0)["d"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_guarded_norms_of_a_model(backend: str) -> None:
    norm = refgrad.jacobian(parsed(GUARDED_NORM), ["x"])
    np.testing.assert_array_equal(run(norm, backend, x=np.zeros(2, np.float32))["d_by_x"], 2 * np.eye(2))
    rows = run(refgrad.jacobian(parsed(SELECTED_NORM), ["x"]), backend, x=np.array([[0, 0], [3, 4]], np.float32))
    np.testing.assert_allclose(rows["d_by_x"].reshape(4, 4), 2 * np.eye(4), rtol=1e-6, atol=1e-6)


# Norms that do not face what they multiply, and limits that are not finite: the values stay
OTHERS = {
    "the norms of rows beside columns": """
        g (double[2, 2] x, double[2] a) => (double[2, 2] y) <double zero = {0}, double one = {1}, int64[1] ax = {1}> {
            l = ReduceL2<keepdims=0>(x, ax) c = Equal(l, zero) s = Where(c, one, l) p = Mul(l, a) q = Div(p, s)
            y = Mul(q, x)
        }""",
    "rows put in at another axis": """
        g (double[2, 2] x, double[2] a) => (double[2, 2] y)
        <double zero = {0}, double one = {1}, int64[1] ax = {1}, int64[1] put = {0}> {
            l = ReduceL2<keepdims=0>(x, ax) c = Equal(l, zero) s = Where(c, one, l) p = Mul(l, a) q = Div(p, s)
            u = Unsqueeze(q, put) y = Mul(u, x)
        }""",
    "a limit that is infinite": """
        g (double[2, 2] x, double[2] a) => (double[2, 2] y) <double zero = {0}> {
            l = ReduceL2<keepdims=0>(x) r = Reciprocal(l) p = Mul(l, r) c = Equal(l, zero) d = Div(p, l)
            q = Where(c, zero, d) z = Mul(q, x) y = Mul(z, a)
        }""",
    "a zero of another shape": """
        g (double[2, 2] x, double[2] a) => (double[2, 2] y) <double[1] zero = {0}, double one = {1}> {
            l = ReduceL2<keepdims=0>(x) c = Equal(l, zero) s = Where(c, one, l) m = Mul(l, a) q = Div(m, s) y = Mul(q, x)
        }""",
}


@pytest.mark.parametrize("text", [GUARDED_NORM, SELECTED_NORM.replace("float[2, 2]", "float[1, 2]")])
@pytest.mark.parametrize("x", [(math.inf, 1.0), (1e25, 0.0), (1e-30, 0.0), (math.nan, 0.0), (-0.0, 0.0)])
def test_the_values_of_a_guarded_norm_stay(text: str, x: tuple[float, float]) -> None:
    model = parsed(text)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    at = np.array(x, np.float32).reshape(shape)
    made = refgrad.gradient(model, ["x"], keep_outputs=True, cotangent="ones")
    np.testing.assert_array_equal(run(made, x=at)["d"], run(model, x=at)["d"])


@pytest.mark.parametrize("b", [math.nan, math.inf, -math.inf, 0.0, 1e-320, -2.0])
def test_the_values_of_a_guarded_power_stay(b: float) -> None:
    model = parsed(GUARDED_POWER)
    other = parsed(GUARDED_POWER.replace("double one = {1}", "double one = {2}"))
    for text in (model, other):
        made = refgrad.gradient(text, ["b"], keep_outputs=True, cotangent="ones")
        for e in (0.0, 1.0, 3.0):
            np.testing.assert_array_equal(run(made, b=b, e=e)["d"], run(text, b=b, e=e)["d"])


@pytest.mark.parametrize("nodes", ["q = Mul(n, x) r = Mul(q, n)", "s = Pow(n, two) t = Pow(s, two) r = Identity(t)"])
def test_strong_zero_keeps_a_second_derivative(nodes: str) -> None:
    """(√x)²·x and (√x)⁴ are x²: the guards of the first gradient do not hide the factor from the second one."""
    model = parsed(
        f"g (double[2] x) => (double y) <double two = {{2}}> {{ n = Sqrt(x) {nodes} y = ReduceSum<keepdims=0>(r) }}"
    )
    for strong_zero in (False, True):
        got = run(refgrad.hessian(model, ["x"], strong_zero=strong_zero), x=[0.0, 4.0])["y_by_x_by_x"]
        np.testing.assert_allclose(got, 2 * np.eye(2), atol=1e-14)


def test_the_square_of_a_root_is_no_square() -> None:
    model = parsed("g (double[1] x) => (double[1] y) { r = Sqrt(x) s = Mul(r, r) y = Sqrt(s) }")
    got = run(refgrad.gradient(model, cotangent="ones", strong_zero=True), x=[0.0])["x_grad"]
    assert not np.isfinite(got).any()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("x", [((0.0, 0.0), (3.0, 4.0)), ((0.0, 0.0), (0.0, 0.0))])
def test_the_values_of_the_model_stay(name: str, x: Any) -> None:
    model, feeds = parsed(OTHERS[name]), {"x": np.array(x), "a": np.array([5.0, 7.0])}
    made = refgrad.gradient(model, ["x", "a"], keep_outputs=True, cotangent="ones")
    np.testing.assert_array_equal(run(made, **feeds)["y"], run(model, **feeds)["y"])


def test_other_guards_stay() -> None:
    """The norm of another value, and a numerator without the factor: the model is differentiated as it stands."""
    other = GUARDED_NORM.replace("d = Mul(x, q)", "h = Add(x, one) d = Mul(h, q)")
    wrong = GUARDED_NORM.replace("m = Mul(l, two)", "m = Add(l, two)")
    for text in (other, wrong):
        written = [node.op_type for node in parsed(text).graph.node]
        made = [node.op_type for node in refgrad.gradient(parsed(text), ["x"], keep_outputs=True).graph.node]
        assert made[: len(written) - 1] == written[:-1]


def test_a_product_that_faces_another_norm_stays() -> None:
    """In row i and column j, q is the norm of row j by that of row i."""
    text = """g (double[2, 2] x, double[2, 1] a) => (double[2, 2] y) <double zero = {0}, double one = {1}, int64[1] ax = {1}> {
        l = ReduceL2(x, ax) c = Equal(l, zero) w = Where(c, one, l) m = Mul(l, a) s = Squeeze(m, ax) q = Div(s, w)
        y = Mul(q, x)
    }"""
    feeds = {"x": np.array([[0.0, 0.0], [3.0, 4.0]]), "a": np.array([[5.0], [7.0]])}
    got = run(refgrad.jacobian(parsed(text), ["x"]), **feeds)["y_by_x"]
    np.testing.assert_allclose(np.einsum("ijij->ij", got)[0], [0, 35])


def test_shrink_that_changes_nothing() -> None:
    model = parsed("s (double[2] x) => (double[2] y) { y = Shrink<lambd=0.0, bias=0.0>(x) }")
    np.testing.assert_array_equal(run(refgrad.gradient(model), x=np.zeros(2), y_grad=np.ones(2))["x_grad"], 1.0)
