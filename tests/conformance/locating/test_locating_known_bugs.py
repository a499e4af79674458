"""Every known fault of an executor or a builder is located within a larger model, in the nodes that have it."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import ModelProto, NodeProto, ValueInfoProto, helper
from runtime import RUNTIME

from refgrad.backends import Prepared
from refgrad.backends.onnxruntime import CpuBackend
from refgrad.conformance import bisect, locate
from refgrad.conformance.known.bugs import known_bugs
from refgrad.conformance.known.bugs.bug import ORT, REFERENCE, KnownBug, installed
from refgrad.conformance.known.bugs.builders import builder_bugs
from refgrad.conformance.known.bugs.builders.bug import BuilderBug
from refgrad.derivatives import ortbuilder

pytestmark = pytest.mark.slow

MOST = 3  # nodes
NO_TENSOR = "a sequence or a map is no tensor: the node is not judged"
ROUNDING = "rounding explains it"
LEFT_OUT = {
    "onnxruntime": {
        "Attention-infers a scalar": "the executor and the interpreter disagree on a shape that no node has by itself",
        "Cast-rounds a double twice": "half a unit in the last place of float16: rounding explains it",
        "DictVectorizer": NO_TENSOR,
        "If-loses the producer": "no model with these nodes has a session, whatever is asked of it",
        "Sign-returns 0 for NaN": "it is 0 or NaN with what stands beside it",
        "Size-is the product": "five nodes are wrong together, and none without the others",
        "SplitToSequence": NO_TENSOR,
        "WordConvEmbedding-does not write": "the row is what the memory held before: 0 where the node runs alone",
    },
    "onnx.reference": {
        "Cast-rounds a double twice": ROUNDING,
        "Cast-rounds integers twice": ROUNDING,
        "CumSum-rounds after each step in bfloat16": ROUNDING,
        "ReduceSum-rounds after each step in bfloat16": ROUNDING,
        **dict.fromkeys(
            ("CastMap", "DictVectorizer", "Optional-", "SequenceInsert", "SequenceMap", "ZipMap"), NO_TENSOR
        ),
    },
    "onnxruntime-training": {
        "PassThrough-fails": "it fails for an input of the graph alone",
        "SliceGrad-has no kernel for float16": "it fails alone: in a larger model it is given float32",
    },
    "onnxruntime:module": {
        f"{operator}-does not sum over axes": "the builder gets it right where the operator is not alone"
        for operator in ("Expand", "MatMul", "Max", "Min")
    },
}
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
RELEASES = installed()
KNOWN = [
    one
    for one in known_bugs()
    if one.system in RELEASES and not one.crashes and one.is_in(RELEASES[one.system]) and (RUNTIME or one.system != ORT)
]
BUILDERS = ("onnx-ad", *(("onnxruntime:raw", "onnxruntime:module") if ortbuilder.available() else ()))
BUILT = [(builder, one) for one in builder_bugs() for builder in BUILDERS if builder in one.builders]


class Optimized(CpuBackend):
    """ONNX Runtime with all its optimisations, wrong ones too."""

    def prepare(self, model: Any, **options: Any) -> Prepared:
        return super().prepare(model, without=())


class AsWritten(CpuBackend):
    """ONNX Runtime without its optimisations."""

    def prepare(self, model: Any, **options: Any) -> Prepared:
        return super().prepare(model, optimization="disabled")


def embedded(bug: KnownBug | BuilderBug) -> tuple[ModelProto, set[str]]:
    """The model of a finding between other nodes, and the names of its own."""
    model = ModelProto()
    model.CopyFrom(bug.model)
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
            graph.value_info.append(value)
        outputs.append(made)
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in (*before, *graph.node, *after)]
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.output.extend(outputs)
    return model, own


def skip_what_is_left_out(system: str, bug: KnownBug | BuilderBug) -> None:
    label = f"{bug.operator}-{bug.fault}"
    if why := next((why for start, why in LEFT_OUT.get(system, {}).items() if label.startswith(start)), ""):
        pytest.skip(why)


@pytest.mark.parametrize("bug", KNOWN, ids=str)
def test_a_known_fault_of_an_executor_is_located_in_a_larger_model(bug: KnownBug) -> None:
    skip_what_is_left_out(bug.system, bug)
    model, own = embedded(bug)
    executor: Any = REFERENCE
    if bug.system != REFERENCE:
        executor = Optimized() if bug.optimized else AsWritten()
    found = locate(model, dict(bug.feeds), executor)
    named = {one.found.name for one in found.culprits} | {name for group in found.groups for name in group.nodes}
    if found.unsteady is not None:  # such as memory that nobody wrote
        named |= {found.unsteady.node} - {""}  # it has no name if no single node is at fault
    assert named or found.unsteady is not None
    # An executor that fails on a group of nodes fails as well if another node behind it returns the result.
    assert named <= own | ({name for name in named if name.startswith("after_")} if bug.is_error else set())
    assert len(named) <= (len(own) if bug.is_error else MOST)


@pytest.mark.parametrize(("builder", "bug"), BUILT, ids=str)
def test_a_known_fault_of_a_builder_is_located_in_a_larger_model(builder: str, bug: BuilderBug) -> None:
    skip_what_is_left_out(builder, bug)
    model, own = embedded(bug)
    named = {name for fault in bisect(model, dict(bug.feeds), builder).faults for name in fault.nodes}
    assert named
    assert named <= own
    assert len(named) <= MOST
