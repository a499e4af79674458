from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checking import assert_gradient, assert_second_derivative
from hypothesis import given, settings
from hypothesis import strategies as st

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.indexing import cases
from refgrad.conformance.cases.shape import ints, numbers
from refgrad.tables.dialects import DIALECTS

pytestmark = pytest.mark.slow

SEARCH = settings(max_examples=30, derandomize=True, deadline=None)
KINDS = [np.float16, ml_dtypes.bfloat16, np.float64]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    assert_gradient(case, dialect)


@st.composite
def gathers(draw: st.DrawFn) -> Case:
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = draw(st.integers(-len(dims), len(dims) - 1))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    indices = _indices(draw, shape, dims[axis])
    return _drawn(draw, "Gather", numbers(*dims), indices, axis=axis)


@st.composite
def element_gathers(draw: st.DrawFn) -> Case:
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = draw(st.integers(-len(dims), len(dims) - 1))
    shape = [draw(st.integers(0, 5 if k == axis % len(dims) else n)) for k, n in enumerate(dims)]
    indices = _indices(draw, shape, dims[axis])
    if draw(st.booleans()):
        return _drawn(draw, "GatherElements", numbers(*dims), indices, axis=axis)
    reduction = draw(st.sampled_from(["add", "mul"]))
    return _drawn(draw, "ScatterElements", numbers(*dims), indices, numbers(*shape), axis=axis, reduction=reduction)


@st.composite
def tuple_gathers(draw: st.DrawFn) -> Case:
    dims = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    batch_dims = draw(st.integers(0, len(dims) - 1))
    width = draw(st.integers(1, len(dims) - batch_dims))
    shape = dims[:batch_dims] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))
    columns = [_indices(draw, shape, n) for n in dims[batch_dims : batch_dims + width]]
    return _drawn(draw, "GatherND", numbers(*dims), np.stack(columns, -1), batch_dims=batch_dims)


def _indices(draw: st.DrawFn, shape: list[int], size: int) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return rng.integers(-size, size, shape)


def _drawn(draw: st.DrawFn, op_type: str, *inputs: np.ndarray, **arguments: Any) -> Case:
    opset, shapes = draw(st.sampled_from([16, 18, 21])), draw(st.sampled_from(SHAPES))
    constant = draw(st.sampled_from([(), ("indices",)]))
    return node_case(op_type, *inputs, opset=opset, shapes=shapes, constant=constant, **arguments)


@SEARCH
@given(st.one_of(gathers(), gathers(), element_gathers(), tuple_gathers()), st.sampled_from([*DIALECTS]))
def test_any_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    assert_gradient(case, dialect)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_every_float_type(shapes: str, kind: Any) -> None:
    x, values = numbers(4, 3).astype(kind), np.array([0.5, 1.5], kind)
    for op_type, inputs, options in (
        ("Gather", (x, ints(1, -1, 1)), {"axis": 1}),
        ("Gather", (x, np.array(1)), {"constant": ["indices"]}),
        ("GatherElements", (x, ints([1, 1, -1])), {}),
        ("GatherND", (x, ints([1], [-1], [1])), {}),
        ("ScatterElements", (x, ints([1, 0, -1]), x[:1]), {}),
        ("ScatterND", (x, ints([1], [-1]), x[:2]), {}),
        ("TopK", (x, ints(2)), {"axis": 0, "outputs": 2}),
        ("Compress", (x, np.array([True, False, True])), {"axis": 0}),
        ("OneHot", (ints(1, -1), ints(3), values), {}),
    ):
        bfloat16 = kind is ml_dtypes.bfloat16
        if op_type in ("Compress", "OneHot") and bfloat16:
            continue  # they have no such type
        case = node_case(op_type, *inputs, opset=24 if bfloat16 else 21, shapes=shapes, **options)
        for dialect in DIALECTS:
            assert_gradient(case, dialect, runtime=not bfloat16)  # ONNX Runtime has no such Pad


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_operands_that_tie_share_the_gradient(reduction: str) -> None:
    x, updates = np.array([1.0, 2.0, 3.0], np.float32), np.array([2.0, 2.0, 5.0], np.float32)
    if reduction == "min":
        x, updates = -x, -updates
    case = node_case("ScatterElements", x, ints(1, 1, 0), updates, reduction=reduction, opset=18)
    gradient = get_backend("numpy").prepare(refgrad.gradient(case.model))
    result = gradient.run({**case.feeds, "output_grad": np.array([3.0, 6.0, 9.0], np.float32)})
    np.testing.assert_array_equal(result["data_grad"], [0, 2, 9])
    np.testing.assert_array_equal(result["updates_grad"], [2, 2, 3])


@pytest.mark.parametrize("op_type", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_products_of_updates_that_are_0_have_second_derivatives(op_type: str, shapes: str) -> None:
    updates, indices = np.array([0, 0, 2, 0, 3, 4, 0, 0, 0], np.float32), ints(0, 0, 0, 1, 1, 1, 2, 2, 2)
    indices = indices[:, None] if op_type == "ScatterND" else indices
    assert_second_derivative(node_case(op_type, numbers(4), indices, updates, reduction="mul", shapes=shapes, opset=18))


def test_scatters_of_tuples_are_reduced_by_number() -> None:
    """ONNX Runtime reduces a ScatterND in parallel, and loses some of what meets."""
    for reduction in ("mul", "max"):
        case = node_case("ScatterND", numbers(4), ints([0], [0]), numbers(2), reduction=reduction, opset=18)
        nodes = [node for node in refgrad.gradient(case.model).graph.node if node.name != "node"]
        assert "ScatterND" not in {node.op_type for node in nodes}


def test_many_duplicates_are_all_added() -> None:
    indices = np.random.default_rng(0).integers(0, 3, 4000)
    case = node_case("Gather", numbers(50, 64), indices, opset=21)
    for dialect in DIALECTS:
        assert_gradient(case, dialect, directions=1)
