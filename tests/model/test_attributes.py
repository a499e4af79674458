"""What onnx would read beyond its memory for is refused before onnx sees it."""

from __future__ import annotations

import onnx
import pytest
from onnx import parser

import refgrad
from refgrad.errors import InvalidModelError
from refgrad.model.checks.attributes import BOUNDS, refuse_absurd_attributes
from refgrad.worker import Worker

pytestmark = pytest.mark.interpreter

NODES = {
    "LayerNormalization": (
        "axis",
        "m (float[2, 3] x, float[3] s) => (float[2, 3] y) { y = LayerNormalization<axis=%d>(x, s) }",
    ),
    "LayerNormalization before opset 17": (
        "axis",
        "m (float[2, 3] x, float[3] s) => (float[2, 3] y) { y = com.microsoft.LayerNormalization<axis=%d>(x, s) }",
    ),
    "GatherND": (
        "batch_dims",
        "m (float[2, 3] x, int64[2, 1] i) => (float[N] y) { y = GatherND<batch_dims=%d>(x, i) }",
    ),
    "ReduceMax": ("axes", "m (float[2, 3] x) => (float[N] y) { y = ReduceMax<axes=[%d]>(x) }"),
    "Transpose": ("perm", "m (float[2, 3] x) => (float[N, M] y) { y = Transpose<perm=[0, %d]>(x) }"),
}
WINDOWS = {
    "AveragePool": (
        "kernel_shape",
        "m (float[1, 1, N] x) => (float[1, 1, M] y) { y = AveragePool<kernel_shape=[%d]>(x) }",
    ),
    "Conv": (
        "dilations",
        "m (float[1, 1, N] x, float[1, 1, K] w) => (float[1, 1, M] y) { y = Conv<dilations=[%d]>(x, w) }",
    ),
    "DepthToSpace": (
        "blocksize",
        "m (float[1, 4, 2, 2] x) => (float[a, b, c, d] y) { y = DepthToSpace<blocksize=%d>(x) }",
    ),
    "LRN": ("size", "m (float[1, 4, 2] x) => (float[1, 4, 2] y) { y = LRN<size=%d>(x) }"),
    "LpPool": ("pads", "m (float[1, 1, N] x) => (float[1, 1, M] y) { y = LpPool<kernel_shape=[2], pads=[0, %d]>(x) }"),
    "MaxPool": (
        "strides",
        "m (float[1, 1, N] x) => (float[1, 1, M] y) { y = MaxPool<kernel_shape=[2], strides=[%d]>(x) }",
    ),
}
ABSURD = (2**63 - 1, -(2**63), 2**31, -(2**31) - 1)


def _refused(text: str) -> str:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> {text}')
    with pytest.raises(InvalidModelError) as error:
        refgrad.gradient(model)
    return str(error.value)


@pytest.mark.parametrize("operator", NODES)
def test_an_axis_that_no_tensor_has_is_refused(operator):
    attribute, text = NODES[operator]
    with Worker(seconds=30) as worker:  # onnx would end the process
        for value in ABSURD:
            assert f"has {attribute} {value}, and no tensor has this axis" in worker.call(_refused, text % value)


@pytest.mark.parametrize("operator", WINDOWS)
def test_a_window_that_nothing_slides_is_refused(operator):
    attribute, text = WINDOWS[operator]
    for value in (*ABSURD, *((0, -1) if attribute != "pads" else ())):
        assert f"has {attribute} {value}, and no window is like that" in _refused(text % value)


def test_a_body_and_a_function_are_searched():
    body = """m (float[2, 3] x, bool c) => (float[2, 3] y) { y = If (c)
        <then_branch = t () => (float[2, 3] u) { u = Softmax<axis=4294967296>(x) },
         else_branch = e () => (float[2, 3] v) { v = Softmax(x) }> }"""
    assert "axis 4294967296" in _refused(body)
    function = """m (float[2, 3] x) => (float[2, 3] y) { y = d.f(x) }
        <domain: "d", opset_import: ["": 17]> f (a) => (b) { b = Softmax<axis=4294967296>(a) }"""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "d": 1]> {function}')
    with pytest.raises(InvalidModelError, match="axis 4294967296"):
        refgrad.gradient(model)


def test_every_operator_of_the_schemas_with_such_an_attribute_is_searched():
    for schema in onnx.defs.get_all_schemas_with_history():
        for name in BOUNDS.keys() & schema.attributes.keys():
            node = onnx.helper.make_node(schema.name, ["x"], ["y"], domain=schema.domain, **{name: 2**40})
            alone = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], []))
            with pytest.raises(InvalidModelError, match=f"has {name} 1099511627776"):
                refuse_absurd_attributes(alone)


@pytest.mark.parametrize("equation", ["i.", "i->i....", "i\x01", "i-", "1", "i;j", "\t", "i->i->i"])
def test_an_equation_that_keeps_onnx_busy_is_refused(equation):
    text = f'm (float[2] x) => (float[2] y) {{ y = Einsum<equation="{equation}">(x) }}'
    with Worker(seconds=30) as worker:
        assert "(Einsum) has the equation" in worker.call(_refused, text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("m (float[2, 6] x) => (float[2, 3] a) { a, b, c = Split<axis = 1, num_outputs = 2>(x) }", 3),
        (
            'm (float[2, 6] x) => (float[2, 3] a) { a = local.halves<count = 5>(x) } <domain: "local", '
            'opset_import: ["": 18]> halves<count>(x) => (a) { a, b = Split<axis = 1, num_outputs: int = @count>(x) }',
            2,
        ),
    ],
)
def test_outputs_of_split_that_are_not_as_many_as_it_says(text: str, count: int) -> None:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "local": 1]> {text}')
    with pytest.raises(InvalidModelError, match=f"the Split has {count} outputs"):
        refgrad.gradient(model)
