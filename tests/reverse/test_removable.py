"""Smooth functions that exporters write by quotients: under `strong_zero` they have their true derivatives."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import refgrad
from refgrad.backends import get_backend

pytestmark = pytest.mark.stock  # in double it asks for kernels that ONNX Runtime 1.19 lacks

BACKENDS = "numpy", "ort-cpu"
TYPES = {"float": np.float32, "double": np.float64}

# As torch 2.13 exports them.
ATAN2 = (
    "({t}[N] a, {t}[N] b) => ({t}[N] y) <{t} zero = {{0}}, {t} pi = {{3.141592653589793}}> {{ q = Div(a, b) t = Atan(q) "
    "p = Greater(a, zero) u = Add(t, pi) d = Sub(t, pi) s = Where(p, u, d) n = Less(b, zero) r = Where(n, s, t) "
    "e = IsNaN(r) y = Where(e, zero, r) }}"
)
SINC = (
    "({t}[N] x) => ({t}[N] y) <{t} zero = {{0}}, {t} pi = {{3.141592653589793}}, {t} one = {{1}}> "
    "{{ u = Mul(x, pi) e = Equal(x, zero) s = Sin(u) q = Div(s, u) y = Where(e, one, q) }}"
)


def model(graph: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {graph}')


def run(made: onnx.ModelProto, feeds: dict[str, Any], backend: str) -> dict[str, np.ndarray]:
    onnx.checker.check_model(made, full_check=True)
    return get_backend(backend).prepare(made).run(feeds)


def of_atan2(a: float, b: float) -> list[float]:
    """∂a, ∂b, ∂aa, ∂ab, ∂bb of atan2(a, b), exact before they are rounded."""
    x, y = Fraction(b), Fraction(a)
    square = x * x + y * y
    exact = (
        x / square,
        -y / square,
        -2 * x * y / square**2,
        (y * y - x * x) / square**2,
        2 * x * y / square**2,
    )
    return [float(one) for one in exact]


@pytest.mark.parametrize(("kind", "backend"), [("float", "numpy"), ("double", "numpy"), ("float", "ort-cpu")])
def test_atan2(kind: str, backend: str) -> None:
    dtype, large = TYPES[kind], {"float": 1e18, "double": 1e150}[kind]
    points = [(0, 2), (0, -2), (2, 0), (-3, 0), (2, -0.0), (1, 1), (-2, 0.5), (0.25, -3), (large, large), (large, -1)]
    points += [(1 / large, 1), (1, 1 / large), (-large, 2 / large), (7, -7)]
    source = model(ATAN2.format(t=kind))
    a, b = np.array(points, dtype).T
    truth = np.array([of_atan2(float(x), float(y)) for x, y in zip(a, b, strict=True)]).T
    feeds = {"a": a, "b": b}
    ones = np.ones(len(a), dtype)
    size = 8 * np.finfo(dtype).eps
    made = refgrad.gradient(source, ["a", "b"], keep_outputs=True, strong_zero=True)
    found = run(made, {**feeds, "y_grad": ones}, backend)
    np.testing.assert_allclose(found["a_grad"], truth[0], rtol=size, atol=np.finfo(dtype).tiny)
    np.testing.assert_allclose(found["b_grad"], truth[1], rtol=size, atol=np.finfo(dtype).tiny)
    np.testing.assert_allclose(found["y"], run(source, feeds, backend)["y"], rtol=size)
    second = run(refgrad.hessian(source, ["a", "b"], strong_zero=True), feeds, backend)
    scale = np.abs(truth[2:]).max(axis=0)
    for name, exact in (("y_by_a_by_a", 2), ("y_by_a_by_b", 3), ("y_by_b_by_a", 3), ("y_by_b_by_b", 4)):
        assert np.all(np.abs(np.diagonal(second[name]) - truth[exact]) <= 8 * size * scale + np.finfo(dtype).tiny), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_atan2_of_zeros_has_no_derivative_and_its_value_is_constant(backend: str) -> None:
    """The export replaces NaN by 0: nothing of the quotient counts there."""
    source = model(ATAN2.format(t="float"))
    feeds = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32), "y_grad": np.ones(1, np.float32)}
    found = run(refgrad.gradient(source, ["a", "b"], strong_zero=True), feeds, backend)
    assert [found["a_grad"].item(), found["b_grad"].item()] == [0, 0]


def of_sinc(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The derivatives of sin(πx)/πx, which is the integral of cos(πxt) over t from 0 to 1."""
    places, weights = np.polynomial.legendre.leggauss(80)
    t, w = (places + 1) / 2, weights / 2
    u = np.pi * x[:, None].astype(float)
    return -np.pi * (w * t * np.sin(u * t)).sum(axis=1), -(np.pi**2) * (w * t * t * np.cos(u * t)).sum(axis=1)


