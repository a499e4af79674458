from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checking import assert_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.convolution import cases
from refgrad.tables.registry import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    # With nothing in them, some kernels of ONNX Runtime end the process, and its Conv leaves its result as it was.
    assert_gradient(case, dialect, runtime=all(array.size for array in case.feeds.values()))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data(), st.sampled_from(["Conv", "ConvTranspose"]), st.sampled_from(SHAPES), st.integers(1, 3))
def test_any_window(data: st.DataObject, op_type: str, shapes: str, rank: int) -> None:
    def per_axis(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    group, kernel, strides, dilations = data.draw(st.integers(1, 2)), per_axis(1, 3), per_axis(1, 3), per_axis(1, 2)
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": group}
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if op_type == "Conv":
        size = [extent + data.draw(st.integers(0, 4)) for extent in extents]
        weight = (2 * group, 2, *kernel)
        attributes["pads"] = per_axis(0, 2) + per_axis(0, 2)
    else:
        size, weight = per_axis(2, 3), (2 * group, 1, *kernel)
        below = [max(pair) - 1 for pair in zip(strides, dilations, strict=True)]
        attributes["output_padding"] = [data.draw(st.integers(0, most)) for most in below]
    dtype = data.draw(st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]))
    rng = np.random.default_rng(0)
    arrays = (rng.standard_normal(s).astype(dtype) for s in ((2, 2 * group, *size), weight))
    assert_gradient(node_case(op_type, *arrays, shapes=shapes, **attributes), directions=1, runtime=False)
