from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checking import assert_gradient, assert_second_derivative
from onnx import parser
from onnx.reference import ReferenceEvaluator

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.shape import numbers
from refgrad.conformance.cases.signal import cases
from refgrad.tables.dialects import DIALECTS

CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    for dialect in DIALECTS if "STFT" in case.name else ("onnx",):
        assert_gradient(case, dialect)


@pytest.mark.parametrize("case", [case for case in CASES if "static" in case.name], ids=str)
def test_kernel_agrees_with_the_reference(case: Case) -> None:
    [expected] = ReferenceEvaluator(case.model).run(None, dict(case.feeds))
    [result] = get_backend("numpy").prepare(case.model).run(case.feeds).values()
    assert result.dtype == expected.dtype
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("shapes", SHAPES)
def test_every_float_type(shapes: str, kind: Any) -> None:
    for op_type, inputs, options in (
        ("DFT", (numbers(2, 5, 1), None, np.array(1)), {"onesided": 1}),
        ("DFT", (numbers(2, 5, 2), np.array(6), np.array(1)), {"onesided": 1, "inverse": 1}),
        ("STFT", (numbers(1, 9, 1), np.array(2), numbers(4)), {}),
    ):
        typed = [x.astype(kind) if x is not None and x.dtype == np.float32 else x for x in inputs]
        assert_gradient(node_case(op_type, *typed, opset=21, shapes=shapes, **options), runtime=False)


def test_the_gradient_has_a_gradient() -> None:
    case = node_case("STFT", numbers(1, 9, 1), np.array(2), numbers(4), opset=20)
    assert_second_derivative(case)


def test_a_transform_of_known_lengths_needs_no_shapes_at_run_time() -> None:
    case = node_case("DFT", numbers(2, 5, 1), np.array(7), np.array(1), constant=["dft_length", "axis"], opset=20)
    operators = [node.op_type for node in refgrad.gradient(case.model).graph.node]
    assert operators == ["Mul", "DFT", "Mul", "Pad"]


def test_an_axis_of_the_run_on_onnxruntime() -> None:
    """Its inference takes Size of a shape for the product of the sizes."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        transform (float[1,4,1] x, int64 axis) => (float[1,3,2] y) { y = DFT<onesided = 1>(x, "", axis) }"""
    )
    assert_gradient(Case("DFT", model, {"x": numbers(1, 4, 1), "axis": np.array(1)}, wrt=("x",)))
