"""Every known fault of ONNX Runtime within a larger model is located in the nodes that have it."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import ModelProto, NodeProto, ValueInfoProto, helper
from runtime import RUNTIME, needs_runtime

from refgrad.backends import Prepared
from refgrad.backends.onnxruntime import CpuBackend
from refgrad.conformance import locate
from refgrad.conformance.findings import findings
from refgrad.conformance.findings.finding import ORT, Finding, installed

MOST = 3  # nodes
LEFT_OUT = {
    "Attention-infers a scalar": "the executor and the interpreter disagree on a shape that no node has by itself",
    "Cast-rounds a double twice": "half a unit in the last place of float16: rounding explains it",
    "DictVectorizer": "a map is no tensor: the node is not judged",
    "Sign-returns 0 for NaN": "it is 0 or NaN with what stands beside it",
    "Size-is the product": "five nodes are wrong together, and none without the others",
    "SplitToSequence": "a sequence is no tensor: the node is not judged",
}
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
RELEASE = installed().get(ORT, "")
KNOWN = [one for one in findings() if RUNTIME and one.system == ORT and not one.crashes and one.is_in(RELEASE)]


class AsWritten(CpuBackend):
    """ONNX Runtime without its optimisations."""

    def prepare(self, model: Any, **options: Any) -> Prepared:
        return super().prepare(model, optimization="disabled")


def embedded(finding: Finding) -> tuple[ModelProto, set[str]]:
    """The model of a finding between other nodes, and the names of its own."""
    model = ModelProto()
    model.CopyFrom(finding.model)
    graph = model.graph
    own = {node.name or next(filter(None, node.output), "") for node in graph.node}
    if not {"", "ai.onnx"} & {opset.domain for opset in model.opset_import}:
        model.opset_import.append(helper.make_opsetid("", 17))
    before, after, renamed, outputs = [], [], {}, []
    for value in graph.input:
        if value.type.tensor_type.elem_type in FLOATS:
            name = value.name
            renamed[name] = f"{name}_embedded"
            before.append(helper.make_node("Neg", [name], [f"{name}_turned"], f"before_{name}"))
            before.append(helper.make_node("Neg", [f"{name}_turned"], [renamed[name]], f"again_{name}"))
    for value in graph.output:
        made = ValueInfoProto()
        made.CopyFrom(value)
        if value.type.tensor_type.elem_type in FLOATS:
            after.append(helper.make_node("Neg", [value.name], [f"{value.name}_after"], f"after_{value.name}"))
            made.name = f"{value.name}_after"
        outputs.append(made)
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in (*before, *graph.node, *after)]
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.output.extend(outputs)
    return model, own


@needs_runtime
@pytest.mark.parametrize("finding", KNOWN, ids=str)
def test_a_known_fault_is_located_in_a_larger_model(finding: Finding) -> None:
    label = f"{finding.operator}-{finding.fault}"
    if why := next((why for start, why in LEFT_OUT.items() if label.startswith(start)), ""):
        pytest.skip(why)
    model, own = embedded(finding)
    found = locate(model, dict(finding.feeds), CpuBackend() if finding.optimized else AsWritten())
    named = {one.found.name for one in found.culprits} | {name for group in found.groups for name in group.nodes}
    assert named
    assert named <= own
    assert len(named) <= MOST
