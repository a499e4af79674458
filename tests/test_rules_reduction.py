from __future__ import annotations

import pytest
from checking import assert_gradient

from refgrad.conformance.case import Case
from refgrad.conformance.cases.reduction import cases


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    assert_gradient(case)  # no primitive: both dialects emit the same
