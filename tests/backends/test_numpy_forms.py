"""Kernels that go a faster way for some inputs: right there, and the same beyond, where they go the other way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from refgrad.backends import get_backend
from refgrad.backends.numpy.kernels.linear import product

pytestmark = pytest.mark.interpreter

RNG = np.random.default_rng(0)
SIZES = (7, 40_000)  # one block and many, below and above what is selected by bits


def run(op_type: str, *inputs: np.ndarray, domain: str = "", opset: int = 20, **attributes: Any) -> np.ndarray:
    """The result of one node, through the interpreter."""
    names = [f"x{k}" for k in range(len(inputs))]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), list(x.shape))
        for name, x in zip(names, inputs, strict=True)
    ]
    node = helper.make_node(op_type, names, ["y"], domain=domain, **attributes)
    result = helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)
    graph = helper.make_graph([node], "g", values, [result])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    return np.asarray(get_backend("numpy").prepare(model).run(dict(zip(names, inputs, strict=True)))["y"])


def in_last_places(actual: np.ndarray, expected: list[float]) -> np.ndarray:
    """How many units in the last place `actual` is away from what is expected."""
    exact = np.array(expected)
    return np.abs(actual.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(actual.dtype)).astype(np.float64)


def normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def gelu_slope(x: float) -> float:
    return normal_cdf(x) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


POINTS = np.concatenate(
    [np.linspace(-13, 13, 30_001), RNG.choice([-1, 1], 3000) * 10.0 ** RNG.uniform(-38, 1, 3000), [0.0]]
).astype(np.float32)


@pytest.mark.parametrize(
    ("op_type", "exact"),
    [("Erf", math.erf), ("Gelu", lambda x: x * normal_cdf(x))],
    ids=["Erf", "Gelu"],
)
def test_what_is_fitted_is_right_to_the_last_place_of_float32(op_type: str, exact: Callable[[float], float]):
    assert in_last_places(run(op_type, POINTS), [exact(float(x)) for x in POINTS]).max() <= 0.7


def test_slope_of_gelu_is_right_to_the_last_place_of_float32():
    slope = run("GeluGrad", np.ones_like(POINTS), POINTS, domain="com.microsoft")
    error = np.abs(slope - np.array([gelu_slope(float(x)) for x in POINTS]))
    assert (error <= 0.7 * np.spacing(np.abs(slope)) + 1e-10).all()  # it has a zero


def test_special_values_of_erf_and_gelu():
    x = np.float32([math.inf, -math.inf, math.nan, 3e38, -3e38])
    np.testing.assert_array_equal(run("Erf", x), np.float32([1, -1, math.nan, 1, -1]))
    np.testing.assert_array_equal(run("Gelu", x), np.float32([math.inf, math.nan, math.nan, 3e38, 0]))
    np.testing.assert_array_equal(np.signbit(run("Erf", np.float32([0.0, -0.0, -1e-45]))), [False, True, True])


def test_erf_does_not_fall_and_does_not_pass_1():
    x = np.sort(RNG.uniform(-4.5, 4.5, 100_000).astype(np.float32))
    y = run("Erf", x)
    assert (np.diff(y) >= 0).all()
    assert np.abs(y).max() == 1


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_keeps_its_sign_in_a_constant(zero: float):
    value = numpy_helper.from_array(np.float32([zero]))
    assert np.signbit(run("ConstantOfShape", np.array([2, 3]), value=value)).all() == np.signbit(zero)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("exponent", [-3.0, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 2.5])
def test_power_of_numbers_of_either_sign(exponent: float, dtype: Any):
    x = np.concatenate([RNG.uniform(-9, 9, 5000), [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0]]).astype(dtype)
    y = run("Pow", x, np.array(exponent, dtype))
    with np.errstate(all="ignore"):
        expected = np.array([np.float64(v) ** np.float64(exponent) for v in x]).astype(dtype)
    np.testing.assert_allclose(y, expected, rtol=4 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(np.signbit(y[~np.isnan(y)]), np.signbit(expected[~np.isnan(expected)]))


FORMS = (  # of the condition and the two that are chosen from
    ((1,), (1,), ()),
    ((4, 1), (1, 5), ()),
    ((60, 1), (1, 70), (60, 70)),
    ((4200,), (), (4200,)),
)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.int64, np.uint16, np.bool_])
@pytest.mark.parametrize("shapes", FORMS)
@pytest.mark.parametrize("zero", [False, True])
def test_where_selects_the_bits(dtype: Any, shapes: tuple[tuple[int, ...], ...], zero: bool):
    of_condition, of_x, of_y = shapes
    condition = RNG.random(of_condition) < 0.5
    x, y = (RNG.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype) for shape in (of_x, of_y))
    y = np.zeros_like(y) if zero else y
    if x.dtype.kind == "f" and x.ndim:
        x.reshape(-1)[:3] = [math.nan, math.inf, -0.0][: x.size]
    actual = run("Where", condition, x, y)
    shape = np.broadcast_shapes(*shapes)
    c, a, b = (np.broadcast_to(v, shape).reshape(-1).tolist() for v in (condition, x, y))
    expected = np.array([p if q else r for q, p, r in zip(c, a, b, strict=True)], dtype).reshape(shape)
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, expected)
    if x.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def test_gradient_of_relu_is_zero_where_infinities_are_cut_off():
    x = np.tile(np.float32([-1, 0, 2]), 1000)
    d = np.tile(np.float32([math.inf, math.nan, math.inf]), 1000)
    np.testing.assert_array_equal(
        run("ReluGrad", d, x, domain="com.microsoft"), np.tile(np.float32([0, 0, math.inf]), 1000)
    )


def brute(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Σ_k A[..., i, k]·B[..., k, j] without BLAS"""
    return np.asarray((A[..., :, :, None] * B[..., None, :, :]).sum(-2))


