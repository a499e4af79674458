"""Forward mode and higher derivatives: by the adjoint identity, formulas, complex steps, and torch's autograd."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from checking import by_operator, names_of
from onnx import ModelProto, numpy_helper, parser

import refgrad
from refgrad import registry
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.conformance.case import Case
from refgrad.conformance.cases import every_case
from refgrad.conformance.differences import directional
from refgrad.conformance.feeds import is_float, widened
from refgrad.errors import NoGradientError, OptionError, RefgradError, UnknownNameError

Arrays = dict[str, np.ndarray]
ROUNDED = 1e-12  # of the identity in float64, relative to the sizes of what is added up

FIRST = {key: cases[0] for key, cases in by_operator(lambda case: any(map(is_float, case.feeds.values()))).items()}


def model_of(text: str, opset: int = 21, **weights: np.ndarray) -> ModelProto:
    """A model in onnx's text format, with weights."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def run(model: ModelProto, feeds: Mapping[str, Any], backend: str = "numpy", **options: Any) -> Arrays:
    """The outputs, of a model that onnx finds valid."""
    onnx.checker.check_model(model, full_check=True)
    return get_backend(backend).prepare(model, **options).run(dict(feeds))


def noted(model: ModelProto, key: str) -> dict[str, Any]:
    """What the metadata say."""
    [text] = [entry.value for entry in model.metadata_props if entry.key == f"refgrad.{key}"]
    return dict(json.loads(text))


# J·u


def both_sides(case: Case) -> tuple[float, float, float]:
    """<v, J·u>, <Jᵀ·v, u>, and the size of what was added up for them, of random u and v, in float64."""
    rng = np.random.default_rng((0, 7))
    feeds = widened(case.feeds)
    gradient = refgrad.gradient(case.model, case.wrt, case.outputs, keep_outputs=True)
    forward = refgrad.jvp(case.model, case.wrt, case.outputs, keep_outputs=True)
    slopes, seeds = names_of(gradient, "gradients"), names_of(gradient, "cotangents")
    moves, moved = noted(forward, "directions"), noted(forward, "derivatives")
    assert list(moves) == list(slopes)
    assert list(moved) == list(seeds)
    in_double = [get_backend("numpy").prepare(model, precision="float64") for model in (case.model, gradient, forward)]
    outputs = in_double[0].run(feeds)
    v = {output: rng.standard_normal(outputs[output].shape) for output in seeds}
    backwards = in_double[1].run({**feeds, **{seeds[output]: value for output, value in v.items()}})
    u = {name: rng.standard_normal(backwards[slope].shape) for name, slope in slopes.items()}
    forwards = in_double[2].run({**feeds, **{moves[name]: value for name, value in u.items()}})
    for output in v:
        assert forwards[moved[output]].shape == v[output].shape
    left = [v[output] * forwards[moved[output]] for output in v]
    right = [u[name] * backwards[slopes[name]] for name in u]
    size = max(sum(float(np.sum(np.abs(term))) for term in terms) for terms in (left, right))
    return sum(map(np.sum, left)), sum(map(np.sum, right)), size


@pytest.mark.parametrize("key", sorted(FIRST), ids=".".join)
def test_the_adjoint_identity_of_every_operator(key: tuple[str, str]) -> None:
    left, right, size = both_sides(FIRST[key])
    assert np.isfinite(size)
    assert abs(left - right) <= ROUNDED * size


