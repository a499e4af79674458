from __future__ import annotations

import pytest
from checking import assert_gradient

from refgrad.conformance.case import Case
from refgrad.conformance.cases.reduction import cases
from refgrad.derivatives import ortbuilder

CASES = list(cases())


def knows(case: Case) -> bool:
    """ONNX Runtime 1.19.2, the one with builders, knows no noop_with_empty_axes without axes.

    It takes it for the identity where it means log, abs or square.
    """
    return "noop=1" not in case.name or not ortbuilder.available()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    assert_gradient(case, runtime=knows(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.operator in ("ReduceMean", "ReduceL2")], ids=str)
def test_gradient_in_the_dialect_of_onnx_runtime_agrees_with_differences(case: Case) -> None:
    """The only reductions that are not the same there."""
    assert_gradient(case, "ort", runtime=knows(case))
