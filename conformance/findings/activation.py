"""Findings about activations."""

from __future__ import annotations

import math

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, gradient, model

F32 = np.float32

_EMPTY = np.zeros((0, 3), F32)

FINDINGS: tuple[Finding, ...] = (
    about(REFERENCE, "fails on a scalar", "Y = Softsign (X)", {"X": f32(1)}, {"Y": f32(0.5)}, "1/(1 + |1|)"),
    about(
        REFERENCE,
        "takes the logarithm of a softmax that is 0",
        "Y = LogSoftmax (X)",
        {"X": f32([200, 0])},
        {"Y": f32([0, -200])},
        "x − log Σ eˣ: 0 − 200 − log(1 + e⁻²⁰⁰)",
    ),
    about(
        REFERENCE,
        "is taken along one axis before opset 13",
        "Y = LogSoftmax <axis = 0> (X)",
        {"X": np.zeros((2, 2), F32)},
        {"Y": np.full((2, 2), -np.log(4), F32)},
        "the input is coerced to two axes, here 1×4",
        11,
    ),
    about(
        REFERENCE,
        "is taken along one axis before opset 13",
        "Y = Softmax <axis = 0> (X)",
        {"X": np.zeros((2, 2), F32)},
        {"Y": np.full((2, 2), 1 / 4, F32)},
        "the input is coerced to two axes, here 1×4",
        11,
    ),
    about(
        REFERENCE,
        "is taken along one axis before opset 13",
        "Y = Hardmax <axis = 0> (X)",
        {"X": f32([[1, 2], [3, 4]])},
        {"Y": f32([[0, 0], [0, 1]])},
        "the input is coerced to two axes, here 1×4",
        11,
    ),
    about(
        REFERENCE,
        "has no slope for each channel before opset 7",
        "Y = PRelu (X, slope)",
        {"X": np.full((1, 2, 1, 1), -1, F32), "slope": f32([2, 3])},
        {"Y": f32([-2, -3]).reshape(1, 2, 1, 1)},
        "if the slope is of size 1 it is shared across different channels",
        6,
    ),
    *(
        about(
            system,
            "subtracts a fraction from whole numbers",
            "Y = Shrink <lambd = 0.5, bias = 1.5> (X)",
            {"X": np.array([2])},
            {"Y": np.array([1])},
            "the function body casts the bias to the type of X: 2 − 1",
        )
        for system in (REFERENCE, ORT)
    ),
    gradient(
        "ends the process on empty input along an axis that is not the last",
        "Y = Softmax <axis = 0> (X)",
        "X_grad = com.microsoft.SoftmaxGrad_13 <axis = 0> (Y_grad, P)",
        {"X": _EMPTY, "P": _EMPTY, "Y_grad": _EMPTY},
        {"X_grad": _EMPTY},
        crashes=True,
    ),
    gradient(
        "ends the process on empty input along an axis that is not the last",
        "Y = LogSoftmax <axis = 0> (X)",
        "X_grad = com.microsoft.LogSoftmaxGrad_13 <axis = 0> (Y_grad, P)",
        {"X": _EMPTY, "P": _EMPTY, "Y_grad": _EMPTY},
        {"X_grad": _EMPTY},
        crashes=True,
    ),
    gradient(
        "fails in double before opset 13, whose Unsqueeze its body calls",
        "Y = Softmax <axis = 1> (X)",
        "X_grad = com.microsoft.SoftmaxGrad <axis = 1> (Y_grad, Y)",
        {"X": np.zeros((1, 2)), "Y_grad": np.array([[1.0, 0.0]])},
        {"X_grad": np.array([[0.25, -0.25]])},
        11,
    ),
    Finding(
        ORT,
        "Gelu",
        "is off by 1e-8 in double with approximate=tanh",
        model("""
            <ir_version: 10, opset_import: ["" : 20]>
            gelu (double[1] x) => (double[1] y) { y = Gelu <approximate = "tanh"> (x) }
        """),
        {"x": np.array([-1.5])},
        {"y": np.array([-0.75 * (1 + math.tanh(math.sqrt(2 / math.pi) * (-1.5 + 0.044715 * -3.375)))])},
        proof="0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), the definition",
        tolerance=1e-12,
    ),
    about(
        ORT,
        "loses NaN in double",
        "Y = LogSoftmax (X)",
        {"X": np.array([1, np.nan, 2])},
        {"Y": np.full(3, np.nan)},
        "every result contains the sum over all elements (IEEE 754, 6.2.3); in float32 ONNX Runtime gives NaN",
    ),
)
