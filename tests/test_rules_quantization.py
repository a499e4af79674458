from __future__ import annotations

import numpy as np
import pytest
from checking import assert_gradient, names_of, widened
from surrogate import Surrogate

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.cases.quantization import cases, rounded
from refgrad.conformance.differences import directional
from refgrad.registry import DIALECTS

STRAIGHT = ("straight-through", "clipped")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_scale_of_dequantize_agrees_with_differences(case: Case, dialect: str) -> None:
    # ONNX Runtime crashes where there is nothing, cannot be fed elements of half a byte, and rounds dy to output_dtype.
    small = ("int4", "uint4", "int2", "uint2")
    fits = all(array.size and array.dtype.name not in small for array in case.feeds.values())
    assert_gradient(case, dialect, runtime=fits and "output_dtype" not in case.name)


@pytest.mark.parametrize("quantization", STRAIGHT)
@pytest.mark.parametrize("case", list(rounded()), ids=str)
def test_rounding_agrees_with_differences_of_a_surrogate(case: Case, quantization: str) -> None:
    model = refgrad.gradient(case.model, wrt=case.wrt, quantization=quantization)
    prepared = get_backend("numpy").prepare(model, precision="float64")
    surrogate = Surrogate(case.model, case.feeds, quantization)
    feeds = widened(case.feeds)
    rng = np.random.default_rng(1)
    cotangents = {name: rng.standard_normal(value.shape) for name, value in surrogate(feeds).items()}
    seeds = {name: cotangents[output] for output, name in names_of(model, "cotangents").items()}
    gradients = prepared.run(feeds | seeds)
    for source, name in names_of(model, "gradients").items():
        got = gradients[name]
        assert got.shape == feeds[source].shape
        direction = rng.standard_normal(got.shape) * np.abs(feeds[source])
        expected = directional(surrogate, feeds, {source: direction}, cotangents, step=1e-4)
        size = max(float(np.linalg.norm(got)), abs(expected.value), 1e-3)
        assert expected.error <= 1e-4 * size, f"differences of {name} do not settle: {expected}"
        assert abs(np.sum(got * direction) - expected.value) <= 1e-5 * size + expected.error, name
