"""The gradient of every rule's gradient, against float64 differences: by the inputs, and by the cotangents."""

from __future__ import annotations

import numpy as np
import pytest
from checking import assert_second_derivative, by_operator

from refgrad.conformance.case import SHAPES, Case, is_float, node_case
from refgrad.conformance.cases.normalization import batch, layer

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

FEW = 3  # cases of an operator, spread over its table
LARGE = 300  # elements of an input; more make the second derivative slow and prove nothing more


def small(case: Case) -> bool:
    floats = [array for array in case.feeds.values() if is_float(array)]
    return bool(floats) and all(0 < array.size <= LARGE for array in floats)


CASES = by_operator(lambda case: bool(case.dtype))


@pytest.mark.matrix
@pytest.mark.parametrize("key", sorted(CASES), ids=".".join)
def test_second_derivative_agrees_with_differences(key: tuple[str, str]) -> None:
    cases = list(filter(small, CASES[key]))
    assert cases
    for case in cases[:: max(1, len(cases) // FEW)][:FEW]:
        assert_second_derivative(case, directions=1)


NORMALIZATIONS = (
    *(batch((2, 3, 4), shapes=shapes) for shapes in SHAPES),
    *(batch((2, 3, 4), shapes=shapes, training_mode=1, outputs=3, momentum=0.7) for shapes in SHAPES),
    *(layer((2, 3, 4), 1, (3, 4), (4,), shapes=shapes, outputs=3) for shapes in SHAPES),
)


@pytest.mark.parametrize("case", NORMALIZATIONS, ids=str)
def test_through_the_statistics_too(case: Case) -> None:
    assert_second_derivative(case)


@pytest.mark.parametrize("zeros", [(0.0, 2.0, 3.0), (0.0, 0.0, 3.0)], ids=str)
def test_of_a_product_with_zeros(zeros: tuple[float, ...]) -> None:
    assert_second_derivative(node_case("ReduceProd", np.array(zeros, np.float32)))
