"""Pictures: against what the source documents show, against `dot`, and on models that are hard to draw."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree
from itertools import pairwise

import numpy as np
import onnx
import onnx.parser
import pytest
from listings import BRANCHES, assert_dot, initialized, needs_dot, nodes_of, parse
from onnx import ModelProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad.show import demo

# The picture of `Y = X + Ad_Addcst` with its gradient and its output, from the documentation of onnx_derivative.
DOT = r"""digraph{
  orientation=portrait;
  size=7;
  nodesep=0.05;
  ranksep=0.25;

  X [shape=box color=red label="X\nTensorProto.FLOAT\nshape=['', 10]" fontsize=10];
  Ad_Addcst [shape=box color=red label="Ad_Addcst\nTensorProto.FLOAT\nshape=[1]" fontsize=10];
  Y_grad [shape=box color=red label="Y_grad\nTensorProto.FLOAT\nshape=['', 10]" fontsize=10];

  X_grad [shape=box color=green label="X_grad\nTensorProto.FLOAT\nshape=['', 10]" fontsize=10];
  Ad_Addcst_grad [shape=box color=green label="Ad_Addcst_grad\nTensorProto.FLOAT\nshape=[1]" fontsize=10];
  Y [shape=box color=green label="Y\nTensorProto.FLOAT\nshape=['', 10]" fontsize=10];


  Ad_Add [shape=box style="filled,rounded" color=orange label="Add" fontsize=10];
  X -> Ad_Add;
  Ad_Addcst -> Ad_Add;
  Ad_Add -> Y;

  Ad_Add_Grad_Shape_Ad_Addcst [shape=box label="Ad_Add_Grad_Shape_Ad_Addcst" fontsize=10];
  Ad_Add_Grad_Shape_Ad_Addcst_rhs [shape=box style="filled,rounded" color=orange label="Shape" fontsize=10];
  Ad_Addcst -> Ad_Add_Grad_Shape_Ad_Addcst_rhs;
  Ad_Add_Grad_Shape_Ad_Addcst_rhs -> Ad_Add_Grad_Shape_Ad_Addcst;

  Ad_Add_Grad_Shape_X [shape=box label="Ad_Add_Grad_Shape_X" fontsize=10];
  Ad_Add_Grad_Shape_X_lhs [shape=box style="filled,rounded" color=orange label="Shape" fontsize=10];
  X -> Ad_Add_Grad_Shape_X_lhs;
  Ad_Add_Grad_Shape_X_lhs -> Ad_Add_Grad_Shape_X;

  Ad_Add_Grad_ReduceAxes_X [shape=box label="Ad_Add_Grad_ReduceAxes_X" fontsize=10];
  Ad_Add_Grad_ReduceAxes_Ad_Addcst [shape=box label="Ad_Add_Grad_ReduceAxes_Ad_Addcst" fontsize=10];
  Ad_Add_Grad_BroadcastGradientArgs_2 [shape=box style="filled,rounded" color=orange label="BroadcastGradientArgs" fontsize=10];
  Ad_Add_Grad_Shape_X -> Ad_Add_Grad_BroadcastGradientArgs_2;
  Ad_Add_Grad_Shape_Ad_Addcst -> Ad_Add_Grad_BroadcastGradientArgs_2;
  Ad_Add_Grad_BroadcastGradientArgs_2 -> Ad_Add_Grad_ReduceAxes_X;
  Ad_Add_Grad_BroadcastGradientArgs_2 -> Ad_Add_Grad_ReduceAxes_Ad_Addcst;

  Ad_Add_Grad_ReduceSum_Y_grad_for_Ad_Addcst [shape=box label="Ad_Add_Grad_ReduceSum_Y_grad_for_Ad_Addcst" fontsize=10];
  Ad_Add_Grad_ReduceSum_5 [shape=box style="filled,rounded" color=orange label="ReduceSum\nkeepdims=1\nnoop_with_empty_axes=1" fontsize=10];
  Y_grad -> Ad_Add_Grad_ReduceSum_5;
  Ad_Add_Grad_ReduceAxes_Ad_Addcst -> Ad_Add_Grad_ReduceSum_5;
  Ad_Add_Grad_ReduceSum_5 -> Ad_Add_Grad_ReduceSum_Y_grad_for_Ad_Addcst;

  Ad_Add_Grad_Reshape_6 [shape=box style="filled,rounded" color=orange label="Reshape\nallowzero=0" fontsize=10];
  Ad_Add_Grad_ReduceSum_Y_grad_for_Ad_Addcst -> Ad_Add_Grad_Reshape_6;
  Ad_Add_Grad_Shape_Ad_Addcst -> Ad_Add_Grad_Reshape_6;
  Ad_Add_Grad_Reshape_6 -> Ad_Addcst_grad;

  Ad_Add_Grad_ReduceSum_Y_grad_for_X [shape=box label="Ad_Add_Grad_ReduceSum_Y_grad_for_X" fontsize=10];
  Ad_Add_Grad_ReduceSum_3 [shape=box style="filled,rounded" color=orange label="ReduceSum\nkeepdims=1\nnoop_with_empty_axes=1" fontsize=10];
  Y_grad -> Ad_Add_Grad_ReduceSum_3;
  Ad_Add_Grad_ReduceAxes_X -> Ad_Add_Grad_ReduceSum_3;
  Ad_Add_Grad_ReduceSum_3 -> Ad_Add_Grad_ReduceSum_Y_grad_for_X;

  Ad_Add_Grad_Reshape_4 [shape=box style="filled,rounded" color=orange label="Reshape\nallowzero=0" fontsize=10];
  Ad_Add_Grad_ReduceSum_Y_grad_for_X -> Ad_Add_Grad_Reshape_4;
  Ad_Add_Grad_Shape_X -> Ad_Add_Grad_Reshape_4;
  Ad_Add_Grad_Reshape_4 -> X_grad;
}"""  # noqa: E501


def _linear() -> ModelProto:
    """The model of the picture above, as the documents' onnx_derivative made it."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 14, "com.microsoft": 1]>
        g (float[?, 10] X, float[1] Ad_Addcst, float[?, 10] Y_grad)
            => (float[?, 10] X_grad, float[1] Ad_Addcst_grad, float[?, 10] Y)
        {
            Y = Add(X, Ad_Addcst)
            Ad_Add_Grad_Shape_Ad_Addcst = Shape(Ad_Addcst)
            Ad_Add_Grad_Shape_X = Shape(X)
            Ad_Add_Grad_ReduceAxes_X, Ad_Add_Grad_ReduceAxes_Ad_Addcst =
                com.microsoft.BroadcastGradientArgs(Ad_Add_Grad_Shape_X, Ad_Add_Grad_Shape_Ad_Addcst)
            Ad_Add_Grad_ReduceSum_Y_grad_for_Ad_Addcst = ReduceSum
                <keepdims = 1, noop_with_empty_axes = 1>(Y_grad, Ad_Add_Grad_ReduceAxes_Ad_Addcst)
            Ad_Addcst_grad = Reshape<allowzero = 0>(Ad_Add_Grad_ReduceSum_Y_grad_for_Ad_Addcst, Ad_Add_Grad_Shape_Ad_Addcst)
            Ad_Add_Grad_ReduceSum_Y_grad_for_X = ReduceSum
                <keepdims = 1, noop_with_empty_axes = 1>(Y_grad, Ad_Add_Grad_ReduceAxes_X)
            X_grad = Reshape<allowzero = 0>(Ad_Add_Grad_ReduceSum_Y_grad_for_X, Ad_Add_Grad_Shape_X)
        }""")
    grad = "Ad_Add_Grad_"
    names = ["Ad_Add", f"{grad}Shape_Ad_Addcst_rhs", f"{grad}Shape_X_lhs", f"{grad}BroadcastGradientArgs_2"]
    names += [f"{grad}ReduceSum_5", f"{grad}Reshape_6", f"{grad}ReduceSum_3", f"{grad}Reshape_4"]
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    return model


def test_the_picture_is_the_one_of_the_documents():
    assert refgrad.to_dot(_linear()) == DOT


NAMES = [
    "a/b",
    "a_b",
    "node",
    "Graph",
    "1",
    "x y",
    'say "x"',
    "back\\",
    "\\n",
    "a -> b",
    "<b>",
    "&amp;",
    "é",
    ";}",
    "a:b",
    "Neg",
]


def _chain(names: list[str]) -> ModelProto:
    nodes = [helper.make_node("Neg", [a], [b]) for a, b in pairwise(names)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in (names[0], names[-1])]
    return helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]))


def test_any_name_is_an_identifier_of_its_own():
    picture = refgrad.to_dot(_chain(NAMES))
    boxes = assert_dot(picture)
    assert len(boxes) == 2 * len(NAMES) - 1
    assert '"node" [' in picture
    assert "a_b [" in picture
    assert '"a/b" [' in picture


def test_a_line_break_in_a_name_breaks_no_line():
    model = _chain(["x", "a\nb", "y"])
    assert nodes_of(refgrad.onnx_simple_text_plot(model)) == ["Neg(x) -> 'a\\nb'", "  Neg('a\\nb') -> y"]
    assert len(assert_dot(refgrad.to_dot(model))) == 5


def test_clusters_hold_subgraphs_and_functions():
    picture = refgrad.to_dot(BRANCHES)
    assert_dot(picture)
    assert re.findall(r"cluster_\d+ \{\s*label=\"(.*)\" ", picture) == [
        "then_branch of If",
        "else_branch of If",
        "function local.f",
    ]
    for arrow in ("a -> Neg;", 'a -> "local.f";', "u -> If [style=dashed];", "v -> If [style=dashed];", "s -> Elu;"):
        assert f"  {arrow}\n" in picture


def test_names_that_two_subgraphs_share_are_two_boxes():
    model = parse(
        "y = If(c) <then_branch = t () => (float[N] u) { u = Neg(x) }, else_branch = e () => (float[N] u) { u = Exp(x) }>",
        "float[N] x, bool c",
    )
    boxes = assert_dot(refgrad.to_dot(model))
    assert sorted(boxes) == sorted(["x", "c", "y", "If", "u", "Neg", "u_1", "Exp"])


def test_an_output_that_nothing_computes_has_a_box_and_an_arrow():
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    picture = refgrad.to_dot(helper.make_model(helper.make_graph([], "g", [value], [value])))
    assert assert_dot(picture) == ["x", "x_1"]
    assert "  x -> x_1;" in picture


def test_the_first_values_of_an_initializer_are_in_its_box():
    large = numpy_helper.from_array(np.arange(100, dtype=np.float32).reshape(10, 10), "w")
    assert 'label="w\\nfloat32((10, 10))\\n[0. 1. 2. 3. 4. 5. 6. 7. 8. 9. ...]"' in refgrad.to_dot(initialized(large))
    small = numpy_helper.from_array(np.arange(4).reshape(2, 2), "w")
    assert 'label="w\\nint64((2, 2))\\n[[0 1]\\n [2 3]]"' in refgrad.to_dot(initialized(small))


def test_svg_shows_every_name_as_it_is():
    root = xml.etree.ElementTree.fromstring(refgrad.to_svg(_chain(NAMES)))
    shown = [element.text.replace("\xa0", " ") for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for name in NAMES:
        assert name in shown
    bold = [element for element in root.iter("{http://www.w3.org/2000/svg}text") if element.get("class") == "o"]
    assert [element.text for element in bold] == ["Neg"] * (len(NAMES) - 1)


@needs_dot
@pytest.mark.parametrize(
    "model",
    [demo.regression(), BRANCHES, _linear(), refgrad.gradient(demo.regression(), dialect="ort")],
    ids=["regression", "branches", "linear", "gradient"],
)
def test_dot_draws_a_box_per_box_and_an_arrow_per_arrow(model):
    picture = refgrad.to_dot(model)
    boxes = assert_dot(picture)
    done = subprocess.run(["dot", "-Tjson0"], input=picture, capture_output=True, text=True, check=True)
    drawn = json.loads(done.stdout)
    assert sorted(o["name"] for o in drawn["objects"] if not o["name"].startswith("cluster")) == sorted(
        box.strip('"') for box in boxes
    )
    assert len(drawn["edges"]) == picture.count(" -> ")
    assert not done.stderr
