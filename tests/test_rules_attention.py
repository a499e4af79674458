from __future__ import annotations

import pytest
from checking import assert_gradient

from refgrad.conformance.case import Case
from refgrad.conformance.cases.attention import cases
from refgrad.registry import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    # ONNX Runtime takes the scores of inputs of unknown rank for a scalar.
    scores = len(case.node.output) == 4 and case.node.op_type == "Attention" and "unknown" in str(case)
    runtime = not scores and all(array.size for array in case.feeds.values())
    assert_gradient(case, dialect, directions=1, runtime=runtime)