def numbers(*shape: int) -> np.ndarray:
    return RNG.integers(-8, 9, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("A", "B"),
    [
        (numbers(2, 3, 4), numbers(4, 5)),
        (numbers(2, 3, 4), numbers(5, 4).T),
        (numbers(4, 2, 3).transpose(1, 2, 0), numbers(4, 5)),
        (numbers(2, 3, 6, 4), numbers(4, 5)[::-1]),
        (numbers(2, 3, 8)[:, :, ::2], numbers(2, 4, 5)),
        (numbers(2, 3, 4, 5).transpose(0, 3, 1, 2), numbers(2, 4, 6, 5).transpose(0, 3, 1, 2)),
        (np.broadcast_to(numbers(1, 4), (3, 4)), np.broadcast_to(numbers(4, 1), (4, 5))),
        (np.broadcast_to(numbers(1, 3, 4), (2, 3, 4)), numbers(2, 4, 5)),
        (numbers(2, 3, 0), numbers(0, 5)),
        (numbers(0, 3, 4), numbers(4, 5)),
        (numbers(2, 3, 4), numbers(4, 0)),
        (numbers(2, 16), numbers(5, 16).T),  # few rows
        (numbers(16, 2).T, numbers(5, 16).T),
        (numbers(1, 2, 16), numbers(5, 16).T),
        (numbers(2, 32)[:, ::2], numbers(5, 16).T),
    ],
    ids=lambda x: "x".join(map(str, x.shape)),
)
def test_product_of_whatever_lies_in_memory(A: np.ndarray, B: np.ndarray):
    expected = brute(A, B)
    for dtype in (np.float32, np.float64, np.int32):
        result = product(A.astype(dtype, copy=False), B.astype(dtype, copy=False))
        assert result.shape == expected.shape
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", SIZES)
def test_sigmoid_neither_overflows_nor_cancels(size: int):
    small = RNG.uniform(-80, 80, size).astype(np.float32)
    large = np.float32([math.inf, -math.inf, 0.0, -100, -88.5, 3e38])
    for x in (small, np.concatenate([small, large])):
        expected = [1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v)) for v in x.tolist()]
        np.testing.assert_allclose(run("Sigmoid", x), expected, rtol=1e-6, atol=1e-45)


@pytest.mark.parametrize("op_type", ["Sigmoid", "Softplus", "Tanh", "Erf", "Gelu"])
def test_an_element_does_not_depend_on_the_others(op_type: str):
    small = RNG.standard_normal((30, 40)).astype(np.float32)
    alone = run(op_type, small)
    with_large = np.concatenate([small, np.float32([[math.inf, -math.inf, math.nan, 1e30, -1e30, -100, 12, -12] * 5])])
    for x in (with_large, np.asfortranarray(with_large)):
        np.testing.assert_array_equal(run(op_type, x)[:30], alone)


LAYOUTS: list[tuple[str, tuple[np.ndarray, ...], dict[str, Any]]] = [
    *((op_type, (), {}) for op_type in ("Gelu", "Erf", "Sigmoid", "Softplus", "Tanh", "Relu", "Flatten", "Transpose")),
    ("Softmax", (), {"axis": 1}),
    ("LogSoftmax", (), {"axis": 0}),
    ("LayerNormalization", (np.ones(40, np.float32),), {}),
    ("Reshape", (np.array([4, 5, 6]),), {}),
    ("ReduceSum", (np.array([0]),), {}),
    ("Add", (np.arange(40, dtype=np.float32),), {}),
    ("Gemm", (np.ones((7, 40), np.float32),), {"transB": 1}),
    ("Split", (), {"num_outputs": 1}),
]


@pytest.mark.parametrize(("op_type", "others", "attributes"), LAYOUTS, ids=[row[0] for row in LAYOUTS])
def test_what_lies_by_columns_is_the_same(op_type: str, others: tuple[np.ndarray, ...], attributes: dict[str, Any]):
    x = RNG.standard_normal((3, 40)).astype(np.float32)
    by_rows, by_columns = (run(op_type, values, *others, **attributes) for values in (x, np.asfortranarray(x)))
    np.testing.assert_allclose(by_columns, by_rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij, jk -> ik", ((50, 40), (40, 60))),
        ("...ij,...kj->...ik", ((3, 2, 20, 30), (3, 2, 40, 30))),
        ("i...,i...->...", ((30, 7, 5), (30, 7, 5))),
        ("bi,oij,bj->bo", ((10, 12), (7, 12, 12), (10, 12))),
        ("ii", ((30, 30),)),
        ("ij,jk", ((0, 30), (30, 40))),
    ],
)
def test_einsum_of_few_and_many_products(equation: str, shapes: tuple[tuple[int, ...], ...]):
    inputs = [RNG.standard_normal(shape) for shape in shapes]
    expected = np.einsum(equation, *inputs)
    np.testing.assert_allclose(run("Einsum", *inputs, equation=equation), expected, rtol=1e-12, atol=1e-12)
    assert np.isnan(run("Sigmoid", np.float32([math.nan])))
