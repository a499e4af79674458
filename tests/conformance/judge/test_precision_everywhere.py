"""The whole scan of docs/precision.md: minutes."""

from __future__ import annotations

import pytest

from refgrad.backends import available
from refgrad.conformance.tools.precision.explanations import unexplained
from refgrad.conformance.tools.precision.functions import FUNCTIONS, ScalarFunction
from refgrad.conformance.tools.precision.scan import EXECUTORS, scan

pytestmark = [pytest.mark.stock, pytest.mark.slow]


@pytest.mark.matrix
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_every_error_has_a_reason(function: ScalarFunction) -> None:
    for measured in scan([function], executors=[name for name in EXECUTORS if name in available()]):
        assert unexplained(measured) == [], (measured.dtype, measured.executor, measured.order)
