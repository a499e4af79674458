"""Emitted nodes are written as protobuf writes them, whatever their names and however long these are."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import GraphProto, StringStringEntryProto, TensorProto, helper, numpy_helper

from refgrad.builder.nodes import AttributeSet, EmittedNode, NodeBuilder, NodeWriter, constant_tensor, write

pytestmark = pytest.mark.interpreter

NAMES = ("v", "", "é名", "n" * 127, "n" * 128, "n" * 16_383, "n" * 16_384, "名" * 800_000)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name[:1]}{len(name)}")
def test_a_node_is_written_as_protobuf_writes_it(name: str) -> None:
    attributes = {"axis": -1, "to": TensorProto.FLOAT, "mode": "linear", "scales": [0.5, 2.0]}
    node = EmittedNode(
        "Op", "d.e", ("x", "", name), ("y", name), AttributeSet(attributes, ()), f"{name}_0", ("Op", name), False
    )
    given = helper.make_node("Op", ["z", "", name], ["y", name], f"{name}_0", domain="d.e", **attributes)
    given.metadata_props.add(key="refgrad.rule", value="Op")
    given.metadata_props.add(key="refgrad.node", value=name)
    expected, made = GraphProto(node=[given, given]), GraphProto()
    write(made, [node, node], {"x": "z"})
    assert [sorted(a.name for a in one.attribute) for one in made.node] == [sorted(attributes)] * 2
    for graph in (expected, made):
        for one in graph.node:
            one.attribute.sort(key=lambda attribute: attribute.name)
    assert made == expected


def test_nodes_are_added_behind_those_that_are_there() -> None:
    graph = GraphProto(node=[helper.make_node("Exp", ["a"], ["b"], domain="")])
    NodeWriter(graph, {}).add(EmittedNode("Neg", "", ("b",), ("c",), AttributeSet({}, ()), "n", ("Exp", "e"), False))
    assert [node.op_type for node in graph.node] == ["Exp", "Neg"]


def test_the_builder_gives_free_names() -> None:
    builder = NodeBuilder({"x", "diff"})
    assert builder.add("Neg", ["x"], "diff") == "diff_1"
    assert builder.add_as("Neg", ["diff_1"], "y") == "y"
    assert [(node.name, list(node.output)) for node in builder.take()] == [("diff_1", ["diff_1"]), ("y", ["y"])]
    assert builder.take() == []
    assert NodeBuilder({"x"}, start=2).fresh("x") == "x_2"


def test_the_builder_adds_an_initializer_once() -> None:
    builder = NodeBuilder(set())
    one, half = (numpy_helper.from_array(np.full(1, number, np.float32)) for number in (1, 0.5))
    assert [builder.initializer(tensor, "c") for tensor in (one, half, one)] == ["c", "c_1", "c"]
    assert builder.initializer(constant_tensor(np.ones(1, np.float32)), "c") == "c_2"  # it is not a weight
    graph = GraphProto()
    builder.add("Neg", ["c"], "y")
    builder.put_into(graph)
    assert [tensor.name for tensor in graph.initializer] == ["c", "c_1", "c_2"]
    assert [bool(tensor.metadata_props) for tensor in graph.initializer] == [False, False, True]


def test_the_builder_writes_values_by_other_names_and_metadata() -> None:
    builder = NodeBuilder(set())
    builder.append("Split", ["x"], ["a", "b"], "halves", attributes={"num_outputs": 2, "axis": None})
    [node] = builder.take({"x": "data", "b": "rest"}, metadata=[StringStringEntryProto(key="k", value="v")])
    assert (list(node.input), list(node.output), node.name) == (["data"], ["a", "rest"], "halves")
    assert [attribute.name for attribute in node.attribute] == ["num_outputs"]
    assert [(entry.key, entry.value) for entry in node.metadata_props] == [("k", "v")]
