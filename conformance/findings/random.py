"""Findings about random numbers."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32

FINDINGS: tuple[Finding, ...] = (
    about(
        ORT,
        "draws 1 with probability 1 − p",
        "Y = Bernoulli (P)",
        {"P": f32([0, 1])},
        {"Y": f32([0, 1])},
        "an output of 1 is produced with probability p (the function body in onnx has it the other way round)",
        15,
    ),
    about(
        REFERENCE,
        "is not implemented",
        "Y = Multinomial (X)",
        {"X": f32([[0], [0]])},
        {"Y": np.array([[0], [0]], np.int32)},
        "there is one class",
    ),
    about(
        ORT,
        "is not implemented since opset 22",
        "Y = Multinomial (X)",
        {"X": f32([[0], [0]])},
        {"Y": np.array([[0], [0]], np.int32)},
        "there is one class",
        22,
    ),
)
