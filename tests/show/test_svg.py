"""Pictures: every name is there, layers fold, and large models take no time that counts."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import onnx.parser
import pytest
from listings import BRANCHES
from onnx import ModelProto, helper, numpy_helper

import refgrad
from refgrad.errors import InvalidModelError
from refgrad.show import demo
from refgrad.show.folding import Fold, folds

pytestmark = pytest.mark.interpreter

SVG = "{http://www.w3.org/2000/svg}"


def _texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def _boxes(picture: str, kind: str) -> list[str]:
    """What the boxes of a kind say, all of it."""
    groups = [one for one in ET.fromstring(picture).iter(f"{SVG}g") if one.get("class") == kind]
    return [one.findtext(f"{SVG}title", "") for one in groups]


def _layers(count: int) -> ModelProto:
    """A residual network: MatMul, Tanh, Add in each layer, then a head."""
    nodes, weights, x = [], [], "x"
    for k in range(count):
        weights.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), f"w{k}"))
        nodes += [
            helper.make_node("MatMul", [x, f"w{k}"], [f"m{k}"], f"/layers.{k}/MatMul"),
            helper.make_node("Tanh", [f"m{k}"], [f"t{k}"], f"/layers.{k}/Tanh"),
            helper.make_node("Add", [x, f"t{k}"], [f"y{k}"], f"/layers.{k}/Add"),
        ]
        x = f"y{k}"
    nodes.append(helper.make_node("Relu", [x], ["out"], "/head/Relu"))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 4])], [value("out", 1, ["N", 4])], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_forward_and_backward_are_told_apart() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float[N] y) <float[1] w = {2}> '
        "{ a = Tanh(x)  y = Mul(a, w) }"
    )
    picture = refgrad.to_svg(refgrad.gradient(model, ["x"]))
    assert _boxes(picture, "f")[1:] == ["Tanh\na float32[N]"]  # behind the legend
    assert any(text.startswith("Mul\nw float32[1]\na_grad") for text in _boxes(picture, "b"))
    assert (_boxes(picture, "i"), _boxes(picture, "s"), _boxes(picture, "r")) == (
        ["x float32[N]"],
        ["y_grad float32[N]"],
        ["x_grad float32[N]"],
    )
    assert "backward" not in _texts(refgrad.to_svg(model))


@pytest.mark.parametrize("count", [2, 3, 12])
def test_layers_that_repeat_are_drawn_once(count: int) -> None:
    model = _layers(count)
    for made in (model, refgrad.gradient(model)):
        picture = refgrad.to_svg(made)
        tanhs = [text for text in _boxes(picture, "f") if text.startswith("Tanh")]
        assert len(tanhs) == (count if count < 3 else 1)
        assert any(text.startswith(f"{count} times") for text in _texts(picture)) == (count >= 3)
    results = _boxes(picture, "r")
    assert any(text.startswith("x_grad") for text in results)
    assert sum(text.startswith("w") for text in results) == (count if count < 3 else 1)


def test_a_folded_picture_does_not_grow() -> None:
    few, many = (refgrad.to_svg(refgrad.gradient(_layers(count))) for count in (12, 400))
    assert len(many) < 1.2 * len(few)


def test_graphs_of_nodes_and_functions_follow() -> None:
    texts = _texts(refgrad.to_svg(BRANCHES))
    assert {"then_branch of If", "else_branch of If", "function local.f"} <= set(texts)
    assert "Elu" in texts


def test_only_values_from_outside_of_a_body_are_called_so() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (int64 trips, bool go, float[2] x, float[2] v) => (float[2] y) {
            y = Loop(trips, go, x) <body = b (int64 k, bool before, float[2] s) => (bool after, float[2] next)
                <float[2] c = {1, 2}> { after = Identity(before)  t = Sin(s)  u = Mul(t, v)  next = Add(u, c) }>
        }
    """)
    lines = [line for box in _boxes(refgrad.to_svg(model), "f") for line in box.splitlines()]
    assert [line for line in lines if line.endswith(" from outside")] == ["v from outside"]


@pytest.mark.parametrize("model", [demo.regression(), refgrad.gradient(demo.regression(), dialect="ort"), BRANCHES])
def test_every_arrow_lies_between_the_edges_of_the_picture(model: ModelProto) -> None:
    root = ET.fromstring(refgrad.to_svg(model))
    _, _, width, height = map(float, (root.get("viewBox") or "").split())
    for box in root.iter(f"{SVG}rect"):
        if box.get("x"):
            assert float(box.get("x", 0)) >= 0
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
            assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_no_resource_from_elsewhere_and_no_markup_of_a_name() -> None:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float x) => (float y) { y = Neg(x) }')
    name = '</svg><script>alert("1")</script>&amp;'
    model.graph.input[0].name = model.graph.node[0].input[0] = name
    picture = refgrad.to_svg(model)
    assert name[:20] in "".join(_texts(picture)) or name in "".join(_boxes(picture, "i"))
    assert not list(ET.fromstring(picture).iter(f"{SVG}script"))
    assert picture.count("http") == 1  # the namespace


def test_a_graph_that_reads_its_own_result_is_drawn() -> None:
    nodes = [helper.make_node("Neg", ["b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    assert _texts(refgrad.to_svg(helper.make_model(helper.make_graph(nodes, "g", [], [])))).count("Neg") == 2


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidModelError):
        refgrad.to_svg(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operators", "reads", "expected"),
    [
        ("abab" * 3, None, [Fold(0, 2, 6)]),
        ("xabcabcabcz", None, [Fold(1, 3, 3)]),
        ("abcd", None, []),
        ("aaaaaaaa", None, []),  # a row of one operator is no layer
        ("ababab", [(-1,), (0,), (1,), (0,), (3,), (4,)], []),  # the same operators, wired in another way
    ],
)
def test_folds(operators: str, reads: list[tuple[int, ...]] | None, expected: list[Fold]) -> None:
    chain = [(k - 1,) for k in range(len(operators))]
    assert folds(operators, chain if reads is None else reads) == expected
