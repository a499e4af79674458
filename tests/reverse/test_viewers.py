"""A gradient model groups its nodes for viewers, declares types and shapes of cotangents, and names its producer."""

from __future__ import annotations

from importlib import metadata

import onnx
import onnx.parser
import pytest
from onnx import ModelProto

import refgrad

pytestmark = pytest.mark.interpreter


def _network() -> ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 4] x) => (float[N, 2] y)
    <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3, 2] v = {1, 2, 3, 4, 5, 6}>
    { a = MatMul(x, w)  b = Tanh(a)  c = Mul(b, b)  y = MatMul(c, v) }""")
    for node, name in zip(model.graph.node, ("/layers.0/MatMul", "/layers.0/Tanh", "square", "last"), strict=True):
        node.name = name
    model.graph.node[3].metadata_props.add(key="namespace", value=": Net/head: Linear/linear")
    return model


def _groups(model: ModelProto) -> dict[str, str]:
    return {
        node.name: prop.value for node in model.graph.node for prop in node.metadata_props if prop.key == "namespace"
    }


@pytest.mark.parametrize(
    "options", [{}, {"dialect": "ort"}, {"recompute": ["/layers.0/*"]}], ids=["onnx", "ort", "recompute"]
)
def test_nodes_are_in_groups_of_the_forward_and_the_backward_pass(options) -> None:
    model = _network()
    before = model.SerializeToString()
    made = refgrad.gradient(model, **options)
    assert model.SerializeToString() == before
    groups = _groups(made)
    assert groups.keys() == {node.name for node in made.graph.node}
    assert {name: groups[name] for name in ("/layers.0/MatMul", "/layers.0/Tanh", "square")} == {
        "/layers.0/MatMul": "forward/layers.0",
        "/layers.0/Tanh": "forward/layers.0",
        "square": "forward",
    }
    others = {group for name, group in groups.items() if name not in {node.name for node in model.graph.node}}
    assert others == {"backward", "backward/layers.0", "backward/: Net/head: Linear/linear"}
    onnx.checker.check_model(made, full_check="dialect" not in options)


def test_a_group_that_the_model_gives_stays_below_forward() -> None:
    made = refgrad.gradient(_network(), keep_outputs=True)
    assert _groups(made)["last"] == "forward/: Net/head: Linear/linear"
    [last] = [node for node in made.graph.node if node.name == "last"]
    assert [prop.key for prop in last.metadata_props] == ["namespace"]


def test_a_gradient_of_a_gradient_is_grouped_again() -> None:
    groups = set(_groups(refgrad.gradient(refgrad.gradient(_network(), ["x"]), ["x"])).values())
    assert {"forward/forward/layers.0", "forward/backward/layers.0", "backward/backward/layers.0"} <= groups


@pytest.mark.parametrize("dialect", ["onnx", "ort"])
def test_adjoints_are_declared_as_their_primals(dialect) -> None:
    made = refgrad.gradient(_network(), dialect=dialect)
    declared = {value.name: value.type for value in made.graph.value_info}
    for primal, size in (("a", 3), ("b", 3), ("c", 3)):
        tensor = declared[f"{primal}_grad"].tensor_type
        assert (tensor.elem_type, [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]) == (1, ["N", size])
    names = [value.name for value in (*made.graph.input, *made.graph.output, *made.graph.value_info)]
    assert len(set(names)) == len(names)


def test_an_adjoint_that_several_values_share_is_declared_once() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 3] x, float[N, 3] z) => (float[N, 3] y) { a = Exp(x)  b = Sin(z)  s = Add(a, b)  y = Tanh(s) }
    """)
    names = [value.name for value in refgrad.gradient(model).graph.value_info]
    assert sorted(names) == ["a", "b", "s", "s_grad", "y"]


def test_the_version_is_written() -> None:
    made = refgrad.gradient(_network())
    assert (made.producer_name, made.producer_version) == ("refgrad", metadata.version("refgrad"))
