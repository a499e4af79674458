"""The numbers and the operators that the onnxcustom notebook "Stochastic Gradient Descent on simple function" printed."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest
from listings import GRADIENT, GRADIENT_OF_LOSS
from onnx import GraphProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.tools.parity.structure import compare
from refgrad.errors import BackendError
from refgrad.show import demo

PRINTED = {
    "x_grad": [[2, 1.33332], [54, 3.99996], [2.66666, 33.777676], [59.999943, 84.44432], [356.99966, 517.9994]],
    "label_grad": [[-4], [-12], [-5.33332], [-13.333321], [-41.99996]],
    "init_grad": [[193.33316, 186.66649]],
    "init_1_grad": [[109.333244, 102.666565]],
    "init_b10_grad": [76.6666],
    "loss": [[532.5546]],
}
ROUNDING = 2 * np.finfo(np.float32).eps


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
    for op_type, arguments, outputs in re.findall(r"^ *(\w+)\((.*)\) -> (.*)$", listing, re.MULTILINE):
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
    if listing is GRADIENT:
        return refgrad.onnx_derivative(demo.regression(loss=False))
    loss = refgrad.select_model_inputs_outputs(demo.regression(), outputs=["loss"])
    options = refgrad.DerivativeOptions.FillGrad | refgrad.DerivativeOptions.KeepOutputs
    return refgrad.onnx_derivative(loss, options=options)


@pytest.mark.parametrize("listing", [GRADIENT, GRADIENT_OF_LOSS], ids=["plain", "with its loss"])
def test_the_graph_is_the_one_that_the_notebook_printed(listing):
    printed, ours = parsed(listing), drop_in(listing)
    found = compare(ours, printed, apart_from=["allowzero"])
    assert found.isomorphic, str(found)
    assert found.same_operators
    assert Counter(node.op_type for node in ours.graph.node) == Counter(node.op_type for node in printed.graph.node)
    for side in ("input", "output"):
        values = [[(v.name, v.type) for v in getattr(made.graph, side)] for made in (ours, printed)]
        assert values[0] == values[1]


@pytest.mark.parametrize("listing", [GRADIENT, GRADIENT_OF_LOSS], ids=["plain", "with its loss"])
def test_the_listing_computes_the_printed_numbers(listing):
    """So the text is typed in as it was printed."""
    printed = parsed(listing)
    feeds = {name: value for name, value in demo.feeds().items() if name in {v.name for v in printed.graph.input}}
    if listing is GRADIENT:
        y = get_backend("numpy").prepare(parsed_forward()).run(feeds)["y"]
        feeds["y_grad"] = 2 * (y - demo.feeds()["label"])
    for name, value in get_backend("numpy").prepare(printed).run(feeds).items():
        np.testing.assert_allclose(value, np.float32(PRINTED[name]), rtol=2e-6, err_msg=name)


def parsed_forward():
    """The function with the weights as inputs."""
    gradient = refgrad.onnx_derivative(demo.regression(loss=False), options=refgrad.DerivativeOptions.KeepOutputs)
    return refgrad.select_model_inputs_outputs(gradient, outputs=["y"])


def test_a_listing_with_another_operand_is_noticed():
    wrong = GRADIENT.replace("Sum(r54, r45, r45)", "Sum(r54, r45)")
    assert wrong != GRADIENT
    assert not compare(drop_in(GRADIENT), parsed(wrong), apart_from=["allowzero"])
