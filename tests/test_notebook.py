"""The numbers and the operators that the onnxcustom notebook "Stochastic Gradient Descent on simple function" printed."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest
from onnx import GraphProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad import demo
from refgrad.backends import available, get_backend
from refgrad.conformance.structure import compare
from refgrad.errors import BackendError

PRINTED = {
    "x_grad": [[2, 1.33332], [54, 3.99996], [2.66666, 33.777676], [59.999943, 84.44432], [356.99966, 517.9994]],
    "label_grad": [[-4], [-12], [-5.33332], [-13.333321], [-41.99996]],
    "init_grad": [[193.33316, 186.66649]],
    "init_1_grad": [[109.333244, 102.666565]],
    "init_b10_grad": [76.6666],
    "loss": [[532.5546]],
}
ROUNDING = 2 * np.finfo(np.float32).eps

# The two gradients as the notebook printed them, without the indentation and the opsets.
LISTING = """
input: name='x' type=dtype('float32') shape=(0, 2)
input: name='init' type=dtype('float32') shape=(1, 2)
input: name='init_1' type=dtype('float32') shape=(1, 2)
input: name='init_b10' type=dtype('float32') shape=(1,)
input: name='y_grad' type=dtype('float32') shape=(0, 1)
init: name='i0' type=dtype('int64') shape=(0,) -- array([0], dtype=int64)
init: name='i1' type=dtype('int64') shape=(0,) -- array([1], dtype=int64)
init: name='i2' type=dtype('int64') shape=(0,) -- array([2], dtype=int64)
Mul(x, x) -> r0
Mul(r0, init) -> r1
Shape(r1) -> r32
Mul(x, init_1) -> r2
Add(r2, r1) -> r3
Slice(r3, i1, i2, i1) -> r4
Squeeze(r4, i1) -> r5
Shape(r5) -> r18
Slice(r3, i0, i1, i1) -> r6
Squeeze(r6, i1) -> r7
Add(r7, r5) -> r8
Add(r8, init_b10) -> r9
Shape(r9) -> r10
Reshape(y_grad, r10, allowzero=0) -> r11
Shape(init_b10) -> r12
Shape(r8) -> r13
BroadcastGradientArgs(r13, r12) -> r14, r15
ReduceSum(r11, r14, keepdims=1, noop_with_empty_axes=1) -> r16
Reshape(r16, r13, allowzero=0) -> r17
Shape(r7) -> r19
BroadcastGradientArgs(r19, r18) -> r20, r21
ReduceSum(r17, r21, keepdims=1, noop_with_empty_axes=1) -> r22
Reshape(r22, r18, allowzero=0) -> r23
Unsqueeze(r23, i1) -> r24
Shape(r3) -> r25
SliceGrad(r24, r25, i1, i2, i1) -> r26
ReduceSum(r17, r20, keepdims=1, noop_with_empty_axes=1) -> r27
Reshape(r27, r19, allowzero=0) -> r28
Unsqueeze(r28, i1) -> r29
SliceGrad(r29, r25, i0, i1, i1) -> r30
Sum(r30, r26) -> r31
Shape(r2) -> r33
BroadcastGradientArgs(r33, r32) -> r34, r35
ReduceSum(r31, r35, keepdims=1, noop_with_empty_axes=1) -> r36
Reshape(r36, r32, allowzero=0) -> r37
Mul(r37, init) -> r38
Shape(init) -> r39
Shape(r0) -> r40
BroadcastGradientArgs(r40, r39) -> r41, r42
ReduceSum(r38, r41, keepdims=1, noop_with_empty_axes=1) -> r43
Reshape(r43, r40, allowzero=0) -> r44
Mul(r44, x) -> r45
ReduceSum(r31, r34, keepdims=1, noop_with_empty_axes=1) -> r46
Reshape(r46, r33, allowzero=0) -> r47
Mul(r47, init_1) -> r48
Shape(init_1) -> r49
Shape(x) -> r50
BroadcastGradientArgs(r50, r49) -> r51, r52
ReduceSum(r48, r51, keepdims=1, noop_with_empty_axes=1) -> r53
Reshape(r53, r50, allowzero=0) -> r54
Sum(r54, r45, r45) -> x_grad
ReduceSum(r11, r15, keepdims=1, noop_with_empty_axes=1) -> r55
Reshape(r55, r12, allowzero=0) -> init_b10_grad
Mul(r37, r0) -> r56
ReduceSum(r56, r42, keepdims=1, noop_with_empty_axes=1) -> r57
Reshape(r57, r39, allowzero=0) -> init_grad
Mul(r47, x) -> r58
ReduceSum(r58, r52, keepdims=1, noop_with_empty_axes=1) -> r59
Reshape(r59, r49, allowzero=0) -> init_1_grad
output: name='x_grad' type=dtype('float32') shape=(0, 2)
output: name='init_grad' type=dtype('float32') shape=(1, 2)
output: name='init_1_grad' type=dtype('float32') shape=(1, 2)
output: name='init_b10_grad' type=dtype('float32') shape=(1,)
"""
LISTING_WITH_LOSS = """
input: name='x' type=dtype('float32') shape=(0, 2)
input: name='label' type=dtype('float32') shape=(0, 1)
input: name='init' type=dtype('float32') shape=(1, 2)
input: name='init_1' type=dtype('float32') shape=(1, 2)
input: name='init_b10' type=dtype('float32') shape=(1,)
init: name='i0' type=dtype('int64') shape=(0,) -- array([-1,  1], dtype=int64)
init: name='i1' type=dtype('int64') shape=(0,) -- array([0], dtype=int64)
init: name='i2' type=dtype('int64') shape=(0,) -- array([1], dtype=int64)
init: name='i3' type=dtype('int64') shape=(0,) -- array([2], dtype=int64)
Mul(x, init_1) -> r0
Shape(r0) -> r47
Mul(x, x) -> r1
Mul(r1, init) -> r2
Add(r0, r2) -> r3
Slice(r3, i1, i2, i2) -> r4
Squeeze(r4, i2) -> r5
Shape(r5) -> r33
Slice(r3, i2, i3, i2) -> r6
Squeeze(r6, i2) -> r7
Add(r5, r7) -> r8
Add(r8, init_b10) -> r9
Reshape(r9, i0, allowzero=0) -> r10
Sub(r10, label) -> r11
Mul(r11, r11) -> r12
ReduceSum(r12, keepdims=1, noop_with_empty_axes=0) -> loss
Shape(loss) -> r76
ConstantOfShape(r76) -> r14
Shape(r12) -> r13
Expand(r14, r13) -> r15
Mul(r15, r11) -> r16
Sum(r16, r16) -> r17
Shape(label) -> r18
Shape(r10) -> r19
BroadcastGradientArgs(r19, r18) -> r20, r21
ReduceSum(r17, r20, keepdims=1, noop_with_empty_axes=1) -> r22
Reshape(r22, r19, allowzero=0) -> r23
Shape(r9) -> r24
Reshape(r23, r24, allowzero=0) -> r25
Shape(init_b10) -> r26
Shape(r8) -> r27
BroadcastGradientArgs(r27, r26) -> r28, r29
ReduceSum(r25, r28, keepdims=1, noop_with_empty_axes=1) -> r30
Reshape(r30, r27, allowzero=0) -> r31
Shape(r7) -> r32
BroadcastGradientArgs(r33, r32) -> r34, r35
ReduceSum(r31, r34, keepdims=1, noop_with_empty_axes=1) -> r36
Reshape(r36, r33, allowzero=0) -> r37
Unsqueeze(r37, i2) -> r38
Shape(r3) -> r39
SliceGrad(r38, r39, i1, i2, i2) -> r40
ReduceSum(r31, r35, keepdims=1, noop_with_empty_axes=1) -> r41
Reshape(r41, r32, allowzero=0) -> r42
Unsqueeze(r42, i2) -> r43
SliceGrad(r43, r39, i2, i3, i2) -> r44
Sum(r44, r40) -> r45
Shape(r2) -> r46
BroadcastGradientArgs(r47, r46) -> r48, r49
ReduceSum(r45, r48, keepdims=1, noop_with_empty_axes=1) -> r50
Reshape(r50, r47, allowzero=0) -> r51
Mul(r51, init_1) -> r52
Shape(init_1) -> r53
Shape(x) -> r54
BroadcastGradientArgs(r54, r53) -> r55, r56
ReduceSum(r52, r55, keepdims=1, noop_with_empty_axes=1) -> r57
Reshape(r57, r54, allowzero=0) -> r58
ReduceSum(r45, r49, keepdims=1, noop_with_empty_axes=1) -> r59
Reshape(r59, r46, allowzero=0) -> r60
Mul(r60, init) -> r61
Shape(init) -> r62
Shape(r1) -> r63
BroadcastGradientArgs(r63, r62) -> r64, r65
ReduceSum(r61, r64, keepdims=1, noop_with_empty_axes=1) -> r66
Reshape(r66, r63, allowzero=0) -> r67
Mul(r67, x) -> r68
Sum(r68, r68, r58) -> x_grad
ReduceSum(r17, r21, keepdims=1, noop_with_empty_axes=1) -> r69
Reshape(r69, r18, allowzero=0) -> r70
Neg(r70) -> label_grad
ReduceSum(r25, r29, keepdims=1, noop_with_empty_axes=1) -> r71
Reshape(r71, r26, allowzero=0) -> init_b10_grad
Mul(r51, x) -> r72
ReduceSum(r72, r56, keepdims=1, noop_with_empty_axes=1) -> r73
Reshape(r73, r53, allowzero=0) -> init_1_grad
Mul(r60, r1) -> r74
ReduceSum(r74, r65, keepdims=1, noop_with_empty_axes=1) -> r75
Reshape(r75, r62, allowzero=0) -> init_grad
output: name='x_grad' type=dtype('float32') shape=(0, 2)
output: name='label_grad' type=dtype('float32') shape=(0, 1)
output: name='init_grad' type=dtype('float32') shape=(1, 2)
output: name='init_1_grad' type=dtype('float32') shape=(1, 2)
output: name='init_b10_grad' type=dtype('float32') shape=(1,)
output: name='loss' type=dtype('float32') shape=(1, 1)
"""

# What the notebook printed, as sets of operator types: without the loss, then with it, cotangent ones and the loss kept.
PLAIN = {
    "Add",
    "BroadcastGradientArgs",
    "Mul",
    "ReduceSum",
    "Reshape",
    "Shape",
    "Slice",
    "SliceGrad",
    "Squeeze",
    "Sum",
    "Unsqueeze",
}
WITH_LOSS = PLAIN | {"ConstantOfShape", "Expand", "Neg", "Sub"}


@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("backend", available())
def test_gradient_has_the_numbers_that_the_notebook_printed(dialect, backend):
    gradient = refgrad.gradient(
        demo.regression(), outputs=["loss"], dialect=dialect, cotangent="ones", keep_outputs=True
    )
    try:
        prepared = get_backend(backend).prepare(gradient)
    except BackendError as error:
        if dialect == "onnx" or "no kernel" not in str(error):
            raise
        pytest.skip(f"{backend} has no training operators")
    results = prepared.run(demo.feeds())
    assert {name: value.dtype for name, value in results.items() if name != "y"} == dict.fromkeys(PRINTED, np.float32)
    for name, expected in PRINTED.items():
        np.testing.assert_allclose(results[name], np.float32(expected), rtol=ROUNDING, atol=0, err_msg=name)


def test_dialect_ort_emits_the_operators_of_the_notebook():
    plain = refgrad.gradient(demo.regression(loss=False), dialect="ort")
    assert {node.op_type for node in plain.graph.node} - {"Identity"} == PLAIN


def test_dialect_ort_emits_the_operators_of_the_notebook_with_its_loss():
    gradient = refgrad.gradient(demo.regression(), outputs=["loss"], dialect="ort", cotangent="ones", keep_outputs=True)
    assert {node.op_type for node in gradient.graph.node} - {"Identity"} == WITH_LOSS


def test_inputs_and_outputs_are_named_and_ordered_as_in_the_notebook():
    plain = refgrad.gradient(demo.regression(loss=False), dialect="ort")
    assert [value.name for value in plain.graph.input] == ["x", "init", "init_1", "init_b10", "y_grad"]
    assert [value.name for value in plain.graph.output] == ["x_grad", "init_grad", "init_1_grad", "init_b10_grad"]


def test_metadata_says_which_is_the_gradient_of_what():
    gradient = refgrad.gradient(demo.regression(loss=False))
    metadata = {entry.key: json.loads(entry.value) for entry in gradient.metadata_props}
    assert metadata["refgrad.cotangents"] == {"y": "y_grad"}
    assert metadata["refgrad.gradients"]["init"] == "init_grad"


def parsed(listing):
    """The graph that a listing shows. It leaves out the value of ConstantOfShape, which fills the cotangent with 1."""
    graph = GraphProto(name="listing")
    for side, name, shape in re.findall(r"^(input|output): name='(\w+)' .* shape=\((.*)\)$", listing, re.MULTILINE):
        dims = [int(size) or None for size in re.findall(r"\d+", shape)]
        getattr(graph, side).append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    for name, values in re.findall(
        r"^init: name='(\w+)' type=dtype\('int64'\) .*array\(\[(.*)\], dtype", listing, re.MULTILINE
    ):
        graph.initializer.append(numpy_helper.from_array(np.int64([int(v) for v in values.split(",")]), name))
    for op_type, arguments, outputs in re.findall(r"^(\w+)\((.*)\) -> (.*)$", listing, re.MULTILINE):
        parts = arguments.split(", ")
        attributes = {name: int(value) for name, value in (part.split("=") for part in parts if "=" in part)}
        if op_type == "ConstantOfShape":
            attributes["value"] = numpy_helper.from_array(np.ones(1, np.float32))
        domain = "com.microsoft" if op_type in ("BroadcastGradientArgs", "SliceGrad") else ""
        inputs = [part for part in parts if "=" not in part]
        graph.node.append(helper.make_node(op_type, inputs, outputs.split(", "), domain=domain, **attributes))
    imports = [helper.make_opsetid("", 14), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports)


def drop_in(listing):
    """The same gradient by onnx_derivative, as the notebook calls it."""
    if listing is LISTING:
        return refgrad.onnx_derivative(demo.regression(loss=False))
    loss = refgrad.select_model_inputs_outputs(demo.regression(), outputs=["loss"])
    options = refgrad.DerivativeOptions.FillGrad | refgrad.DerivativeOptions.KeepOutputs
    return refgrad.onnx_derivative(loss, options=options)


@pytest.mark.parametrize("listing", [LISTING, LISTING_WITH_LOSS], ids=["plain", "with its loss"])
def test_the_graph_is_the_one_that_the_notebook_printed(listing):
    printed, ours = parsed(listing), drop_in(listing)
    found = compare(ours, printed, apart_from=["allowzero"])
    assert found.isomorphic, str(found)
    assert found.same_operators
    assert Counter(node.op_type for node in ours.graph.node) == Counter(node.op_type for node in printed.graph.node)
    for side in ("input", "output"):
        values = [[(v.name, v.type) for v in getattr(made.graph, side)] for made in (ours, printed)]
        assert values[0] == values[1]


@pytest.mark.parametrize("listing", [LISTING, LISTING_WITH_LOSS], ids=["plain", "with its loss"])
def test_the_listing_computes_the_printed_numbers(listing):
    """So the text is typed in as it was printed."""
    printed = parsed(listing)
    feeds = {name: value for name, value in demo.feeds().items() if name in {v.name for v in printed.graph.input}}
    if listing is LISTING:
        y = get_backend("numpy").prepare(parsed_forward()).run(feeds)["y"]
        feeds["y_grad"] = 2 * (y - demo.feeds()["label"])
    for name, value in get_backend("numpy").prepare(printed).run(feeds).items():
        np.testing.assert_allclose(value, np.float32(PRINTED[name]), rtol=2e-6, err_msg=name)


def parsed_forward():
    """The function with the weights as inputs."""
    gradient = refgrad.onnx_derivative(demo.regression(loss=False), options=refgrad.DerivativeOptions.KeepOutputs)
    return refgrad.select_model_inputs_outputs(gradient, outputs=["y"])


def test_a_listing_with_another_operand_is_noticed():
    wrong = LISTING.replace("Sum(r54, r45, r45)", "Sum(r54, r45)")
    assert wrong != LISTING
    assert not compare(drop_in(LISTING), parsed(wrong), apart_from=["allowzero"])
