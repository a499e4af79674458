from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checking import assert_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.convolution import cases
from refgrad.tables.dialects import DIALECTS


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


_POOLS = [(op_type, shapes) for op_type in ("AveragePool", "LpPool", "MaxPool") for shapes in SHAPES]


@pytest.mark.parametrize(("op_type", "shapes"), [("Conv", "static"), *_POOLS])
def test_a_window_one_larger_than_the_image(op_type: str, shapes: str) -> None:
    """There is no window: the result is empty, and the gradient 0."""
    rng = np.random.default_rng(0)
    X, W = rng.standard_normal((3, 2, 3, 2)), rng.standard_normal((4, 2, 1, 3))
    case = node_case(op_type, X, *([W] if op_type == "Conv" else []), shapes=shapes, kernel_shape=[1, 3])
    assert_gradient(case, runtime=op_type != "Conv")  # ONNX Runtime refuses the Conv


@pytest.mark.parametrize("sizes", [((3, 4), (2, 2)), ((2, 3, 2), (1, 2, 2)), ((5,), (3,)), ((2, 2), (2, 2))], ids=str)
def test_col2im_of_a_rank_that_the_run_tells(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    image, block = map(np.array, sizes)
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        m (double[N,C,L] x, int64[A] image, int64[B] block) => (double[M] y) {
            images = Col2Im(x, image, block)
            row = Constant<value = int64[1] {-1}>()
            y = Reshape(images, row)
        }"""
    )
    x = np.random.default_rng(0).standard_normal((2, 3 * block.prod(), np.prod(image - block + 1)))
    feeds = {"x": x, "image": image, "block": block}
    assert_gradient(Case("Col2Im", model, feeds, wrt=("x",)), runtime=len(image) == 2)
