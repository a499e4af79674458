"""A size that is only declared is counted where the gradient runs: no constant of the gradient has as many elements."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from onnx import parser

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.problems.feeds import random_feeds
from refgrad.errors import RuleError
from refgrad.worker import Worker

BILLION = 10**9
ONES, MANY = ",".join(["1"] * 24), ",".join(["1"] * 198)
NODES = {
    "Attention": (
        23,
        "m (float[1,1,{n},8] x, float[1,1,{n},8] k) => (float[a,b,c,d] y) {{ y = Attention<is_causal=1>(x, k, k) }}",
    ),
    "AveragePool": (
        19,
        "m (float[1,1,{n},{n}] x) => (float[a,b,c,d] y) {{ y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(x) }}",
    ),
    "AveragePool, a window": (
        19,
        "m (float[1,1,h,w] x) => (float[a,b,c,d] y) {{ y = AveragePool<kernel_shape=[{n}], pads=[1,1]>(x) }}",
    ),
    "Col2Im": (
        18,
        "m (float[1,c,l] x) => (float[a,b,d] y) {{ i = Constant<value_ints=[{n}]>() b = Constant<value_ints=[{m}]>() "
        "y = Col2Im(x, i, b) }}",
    ),
    "Conv": (18, "m (float[1,1,{n}] x, float[1,1,{m}] w) => (float[a,b,c] y) {{ y = Conv(x, w) }}"),
    "ConvTranspose": (18, "m (float[1,1,{n}] x, float[1,1,{m}] w) => (float[a,b,c] y) {{ y = ConvTranspose(x, w) }}"),
    "Det": (22, "m (float[{n},{n}] x) => (float y) {{ y = Det(x) }}"),
    "DequantizeLinear": (
        21,
        "m (int8[{n}] x, float[{m}] s) => (float[a] y) {{ y = DequantizeLinear<axis=0, block_size=2>(x, s) }}",
    ),
    "GridSample": (
        22,
        f'm (float[{ONES},2,2] x, float[{ONES},1,24] g) => (float[{ONES},1,1] y) {{{{ y = GridSample<mode="cubic">(x, g) }}}}',
    ),
    "GridSample, many axes": (
        22,
        f"m (float[{MANY},2,2] x, float[{MANY},1,198] g) => (float[{MANY},1,1] y) "
        '{{ y = GridSample<mode="linear">(x, g) }}',
    ),
    "LpPool": (18, "m (float[1,1,h] x) => (float[a,b,c] y) {{ y = LpPool<kernel_shape=[{n}], pads=[1,1]>(x) }}"),
    "LRN": (13, "m (float[1,4,4] x) => (float[1,4,4] y) {{ y = LRN<size={n}>(x) }}"),
    "LSTM": (
        22,
        "m (float[{n},1,2] x, float[1,4,2] w, float[1,4,1] r) => (float[a,b,c,d] y) {{ y = LSTM<hidden_size=1>(x, w, r) }}",
    ),
    "MaxRoiPool": (
        13,
        "m (float[1,1,8,8] x, float[1,5] r) => (float[a,c,d,e] y) {{ y = MaxRoiPool<pooled_shape=[{n},{n}]>(x, r) }}",
    ),
    "RoiAlign": (
        16,
        "m (float[1,1,8,8] x, float[1,4] r, int64[1] b) => (float[a,c,d,e] y) "
        "{{ y = RoiAlign<output_height={n}, output_width={n}, sampling_ratio={n}>(x, r, b) }}",
    ),
    "Resize": (
        19,
        'm (float[4] x, float[1] s) => (float[{n}] y) {{ y = Resize<mode="linear">(x, , s) }}',
    ),
}


def _size(operator: str, size: int, derivative: str) -> int:
    opset, text = NODES[operator]
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text.format(n=size, m=size // 2)}')
    made = getattr(refgrad, derivative)(model)
    if derivative == "gradient":
        refgrad.lower(refgrad.gradient(model, dialect="ort", cotangent="ones"))
    return made.ByteSize()


def test_no_constant_has_as_many_elements():
    with Worker(seconds=60, room=1 << 28) as worker:
        for operator in NODES:
            for derivative in ("gradient", "jvp"):
                assert worker.call(_size, operator, BILLION, derivative) < 1 << 20, operator


# What is written out where it is small is counted by the run where it is large: both are the same derivative.

SMALL = {
    "AveragePool": "m (float[1,2,5,4] x) "
    "=> (float[a,b,c,d] y) { y = AveragePool<kernel_shape=[3,2], pads=[1,0,1,1], strides=[2,1]>(x) }",
    "Col2Im": "m (float[1,12,12] x) => (float[a,b,c,d] y) { i = Constant<value_ints=[4,5]>() b = Constant<value_ints=[2,2]>() "
    "y = Col2Im(x, i, b) }",
    "Conv": "m (float[2,4,6,5] x, float[6,2,3,2] w) => (float[a,b,c,d] y) "
    "{ y = Conv<group=2, pads=[1,0,2,1], strides=[2,1], dilations=[1,2]>(x, w) }",
    "ConvTranspose": "m (float[2,4,4,3] x, float[4,3,3,2] w) "
    "=> (float[a,b,c,d] y) { y = ConvTranspose<group=2, strides=[2,1]>(x, w) }",
    "GridSample": 'm (float[2,2,3,4,3] x, float[2,2,3,2,3] g) => (float[a,b,c,d,e] y) { y = GridSample<mode="linear">(x, g) }',
    "LpPool": "m (float[1,2,5] x) => (float[a,b,c] y) { y = LpPool<kernel_shape=[3], pads=[1,1], p=3>(x) }",
    "MaxRoiPool": "m (float[1,2,6,6] x, float[1,5] r) => (float[a,c,d,e] y) { y = MaxRoiPool<pooled_shape=[2,3]>(x, r) }",
    "Resize": 'm (float[5] x, float[1] s) => (float[7] y) { y = Resize<mode="linear">(x, , s) }',
    "RoiAlign": "m (float[1,2,8,8] x, float[1,4] r, int64[1] b) => (float[a,c,d,e] y) "
    "{ y = RoiAlign<output_height=2, output_width=3, sampling_ratio=2>(x, r, b) }",
    "RoiAlign, adaptive": "m (float[1,2,8,8] x, float[1,4] r, int64[1] b) => (float[a,c,d,e] y) "
    "{ y = RoiAlign<output_height=2, output_width=3>(x, r, b) }",
}
FED = {
    "r": np.array([[0, 1, 5, 4.5, 6]], np.float32),
    "s": np.array([1.45], np.float32),
    "b": np.zeros(1, np.int64),
}


@pytest.mark.parametrize("operator", SMALL)
def test_counting_where_it_runs_is_the_same(operator, monkeypatch):
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {SMALL[operator]}')
    written = refgrad.gradient(model)
    for module in [m for name, m in sys.modules.items() if name.startswith("refgrad.")]:
        for name in ("WRITTEN_OUT", "_MOST_UNITS", "_MOST_WINDOWS"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, 0)
    counted = refgrad.gradient(model)
    assert counted != written
    prepared = [get_backend("numpy").prepare(made) for made in (written, counted)]
    forward = get_backend("numpy").prepare(model)
    feeds = random_feeds(forward.inputs)
    for name, value in FED.items():
        if name in feeds:
            feeds[name] = value[:, -feeds[name].shape[1] :] if value.ndim > 1 else value
    shape = forward.run(feeds)["y"].shape
    feeds["y_grad"] = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected, found = (made.run(feeds) for made in prepared)
    assert any(map(np.any, expected.values()))
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_axes_that_no_tensor_has_are_refused():
    text = """m (float[1,1,1] x) => (float y) { n = Constant<value_ints=[5000]>() i = ConstantOfShape<value=int64[1]{1}>(n)
        z = Col2Im(x, i, i) y = ReduceSum<keepdims=0>(z) }"""
    with pytest.raises(RuleError, match="5000 spatial axes"):
        refgrad.gradient(parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}'))
