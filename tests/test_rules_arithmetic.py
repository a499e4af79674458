from __future__ import annotations

import pytest
from checking import assert_gradient

from refgrad.conformance import builders
from refgrad.conformance.case import Case
from refgrad.conformance.cases.arithmetic import cases
from refgrad.registry import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    assert_gradient(case, dialect, runtime=comparable(case))


def comparable(case: Case) -> bool:
    """Not where ONNX Runtime 1.19.2, the one with builders, sums an empty tensor over no axes to one element, nor where
    each runtime draws a mask of its own."""
    empty = any(value.size == 0 for value in case.feeds.values())
    return not (empty and builders.available()) and not case.name.startswith("Dropout-True")
