"""Findings about activations."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32

F32 = np.float32

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
)
