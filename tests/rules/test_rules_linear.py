from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from checking import assert_gradient, assert_second_derivative
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.linear import cases, gemm, in_double, numbers
from refgrad.tables.dialects import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    # With nothing in them, some kernels of ONNX Runtime end the process, and its Conv leaves its result as it was.
    assert_gradient(case, dialect, runtime=all(array.size for array in case.feeds.values()))


@pytest.mark.parametrize("case", list(in_double()), ids=str)
def test_products_in_double_run_on_the_training_wheel(case: Case) -> None:
    assert_gradient(case, "ort")


FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64))
quick = settings(max_examples=25, derandomize=True, deadline=None)


@quick
@given(st.data(), st.sampled_from(SHAPES), st.sampled_from(FLOATS))
def test_products_of_any_rank(data: st.DataObject, shapes: str, dtype: np.dtype) -> None:
    batch = data.draw(mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=3, max_dims=2))
    m, k, n = (data.draw(st.integers(1, 3)) for _ in range(3))
    left, right = (*batch.input_shapes[0], m, k), (*batch.input_shapes[1], k, n)
    if data.draw(st.booleans()) and not batch.input_shapes[0]:
        left = (k,)
    if data.draw(st.booleans()) and not batch.input_shapes[1]:
        right = (k,)
    arrays = (numbers(*shape).astype(dtype) for shape in (left, right))
    assert_gradient(node_case("MatMul", *arrays, shapes=shapes), runtime=False)


@quick
@given(st.sampled_from(FLOATS), st.booleans(), st.booleans(), st.sampled_from([None, (), (4,), (2, 1)]))
def test_gemm_of_any_type(dtype: np.dtype, trans_a: bool, trans_b: bool, c: tuple[int, ...] | None) -> None:
    made = gemm(trans_a, trans_b, c, "static", dtype=dtype, alpha=0.5, beta=2.0)
    assert_gradient(made, runtime=False)


@pytest.mark.parametrize("flag", [2, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("operand", ["transA", "transB"])
def test_gemm_transposes_by_any_number_but_0(operand: str, flag: int) -> None:
    """onnx does not say that the attribute is 0 or 1, and no runtime asks; square matrices would hide a wrong gradient."""
    square = np.random.default_rng(0).standard_normal((2, 3, 3))
    assert_gradient(node_case("Gemm", *square, **{operand: flag}), runtime=False)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_determinant_has_second_derivatives_at_any_rank(rank: int, shapes: str) -> None:
    x = numbers(3, 3)[:, :rank] @ (1 + numbers(rank, 3))
    assert_second_derivative(node_case("Det", x, shapes=shapes))


@pytest.mark.parametrize("equation", ["ii->i", "iji->j", "...ii->..."])
def test_a_diagonal_has_second_derivatives(equation: str) -> None:
    shape = (3, 2, 3) if equation == "iji->j" else (3, 3)
    assert_second_derivative(node_case("Einsum", numbers(*shape), equation=equation, opset=21))


def test_a_determinant_of_many_rows() -> None:
    assert_gradient(node_case("Det", np.eye(20, dtype=np.float32) + 0.1 * numbers(20, 20)), directions=1)
