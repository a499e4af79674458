"""An independent autodiff agrees: torch.autograd on every operator that torch has, on every static case of the tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checking import by_operator

from refgrad.backends import get_backend
from refgrad.conformance.case import Case, is_float
from refgrad.conformance.oracles import Elementwise, get_oracle
from refgrad.conformance.problems.problem import ask
from refgrad.conformance.problems.systems.builders import build

pytest.importorskip("torch")
from refgrad.conformance.oracles.tables.torch_table import TABLE

pytestmark = pytest.mark.torch

CASES = by_operator(lambda case: case.static and all(array.size for array in case.feeds.values() if is_float(array)))


@pytest.mark.parametrize("operator", sorted(TABLE))
def test_gradient_equals_autograds(operator: str) -> None:
    judged = sum(agrees(case) for case in CASES.get(("", operator), ()))
    assert judged, f"no case of {operator} has a form that torch has"


def agrees(case: Case) -> bool:
    """Compare the gradient with torch's, in float64; False where torch has no such form."""
    problem = ask(case)
    observe = get_oracle("torch").observe
    assert observe is not None
    said = observe(problem)
    if len(said) == 1 and not isinstance(said[0], Elementwise):
        if len(problem.cotangents) == 1:
            return False
        first = next(iter(problem.cotangents))  # torch may have the first output alone
        return agrees(replace(case, outputs=(first,)))
    built = build("refgrad", problem)
    got = (
        get_backend("numpy")
        .prepare(built.model, precision="float64")
        .run(built.feeds(problem.at, problem.wide_cotangents))
    )
    for one in said:
        assert isinstance(one, Elementwise)
        ours = got[built.gradients[one.name]]
        size = max(1.0, float(np.abs(one.gradient).max(initial=0.0)))
        np.testing.assert_allclose(ours, one.gradient, rtol=0, atol=1e-9 * size, err_msg=f"{case}: {one.name}")
    return True
