"""RNN, GRU and LSTM: their gradients against float64 differences, ONNX Runtime and torch."""

from __future__ import annotations

import pytest
from checking import assert_gradient

from refgrad.conformance.case import Case
from refgrad.conformance.cases.recurrent import apart, cases
from refgrad.registry import DIALECTS


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    for dialect in DIALECTS:
        assert_gradient(case, dialect)


@pytest.mark.parametrize("case", list(apart()), ids=str)
def test_gradient_agrees_with_differences_alone(case: Case) -> None:
    for dialect in DIALECTS:
        assert_gradient(case, dialect, runtime=False)
