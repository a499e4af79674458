from __future__ import annotations

import numpy as np
import pytest
from checking import assert_gradient

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases.loss import cases
from refgrad.tables.dialects import DIALECTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    assert_gradient(case, dialect)


def test_the_gradient_of_cross_entropy_in_float16_runs() -> None:
    """ONNX Runtime's ScatterElements adds no float16."""
    pytest.importorskip("onnxruntime")
    scores, labels = np.float16([[1, -2, 0.5], [0, 3, 1]]), np.array([2, 0])
    case = node_case("SoftmaxCrossEntropyLoss", scores, labels, opset=21)
    gradient = refgrad.gradient(case.model, cotangent="ones")
    share = np.exp(scores.astype(np.float64))
    expected = (share / share.sum(1, keepdims=True) - np.eye(3)[labels]) / 2
    for name in ("numpy", "ort-cpu"):
        [result] = get_backend(name).prepare(gradient).run(case.feeds).values()
        assert result.dtype == np.float16
        np.testing.assert_allclose(result, expected, rtol=0, atol=2e-3)
