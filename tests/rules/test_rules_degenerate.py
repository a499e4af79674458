from __future__ import annotations

import pytest
from checking import assert_gradient

from refgrad.conformance.case import Case
from refgrad.conformance.cases.degenerate import cases


@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    # On empty tensors some kernels of ONNX Runtime end the process.
    assert_gradient(case, dialect, runtime=all(array.size for array in case.feeds.values()))
