"""The numbers and the operators that the onnxcustom notebook "Stochastic Gradient Descent on simple function" printed."""

from __future__ import annotations

import json

import numpy as np
import pytest

import refgrad
from refgrad import demo
from refgrad.backends import available, get_backend
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