GUARDS = {
    "as torch writes it": SINC,
    "of a multiple on the left, with the condition the other way": SINC.replace("Mul(x, pi)", "Mul(pi, x)")
    .replace("e = Equal(x, zero)", "i = Equal(zero, u) e = Not(i)")
    .replace("Where(e, one, q)", "Where(e, q, one)"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("guard", GUARDS)
def test_sinc(guard: str, kind: str, backend: str) -> None:
    dtype = TYPES[kind]
    x = np.array([0, -0.0, 1e-30, 1e-6, -1e-3, 0.05, 0.3, 1 / np.pi, -0.4, 0.9, 1, 5.5, -7.25], dtype)
    source = model(GUARDS[guard].format(t=kind))
    first, second = of_sinc(x)
    made = refgrad.gradient(source, ["x"], keep_outputs=True, strong_zero=True)
    found = run(made, {"x": x, "y_grad": np.ones(len(x), dtype)}, backend)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(found["y"], np.sinc(x), rtol=1e-5 if kind == "float" else 1e-12, atol=8 * eps)
    np.testing.assert_allclose(found["x_grad"], first, rtol=64 * eps, atol=64 * eps)
    small = np.abs(x) < 0.1
    np.testing.assert_allclose(found["x_grad"][small], first[small], rtol=64 * eps, atol=1e-40)
    [hessian] = run(refgrad.hessian(source, ["x"], strong_zero=True), {"x": x}, backend).values()
    np.testing.assert_allclose(np.diagonal(hessian), second, rtol=64 * eps, atol=256 * eps)


def test_the_value_at_the_singularity_keeps_its_derivative() -> None:
    source = model(SINC.format(t="double"))
    made = refgrad.gradient(source, ["one"], keep_outputs=True, strong_zero=True)
    feeds = {"x": np.array([0.0, 0.5]), "y_grad": np.array([3.0, 4.0])}
    found = run(made, {**feeds, "one": np.array(2.0)}, "numpy")
    assert found["one_grad"] == 3
    np.testing.assert_allclose(found["y"], [2, 2 / np.pi])


OTHERS = {
    "a quotient without a guard": "(double[N] x) => (double[N] y) { s = Sin(x) y = Div(s, x) }",
    "another value at 0": "(double[N] x) => (double[N] y) <double zero = {0}, double two = {2}> "
    "{ e = Equal(x, zero) s = Sin(x) q = Div(s, x) y = Where(e, two, q) }",
    "a guard at another place": "(double[N] x) => (double[N] y) <double zero = {1}, double one = {1}> "
    "{ e = Equal(x, zero) s = Sin(x) q = Div(s, x) y = Where(e, one, q) }",
    "a guard of something else": "(double[N] x, double[N] z) => (double[N] y) <double zero = {0}, double one = {1}> "
    "{ e = Equal(z, zero) s = Sin(x) q = Div(s, x) y = Where(e, one, q) }",
    "another numerator": "(double[N] x) => (double[N] y) <double zero = {0}, double one = {1}> "
    "{ e = Equal(x, zero) s = Tan(x) q = Div(s, x) y = Where(e, one, q) }",
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_only_looks_like_it_stays_as_it_is(what: str) -> None:
    source = model(OTHERS[what])
    made = refgrad.gradient(source, ["x"], keep_outputs=True, strong_zero=True)
    operators = [node.op_type for node in made.graph.node[: len(source.graph.node)]]
    assert operators == [node.op_type for node in source.graph.node]


def test_quotients_in_bodies_are_found() -> None:
    source = model(
        "(double[N] a, double[N] b, bool c) => (double[N] y) { y = If(c)<then_branch = l () => (double[N] t) { q = Div(a, b) "
        "t = Atan(q) }, else_branch = r () => (double[N] o) { o = Mul(a, b) }> }"
    )
    feeds = {"a": np.array([2.0]), "b": np.array([0.0]), "c": np.array(True), "y_grad": np.ones(1)}
    found = run(refgrad.gradient(source, ["a", "b"], strong_zero=True), feeds, "numpy")
    assert [found["a_grad"].item(), found["b_grad"].item()] == [0, -0.5]


def test_a_number_that_the_caller_may_feed_is_not_taken_for_zero() -> None:
    source = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (double[1] x, double zero) => (double[1] y) <double one = {1}> '
        "{ c = Equal(x, zero) s = Sin(x) q = Div(s, x) y = Where(c, one, q) }"
    )
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.0), "zero"))
    made = refgrad.gradient(source, ["x"], keep_outputs=True, strong_zero=True, cotangent="ones")
    feeds = {"x": np.array([2.0]), "zero": np.array(2.0)}
    assert get_backend("numpy").prepare(made).run(feeds)["y"] == 1.0
