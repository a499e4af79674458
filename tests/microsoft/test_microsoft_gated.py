"""Gated norms, gated sums and hyper-connections: what is refused, 16 bits, and second derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from checking import assert_second_derivative
from onnx import helper
from runtime import needs_runtime

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.cases import every_case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import case, drawer
from refgrad.microsoft.cases.experts import BIAS, SCORES

pytestmark = [pytest.mark.stock, pytest.mark.slow]

FLOATS = drawer(1)
X, SCALE = FLOATS(2, 3, 4), FLOATS(4)
LOW_RANK = FLOATS(2, 12), FLOATS(12), FLOATS(12, 2), FLOATS(2, 12), FLOATS(12, 3)
OPERATORS = (
    *("BiasSplitGelu", "ScaledSiLU", "BiasAdd", "GatedAdd", "HyperConnectionPreMix", "HyperConnectionPostMix"),
    *("HyperConnectionLowRankMix", "BranchwiseRMSNorm", "GatedRMSNorm", "EngramGate", "FusedMatMulActivation"),
    *("SwiGLU", "RouterGateUpProj", "MoEGroupRouter"),
)
OF_RUNTIME = [case for case in every_case() if case.operator.removeprefix("com.microsoft.") in OPERATORS]
CASES = [case for case in OF_RUNTIME if case.static and case.values == "smooth"]


def one_node(op_type: str, *inputs: np.ndarray | None, outputs: int = 1, **attributes: Any) -> Case:
    """A node whose outputs have no types: they cannot be inferred where the inputs are wrong."""
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(inputs)]
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    made = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(op_type, names, made, domain="com.microsoft", **attributes)
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in feeds.items()
    ]
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name=name) for name in made])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return Case(op_type, helper.make_model(graph, opset_imports=imports, ir_version=10), feeds)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (one_node("BiasSplitGelu", FLOATS(1, 2, 3), FLOATS(3)), r"X has the shape \[1, 2, 3\]; .* D even"),
        (one_node("BiasAdd", X, FLOATS(1), X), r"bias has the shape \[1\]; \[4\] is needed"),
        (one_node("BiasAdd", X, SCALE, X[:1]), r"skip has the shape \[1, 3, 4\]; \[2, 3, 4\] is needed"),
        (one_node("ScaledSiLU", X, SCALE), r"scale has the shape \[4\]; one number is needed"),
        (one_node("GatedAdd", X, X, X), r"gate has the shape \[2, 3, 4\]; \[2, 3, 1\] is needed"),
        (one_node("GatedAdd", X, X, X, SCALE), r"gate_weight has the shape \[4\]; \[4, 1\] is needed"),
        (
            one_node("HyperConnectionPreMix", X, FLOATS(2, 4)),
            r"pre_mix has the shape \[2, 4\]; \[2, 3\] or \[2, 3, 1\]",
        ),
        (one_node("HyperConnectionPreMix", X, X, num_branches=3), "does not fit num_branches=3"),
        (
            one_node("HyperConnectionPostMix", X, FLOATS(2, 3), FLOATS(2, 3)),
            r"block_output has the shape \[2, 3\]; \[2, 4\]",
        ),
        (
            one_node("HyperConnectionPostMix", X, FLOATS(2, 4), FLOATS(2, 3), FLOATS(3, 3)),
            r"stream_mix has the shape \[3, 3\]; \[2, 3, 3\] is needed",
        ),
        (
            one_node("BranchwiseRMSNorm", X, FLOATS(3)),
            r"scale has the shape \[3\]; \[4\], \[3, 4\] or \[12\] is needed",
        ),
        (
            one_node("GatedRMSNorm", X, FLOATS(3), X),
            r"scale has the shape \[3\]; it has one axis, which divides the last",
        ),
        (one_node("GatedRMSNorm", X, SCALE, X, activation="relu"), "activation 'relu' is not known; there are silu"),
        (one_node("EngramGate", X, X, X, X, X), "key has rank 3"),
        (
            one_node("HyperConnectionLowRankMix", *LOW_RANK, num_branches=4, outputs=2),
            r"inject_weight has .* \[12, 4\]",
        ),
        (
            one_node("HyperConnectionLowRankMix", *LOW_RANK, num_branches=3, gate_div=0.0, outputs=2),
            "gate_div is 0, and a divisor",
        ),
        (one_node("SwiGLU", FLOATS(2, 3)), r"gate has the shape \[2, 3\]; without up its last axis has two halves"),
        (one_node("SwiGLU", X, X[:1]), r"up has the shape \[1, 3, 4\]; \[2, 3, 4\] is needed"),
        (one_node("RouterGateUpProj", X, FLOATS(4, 4), router_size=1, outputs=2), "do not fit router_size=1"),
        (one_node("RouterGateUpProj", X, X[0].T, router_size=1, activation="geglu", outputs=2), "there is 'swiglu'"),
        (one_node("FusedMatMulActivation", X, FLOATS(4, 2), activation="Mish"), "activation 'Mish' is not supported"),
        (
            one_node("FusedMatMulActivation", X, FLOATS(4, 2), activation="Softmax", activation_axis=3),
            "axis 3 of a tensor",
        ),
        (one_node("MoEGroupRouter", SCORES, BIAS, top_k=9), r"top_k is 1 to 8"),
        (one_node("MoEGroupRouter", SCORES, BIAS, top_k=1, n_group=3), "the groups divide the experts"),
        (one_node("MoEGroupRouter", SCORES, BIAS[:3], top_k=1), r"expert_bias has the shape \[3\]; it is \[8\]"),
        (
            one_node("MoEGroupRouter", SCORES, BIAS, top_k=1, outputs=3),
            "the outputs are router_probs, or selection_scores",
        ),
        (one_node("MoEGroupRouter", SCORES, BIAS, SCORES, top_k=1), "cannot be projected"),
    ],
    ids=str,
)
def test_wrong_input_is_refused_by_name(wrong: Case, said: str) -> None:
    with pytest.raises(BackendError, match=said):
        get_backend("numpy").prepare(wrong.model).run(wrong.feeds)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (case("GatedRMSNorm", X, SCALE, X, activation="relu"), "activation 'relu' is not known; there are silu"),
        (case("BranchwiseRMSNorm", X, num_branches=-1), "num_branches=-1: it is 0 for grouped input"),
        (case("RouterGateUpProj", X, FLOATS(4, 5), router_size=1, activation="geglu", outputs=2), "there is 'swiglu'"),
        (case("RouterGateUpProj", X, FLOATS(4, 5), router_size=-1, outputs=2), "router_size=-1"),
        (case("MoEGroupRouter", SCORES, BIAS, top_k=0), "top_k=0: it is a number above 0"),
        (
            case("MoEGroupRouter", SCORES, BIAS, top_k=2, n_group=2, outputs=(1, 2)),
            "output selection_scores is not computed",
        ),
        (case("HyperConnectionLowRankMix", *LOW_RANK, num_branches=0, outputs=2), "num_branches=0: it is how many"),
        (case("HyperConnectionLowRankMix", *LOW_RANK, num_branches=3, gate_div=0.0, outputs=2), "gate_div is 0"),
        (
            case("HyperConnectionLowRankMix", *LOW_RANK, FLOATS(2, 4), num_branches=3, outputs=2),
            "it needs prev_block_output and prev_post_gate, or neither of them",
        ),
        (case("FusedMatMulActivation", X, FLOATS(4, 2), activation="Mish"), "activation 'Mish' is not known"),
        (case("HyperConnectionPreMix", X, X, shapes="unknown"), "the rank of its input .* is unknown"),
    ],
    ids=str,
)
def test_what_there_is_not_has_no_gradient(wrong: Case, said: str) -> None:
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(wrong.model)


def test_packed_experts_have_no_gradient() -> None:
    x, logits, blob = FLOATS(2, 4).astype(np.float16), FLOATS(2, 3), np.zeros((3, 4, 2), np.uint8)
    packed = one_node("MoEPacked", x, logits, blob, blob, blob, gate_type=16, down_type=16, up_type=16)
    packed.model.graph.output[0].type.CopyFrom(packed.model.graph.input[0].type)
    with pytest.raises(
        NoGradientError, match="blobs in formats that its schema does not define: unpack them and use MoE"
    ):
        refgrad.gradient(packed.model)


@needs_runtime
@pytest.mark.parametrize("of", CASES, ids=str)
def test_16_bits_are_computed_as_by_onnx_runtime(of: Case) -> None:
    float16 = {
        name: x.astype(np.float16) if x.dtype == np.float32 and name != "expert_bias" else x
        for name, x in of.feeds.items()
    }
    model = onnx.ModelProto()
    model.CopyFrom(of.model)
    for value in (*model.graph.input, *model.graph.output):
        if value.name not in ("expert_bias", "selection_scores", "router_weights"):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    got = get_backend("numpy").prepare(model).run(float16)
    exact = get_backend("numpy").prepare(of.model).run({name: x.astype(np.float32) for name, x in float16.items()})
    try:
        expected = get_backend("ort-cpu").prepare(model).run(float16)
    except BackendError:  # it has no kernel on the CPU
        expected = exact
    for name, value in got.items():
        assert value.dtype == expected[name].dtype or expected is exact
        for other in (expected, exact):
            np.testing.assert_allclose(value.astype(float), other[name].astype(float), rtol=4e-3, atol=4e-3)


FEW = {case.operator: case for case in CASES if all(x.size for x in case.feeds.values())}


@pytest.mark.parametrize("of", FEW.values(), ids=str)
def test_second_derivatives(of: Case) -> None:
    assert_second_derivative(of, directions=1)
