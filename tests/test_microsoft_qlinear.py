"""ONNX Runtime's operators of quantized tensors: their derivatives where rounding has one, and what they refuse."""

from __future__ import annotations

import pytest
from test_rules_quantization import STRAIGHT, assert_surrogate

from refgrad.conformance.case import Case
from refgrad.conformance.cases.microsoft.qlinear import cases
from refgrad.conformance.cases.microsoft.quantization import cases as quantizations

CASES = [*cases(), *(case for case in quantizations() if case.node.op_type != "FakeQuant")]


@pytest.mark.parametrize("quantization", STRAIGHT)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounding_agrees_with_differences_of_a_surrogate(case: Case, quantization: str) -> None:
    if quantization == "clipped" or case.static:
        assert_surrogate(case, quantization)
