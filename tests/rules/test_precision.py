"""Gradients at the ends of the range: tails, overflow, underflow, numbers that are missing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from mpmath import mp

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.errors import RefgradError

pytestmark = pytest.mark.stock

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]


def derivative(case: Case, order: int, backend: str, *cotangents: np.ndarray) -> np.ndarray:
    """The gradient by the first input, of the gradient, and so on. Cotangents of gradients that are not given are 1."""
    model, name = case.model, next(iter(case.feeds))
    outputs = None
    for _ in range(order):
        model = refgrad.gradient(model, wrt=[name], outputs=outputs)
        outputs = [model.graph.output[0].name]
    prepared = get_backend(backend).prepare(model)
    forward = get_backend("numpy").prepare(case.model).run(dict(case.feeds))
    feeds, given = dict(case.feeds), iter(cotangents)
    for value in prepared.inputs:
        if value.name not in feeds:
            first = forward.get(value.name.removesuffix("_grad"))
            feeds[value.name] = next(given, np.ones_like(feeds[name])) if first is None else np.ones_like(first)
    with np.errstate(all="ignore"):
        return prepared.run(feeds)[outputs[0]]


def exact(function: Any, x: float, order: int) -> float:
    with mp.workprec(400):
        return float(mp.diff(function, x, order))


TAILS: Mapping[str, tuple[Mapping[str, Any], Any, tuple[float, ...]]] = {
    "Elu": ({"alpha": 2.5}, lambda x: 2.5 * mp.expm1(x), (-17.0, -30.0, -80.0)),
    "Celu": ({"alpha": 0.25}, lambda x: mp.expm1(4 * x) / 4, (-5.0, -20.0)),
    "Selu": ({"alpha": 2.0, "gamma": 0.5}, mp.expm1, (-17.0, -80.0)),
    "Cosh": ({}, mp.cosh, (1e-3, -3.0, 88.0)),
    "Atan": ({}, mp.atan, (300.0, -1e4)),
}


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("operator", TAILS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tail_has_every_derivative(operator: str, order: int, backend: str) -> None:
    attributes, function, places = TAILS[operator]
    case = node_case(operator, np.array(places, np.float32), **attributes)
    got = derivative(case, order, backend)
    np.testing.assert_allclose(got, [exact(function, x, order) for x in places], rtol=2e-5, atol=1e-44)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_cosh_overflow_as_it_does(order: int, backend: str) -> None:
    got = derivative(node_case("Cosh", np.array([-800.0, 800.0], np.float32)), order, backend)
    np.testing.assert_array_equal(got, [-np.inf if order % 2 else np.inf, np.inf])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_square_that_float16_cannot_hold(backend: str) -> None:
    x = np.array([300.0, -900.0], np.float16)
    expected = (1 / (1 + x.astype(float) ** 2)).astype(np.float16)
    np.testing.assert_array_equal(derivative(node_case("Atan", x), 1, backend), expected)
    near = np.array([1 - 2.0**-11, 2.0**-11 - 1], np.float16)
    np.testing.assert_array_equal(derivative(node_case("Atanh", near), 2, "numpy"), [np.inf, -np.inf])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scaled_argument_that_overflows(backend: str) -> None:
    most = np.finfo(np.float32).max
    x = np.array([-most, most], np.float32)
    np.testing.assert_array_equal(
        derivative(node_case("QuickGelu", x, domain="com.microsoft", opset=1), 1, backend), [0, 1]
    )
    np.testing.assert_array_equal(
        derivative(node_case("SwiGLU", x, np.ones(2, np.float32), alpha=1.5, opset=28), 1, backend), [0, 1]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_flat_parts_of_hard_swish_are_flat_in_float16(backend: str) -> None:
    x = np.array([-65504.0, -4.0, -3.0, 3.0, 4.0], np.float16)
    np.testing.assert_array_equal(derivative(node_case("HardSwish", x), 1, backend), [0, 0, 0, 1, 1])


def test_the_tail_of_gelu_in_double() -> None:
    def function(x: Any) -> Any:
        return x / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3)))

    places = (-12.0, -18.0, -20.5)
    got = derivative(node_case("Gelu", np.array([*places, -1e300]), approximate="tanh"), 1, "numpy")
    np.testing.assert_allclose(got[:-1], [exact(function, x, 1) for x in places], rtol=1e-12)
    assert got[-1] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_log_of_a_large_sum(backend: str) -> None:
    x = np.array([[1e33, 2e33, 5e32]], np.float32)
    case = node_case("ReduceLogSum", x, np.array([1]), constant=["axes"], opset=18)
    np.testing.assert_allclose(derivative(case, 1, backend), np.full((1, 3), 1 / 3.5e33), rtol=3e-7)


@pytest.mark.parametrize("alpha", [0.0, -0.0])
def test_celu_divides_by_alpha(alpha: float) -> None:
    with pytest.raises(RefgradError, match=r"'node' has alpha=0.*another alpha"):
        refgrad.gradient(node_case("Celu", np.ones(2, np.float32), alpha=alpha).model)


# Products


def product(x: np.ndarray, left_out: tuple[int, ...]) -> float:
    """The product of the other elements, without overflow."""
    with mp.workprec(200):
        return float(mp.fprod(float(value) for k, value in enumerate(x) if k not in left_out))


PRODUCTS = (
    (-1e38, -1e38, 0.0),
    (1e30, 1e30, 3.0, 0.0),
    (1e30, 1e20, 1e-30),
    (1e-30, 1e-20, 1e10),
    (1e-44, 3.0),
    (2.0, -3.0, 5.0),
    (0.0, 0.0, 3.0),
    (0.0, 0.0, 0.0, 1e30),
    (0.0, 0.0, 0.0, 0.0),
)


def reduced(x: np.ndarray) -> Case:
    return node_case("ReduceProd", x)


def scattered(x: np.ndarray) -> Case:
    """All elements multiply the one of data. They are the first input here, by which the case differentiates."""
    made = node_case("ScatterElements", np.ones(1, x.dtype), np.zeros(len(x), np.int64), x, reduction="mul", opset=18)
    return Case(made.name, made.model, {"updates": x, **{k: v for k, v in made.feeds.items() if k != "updates"}})


@pytest.mark.parametrize("x", PRODUCTS, ids=str)
@pytest.mark.parametrize("of", [reduced, scattered])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_factor_has_the_product_of_the_others(x: tuple[float, ...], of: Any, backend: str, dtype: type) -> None:
    array = np.array(x, dtype)
    got = derivative(of(array), 1, backend)
    with np.errstate(over="ignore"):
        expected = np.array([product(array, (k,)) for k in range(len(x))]).astype(dtype)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("x", [x for x in PRODUCTS if all(value == 0 or 0.1 < abs(value) < 10 for value in x)], ids=str)
@pytest.mark.parametrize("of", [reduced, scattered])
def test_mixed_derivatives_of_a_product(x: tuple[float, ...], of: Any) -> None:
    """D³f[u, v, ·], which is the sum over all triples of different factors."""
    array, rng = np.array(x), np.random.default_rng(0)
    u, v = rng.standard_normal((2, len(x)))
    for order, free in ((2, 1), (3, 2)):
        got = derivative(of(array), order, "numpy", u, v)
        expected = np.zeros(len(x))
        for places in itertools.permutations(range(len(x)), free + 1):
            weights = math.prod(w[k] for w, k in zip((u, v)[:free], places[1:], strict=True))
            expected[places[0]] += weights * product(array, places)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_product_of_16_bits_is_multiplied_in_32(dtype: type) -> None:
    x = np.array([[21.78125, 10176.0, -124.8125]], dtype)
    got = derivative(node_case("ReduceProd", x, np.array([1]), constant=["axes"], opset=21), 1, "numpy")
    with np.errstate(over="ignore"):
        expected = np.array([product(x[0], (k,)) for k in range(3)]).astype(dtype)
    np.testing.assert_allclose(got[0].astype(float), expected.astype(float), rtol=float(ml_dtypes.finfo(dtype).eps))


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_a_cumulative_product_that_overflows_behind_a_zero(reverse: int, exclusive: int) -> None:
    x = np.array([2.0, 0.0, 3.0, 1e30, 1e30, 1e30], np.float32)
    case = node_case(
        "CumProd",
        x[::-1].copy() if reverse else x,
        np.array(0),
        constant=["axis"],
        exclusive=exclusive,
        reverse=reverse,
        opset=26,
    )
    got = derivative(case, 1, "numpy")
    expected = [0.0] * len(x)
    last = len(x) - exclusive
    for k in range(len(x)):
        for end in range(k + 1, last + 1):
            expected[k] += product(x[:end], (k,))
    with np.errstate(over="ignore"):
        limit = np.array(expected).astype(np.float32)
    np.testing.assert_allclose(got[::-1] if reverse else got, limit, rtol=1e-6)


# NaN


@pytest.mark.parametrize("operator", ["Max", "Min"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("then", ["Identity", "Sqrt"])  # through Sqrt a cotangent may be infinite
def test_a_nan_is_seen_whatever_type_and_operators(operator: str, dtype: type, then: str) -> None:
    a, b = np.array([np.nan, 4.0, 1.0], dtype), np.array([1.0, np.nan, 1.0], dtype)
    case = node_case(operator, a, b)
    model = case.model
    output = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node(then, [output], ["z"]))
    model.graph.output[0].name = "z"
    gradient = refgrad.gradient(model, cotangent="ones")
    for backend in BACKENDS:
        for got in get_backend(backend).prepare(gradient).run(dict(case.feeds)).values():
            assert np.isnan(got[:2]).all()
            assert got[2] == (0.5 if then == "Identity" else 0.25)
