from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx.parser
import pytest
from checking import assert_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.normalization import batch, cases, layer, numbers
from refgrad.tables.registry import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    # With nothing in them, some kernels of ONNX Runtime end the process, and its Conv leaves its result as it was.
    assert_gradient(case, dialect, runtime=all(array.size for array in case.feeds.values()))


@pytest.mark.parametrize("outputs", [1, 3])
def test_statistics_of_a_type_of_their_own(outputs: int) -> None:
    """ONNX Runtime has no mean of bfloat16."""
    case = layer((2, 3, 4), -1, (4,), (4,), outputs=outputs, stash_type=int(TensorProto.BFLOAT16))
    assert_gradient(case, runtime=False)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data(), st.sampled_from(SHAPES))
def test_layers_of_any_shape_and_type(data: st.DataObject, shapes: str) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    dtype = data.draw(st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]))
    row = shape[axis:]
    arrays = (numbers(*s).astype(dtype) for s in (shape, row, row)[: data.draw(st.integers(2, 3))])
    outputs = data.draw(st.integers(1, 3))
    case = node_case("LayerNormalization", *arrays, axis=axis, epsilon=0.1, outputs=outputs, shapes=shapes)
    assert_gradient(case, directions=1, runtime=False)


def test_groups_of_opset_18_have_a_scale_and_a_bias_each() -> None:
    """onnx deprecated that version, and its checker refuses it; ONNX Runtime runs it."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        groups (float[N, 4, S] x, float[2] s, float[2] b) => (float[N, 4, S] y)
        { y = GroupNormalization <num_groups = 2, epsilon = 0.1> (x, s, b) }
    """)
    x, s = numbers(2, 4, 3), numbers(2)
    assert_gradient(Case("groups", model, {"x": x, "s": s, "b": -s}))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("x", [(4, 3), (4, 3, 5), (2, 3, 4, 2)], ids=str)
def test_running_statistics_alone(x: tuple[int, ...], shapes: str) -> None:
    """Nothing depends on Y: its cotangent is zeros of the shape of X."""
    case = batch(x, outputs=3, training_mode=1, shapes=shapes)
    for output in case.model.graph.output[1:]:
        assert_gradient(replace(case, outputs=(output.name,)))


@pytest.mark.parametrize("opset", [16, 22])
def test_neighbours_in_bfloat16(opset: int) -> None:
    """AveragePool has no bfloat16 before opset 22."""
    case = node_case("LRN", numbers(2, 5, 3).astype(ml_dtypes.bfloat16), size=3, opset=opset)
    assert_gradient(case)
