"""Emitted nodes are written as protobuf writes them, whatever their names and however long these are."""

from __future__ import annotations

import pytest
from onnx import GraphProto, TensorProto, helper

from refgrad.reverse.emitted import AttributeSet, EmittedNode, NodeWriter, write

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