def test_the_identity_tells_a_rule_that_is_not_linear_in_its_cotangent(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = registry.RULES["", "Exp"]

    def squared(op: Any, d_output: str, output: str) -> Any:
        return op.Mul(op.Mul(d_output, d_output), output)

    monkeypatch.setitem(registry.RULES, ("", "Exp"), replace(rule, function=squared))
    left, right, size = both_sides(FIRST["", "Exp"])
    assert abs(left - right) > 0.01 * size


def test_the_identity_tells_a_wrong_transposition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of Exp has a Mul, whose rule only the second sweep needs."""
    rule = registry.RULES["", "Mul"]

    def halved(op: Any, d_C: str, A: str, B: str) -> Any:
        return op.Mul(d_C, B), op.Mul(op.Mul(d_C, A), 0.5)

    monkeypatch.setitem(registry.RULES, ("", "Mul"), replace(rule, function=halved))
    left, right, size = both_sides(FIRST["", "Exp"])  # whose gradient is dy·exp(x)
    assert abs(left - right) <= ROUNDED * size  # by dy: the first operand, which is right
    monkeypatch.setitem(registry.RULES, ("", "Mul"), replace(rule, function=lambda op, *read: halved(op, *read)[::-1]))
    left, right, size = both_sides(FIRST["", "Exp"])
    assert abs(left - right) > 0.01 * size


# By complex steps: the Jacobian of a function that NumPy computes of complex numbers

W = np.array([[0.5, -0.3, 0.8], [0.2, 0.7, -0.6]])
NETWORK = model_of(
    "net (double[N, 2] x, double[3] b) => (double[N, 3] y, double total) "
    "{ h = MatMul(x, w) s = Add(h, b) t = Tanh(s) y = Mul(t, h) e = Exp(y) total = ReduceSum <keepdims = 0> (e) }",
    w=W,
)


def network(x: np.ndarray, b: np.ndarray, w: np.ndarray) -> Arrays:
    h = x @ w
    y = np.tanh(h + b) * h
    return {"y": y, "total": np.sum(np.exp(y))}


POINT = {"x": np.array([[0.3, -0.7], [1.1, 0.4]]), "b": np.array([0.1, -0.2, 0.5])}


def by_complex_step(function: Callable[..., Arrays], at: Arrays, name: str) -> Arrays:
    """d output / d name, of the shape of both."""
    columns = []
    for place in np.ndindex(at[name].shape):
        moved = at[name].astype(np.complex128)
        moved[place] += 1e-20j
        columns.append({output: np.imag(value) / 1e-20 for output, value in function(**{**at, name: moved}).items()})
    shape = at[name].shape
    return {o: np.stack([c[o] for c in columns], axis=-1).reshape(*np.shape(columns[0][o]), *shape) for o in columns[0]}


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
def test_jacobians_by_complex_steps(backend: str) -> None:
    """By inputs and by a weight, of a scalar and of a matrix, and the whole times a vector."""
    if backend not in refgrad.backends.available():
        pytest.skip(f"{backend} is not available")
    at = {**POINT, "w": W}
    found = run(refgrad.jacobian(NETWORK), POINT, backend)
    assert list(found) == [f"{output}_by_{name}" for output in ("y", "total") for name in ("x", "b", "w")]
    rng = np.random.default_rng(0)
    u = {name: rng.standard_normal(value.shape) for name, value in at.items()}
    moved = run(refgrad.jvp(NETWORK), {**POINT, **{f"{name}_tangent": value for name, value in u.items()}}, backend)
    exact = {name: by_complex_step(network, at, name) for name in at}
    for output in ("y", "total"):
        along = sum(np.tensordot(exact[name][output], u[name], u[name].ndim) for name in at)
        np.testing.assert_allclose(moved[f"{output}_tangent"], along, rtol=1e-12, atol=1e-12)
        for name in at:
            np.testing.assert_allclose(found[f"{output}_by_{name}"], exact[name][output], rtol=1e-12, atol=1e-13)


def test_hessians_by_differences_of_the_gradient() -> None:
    """All pairs, and their product with vectors."""
    at = {**POINT, "w": W}
    gradient = get_backend("numpy").prepare(refgrad.gradient(NETWORK, outputs=["total"], cotangent="ones"))
    found = run(refgrad.hessian(NETWORK, output="total"), POINT)
    assert list(found) == [f"total_by_{one}_by_{other}" for one in at for other in at]
    rng = np.random.default_rng(0)
    u, v = ({name: rng.standard_normal(value.shape) for name, value in at.items()} for _ in range(2))
    product = run(refgrad.hvp(NETWORK, output="total"), {**POINT, **{f"{name}_vector": u[name] for name in at}})
    for one in at:
        whole = sum(np.tensordot(found[f"total_by_{one}_by_{other}"], u[other], u[other].ndim) for other in at)
        np.testing.assert_allclose(product[f"{one}_hvp"], whole, rtol=1e-12, atol=1e-12)
        expected = directional(gradient.run, at, u, {f"{one}_grad": v[one]})
        assert abs(float(np.sum(whole * v[one])) - expected.value) <= expected.error + 1e-7 * abs(expected.value)


# By formulas: derivatives of any order

X = np.array([0.3, -0.7, 1.2, 0.0])
E = np.exp(X**2)
TOWERS: dict[str, tuple[str, list[np.ndarray]]] = {
    "exp(x²)": (
        "s = Mul(x, x) y = Exp(s)",
        [2 * X * E, (2 + 4 * X**2) * E, (12 * X + 8 * X**3) * E, (12 + 48 * X**2 + 16 * X**4) * E],
    ),
    "sin(x)": ("y = Sin(x)", [np.cos(X), -np.sin(X), -np.cos(X), np.sin(X)]),
    "1/(2+x)": (
        "two = Constant <value_float = 2.0> () c = CastLike(two, x) s = Add(x, c) y = Reciprocal(s)",
        [-((2 + X) ** -2), 2 * (2 + X) ** -3.0, -6 * (2 + X) ** -4.0, 24 * (2 + X) ** -5.0],
    ),
    "x⁵": (
        "a = Mul(x, x) b = Mul(a, a) y = Mul(b, x)",
        [5 * X**4, 20 * X**3, 60 * X**2, 120 * X],
    ),
}
TOWER = "tower (double[N] x) => (double[N] y) "


@pytest.mark.parametrize("name", TOWERS)
def test_four_gradients_of_gradients(name: str) -> None:
    text, expected = TOWERS[name]
    model, target = model_of(f"{TOWER} {{ {text} }}"), "y"
    for order, wanted in enumerate(expected, 1):
        model = refgrad.gradient(model, ["x"], [target], cotangent="ones")
        target = names_of(model, "gradients")["x"]
        np.testing.assert_allclose(
            run(model, {"x": X})[target], wanted, rtol=1e-12, atol=1e-13, err_msg=f"order {order}"
        )


@pytest.mark.parametrize("name", TOWERS)
def test_four_forward_modes_of_forward_modes(name: str) -> None:
    text, expected = TOWERS[name]
    model, target, feeds = model_of(f"{TOWER} {{ {text} }}"), "y", {"x": X}
    for order, wanted in enumerate(expected, 1):
        model = refgrad.jvp(model, ["x"], [target])
        target, moves = noted(model, "derivatives")[target], noted(model, "directions")
        feeds[moves["x"]] = np.ones_like(X)
        np.testing.assert_allclose(run(model, feeds)[target], wanted, rtol=1e-12, atol=1e-13, err_msg=f"order {order}")


@pytest.mark.parametrize("name", TOWERS)
def test_mixed_orders(name: str) -> None:
    """The Hessian is diagonal; forward over the Hessian's product is the third derivative, its Jacobian's diagonal too."""
    text, expected = TOWERS[name]
    model, ones = model_of(f"{TOWER} {{ {text} }}"), np.ones_like(X)
    hessian = refgrad.hessian(model)
    np.testing.assert_allclose(run(hessian, {"x": X})["y_by_x_by_x"], np.diag(expected[1]), rtol=1e-12, atol=1e-13)
    product = refgrad.hvp(model)
    third = run(refgrad.jvp(product, ["x"]), {"x": X, "x_vector": ones, "x_tangent": ones})["x_hvp_tangent"]
    np.testing.assert_allclose(third, expected[2], rtol=1e-12, atol=1e-13)
    matrix = run(refgrad.jacobian(product, ["x"]), {"x": X, "x_vector": ones})["x_hvp_by_x"]
    np.testing.assert_allclose(matrix, np.diag(expected[2]), rtol=1e-12, atol=1e-13)
    [again] = run(refgrad.gradient(hessian, ["x"], cotangent="ones"), {"x": X}).values()
    np.testing.assert_allclose(again, expected[2], rtol=1e-12, atol=1e-13)
    [twice] = run(refgrad.jacobian(refgrad.jacobian(model)), {"x": X}).values()
    assert twice.shape == (4, 4, 4)
    np.testing.assert_allclose(np.einsum("iii->i", twice), expected[1], rtol=1e-12, atol=1e-13)
    assert np.count_nonzero(twice) <= 4
