from __future__ import annotations

from math import prod

import numpy as np
import onnx
import onnx.parser
import pytest
from checking import assert_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.pooling import cases
from refgrad.tables.dialects import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    # With nothing in them, some kernels of ONNX Runtime end the process, and its Conv leaves its result as it was.
    assert_gradient(case, dialect, runtime=all(array.size for array in case.feeds.values()))


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_no_kernel_of_the_pools_in_float16(op_type: str) -> None:
    """ONNX Runtime casts around it, loses the shape that the kernel reads, and the process ends."""
    case = node_case(op_type, np.ones((1, 1, 4, 4), np.float16), kernel_shape=[2, 2])
    nodes = refgrad.gradient(case.model, dialect="ort").graph.node
    assert not {"MaxPoolGrad", "AveragePoolGrad"} & {node.op_type for node in nodes}


@pytest.mark.parametrize("batch", ["N", "?", "2"])
@pytest.mark.parametrize("node", ["MaxPool<kernel_shape = [2]>", "AveragePool<kernel_shape = [2], ceil_mode = 1>"])
def test_a_batch_of_unknown_size(node: str, batch: str) -> None:
    """The kernel of MaxPoolGrad reads the other sizes off the declaration of its result."""
    text = f'<ir_version: 10, opset_import: ["" : 21]> pool (float[{batch}, 2, 5] x) => (float[?, 2, ?] y) {{ y = {node}(x) }}'
    x = np.random.default_rng(0).permutation(20).reshape(2, 2, 5).astype(np.float32)
    for dialect in DIALECTS:
        assert_gradient(Case(node, onnx.parser.parse_model(text), {"x": x}), dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_gradient_of_a_pool_in_float16_runs(dialect: str) -> None:
    """ONNX Runtime's ScatterElements adds no float16."""
    pytest.importorskip("onnxruntime")
    x = np.random.default_rng(0).permutation(16).reshape(1, 1, 4, 4).astype(np.float16)
    gradient = refgrad.gradient(
        node_case("MaxPool", x, opset=21, kernel_shape=[2, 2]).model, dialect=dialect, cotangent="ones"
    )
    results = [get_backend(name).prepare(gradient).run({"X": x})["X_grad"] for name in ("numpy", "ort-cpu")]
    np.testing.assert_array_equal(*results)
    assert results[0].sum() == 9


@pytest.mark.parametrize("shapes", ["static", "symbolic"])
def test_a_mean_over_more_elements_than_float16_can_count(shapes: str) -> None:
    x = np.ones((1, 1, 300, 300), np.float16)
    case = node_case("GlobalAveragePool", x, shapes=shapes)
    run = get_backend("numpy").prepare(refgrad.gradient(case.model)).run
    result = run({"X": x, "Y_grad": np.full((1, 1, 1, 1), 9000, np.float16)})["X_grad"]
    np.testing.assert_allclose(result, np.full_like(x, 0.1), rtol=5e-3)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data(), st.sampled_from(["AveragePool", "MaxPool", "LpPool"]), st.sampled_from(SHAPES), st.integers(1, 3))
def test_any_window(data: st.DataObject, op_type: str, shapes: str, rank: int) -> None:
    def per_axis(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    kernel, strides, dilations = per_axis(2, 3), per_axis(1, 3), per_axis(1, 2)
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    size = [extent + data.draw(st.integers(0, 4)) for extent in extents]
    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": per_axis(0, 1) * 2}
    attributes["ceil_mode"] = data.draw(st.integers(0, 1))
    if op_type == "AveragePool":
        attributes["count_include_pad"] = data.draw(st.integers(0, 1))
    x = np.random.default_rng(0).permutation(2 * prod(size)).reshape(1, 2, *size).astype(np.float32) - 3.5
    assert_gradient(node_case(op_type, x / 10, shapes=shapes, **attributes), directions=1, runtime=False)
