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

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.normalization import batch, cases, layer, numbers
from refgrad.tables.dialects import DIALECTS


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


NORMALIZED = {
    "batch": "y, m, v = BatchNormalization<training_mode = 1>(x, s, b, s, s)",
    "instance": "y = InstanceNormalization(x, s, b)",
    "layer": "y = LayerNormalization<axis = -1>(x, s, b)",
    "groups": "y = GroupNormalization<num_groups = 2>(x, s, b)",
    "groups of float16": "y = GroupNormalization<num_groups = 2, stash_type = 10>(x, s, b)",
}


def _normalized(which: str, kind: str, shape: str) -> onnx.ModelProto:
    channels = shape.split(",")[-1 if which == "layer" else 1]
    header = f"g ({kind}[{shape}] x, {kind}[{channels}] s, {kind}[{channels}] b) => ({kind}[{shape}] y)"
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 21]> {header} {{ {NORMALIZED[which]} }}""")


@pytest.mark.parametrize("spread", [0.0, 2e-3, 1.0])
@pytest.mark.parametrize("which", NORMALIZED)
def test_float16_has_the_range_of_small_variances_and_of_large_sums(which: str, spread: float) -> None:
    """r² is 10⁵ where all elements are equal; a channel of ones has a sum of 70,000 here."""
    rng = np.random.default_rng(0)
    shape = (2, 2, 17, 4123) if which != "layer" else (2, 2, 3, 5)
    x = (rng.standard_normal(shape) * spread).astype(np.float16)
    d_y = (1 + rng.standard_normal(shape) / 8).astype(np.float16)
    of = np.ones(shape[-1 if which == "layer" else 1], np.float16)
    found = {}
    for kind, dtype in (("float16", np.float16), ("double", np.float64)):
        model = refgrad.gradient(_normalized(which, kind, ",".join(map(str, shape))), ["x"])
        feeds = {"x": x, "s": of, "b": of, "y_grad": d_y}
        given = {value.name: feeds[value.name].astype(dtype) for value in model.graph.input}
        found[kind] = get_backend("numpy").prepare(model).run(given)["x_grad"]
    size = np.abs(found["double"]).max()
    np.testing.assert_allclose(found["float16"], found["double"], rtol=2e-3, atol=4e-3 * size)


@pytest.mark.parametrize("shape", ["0,2,3", "3,2,0", "N,2,3", "3,2,S"])
@pytest.mark.parametrize("which", ["batch", "instance", "groups"])
def test_of_no_elements_every_derivative_is_0(which: str, shape: str) -> None:
    """The second ones too: their mean is NaN, and what it multiplies are sums of nothing."""
    model = refgrad.gradient(_normalized(which, "double", shape), ["x", "s", "b"])
    second = refgrad.gradient(model, ["s", "x"], ["x_grad", "s_grad"])
    x = np.ones([int(dim) if dim.isdigit() else 0 for dim in shape.split(",")])
    feeds = {"x": x, "s": np.ones(2), "b": np.ones(2), "y_grad": x, "x_grad_grad": x, "s_grad_grad": np.ones(2)}
    for made in (model, second):
        given = {value.name: feeds[value.name] for value in made.graph.input}
        for result in get_backend("numpy").prepare(made).run(given).values():
            np.testing.assert_array_equal(result, np.zeros(result.shape))
