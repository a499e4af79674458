"""Findings about losses."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "fails on an empty batch",
        'Y = NegativeLogLikelihoodLoss <reduction = "sum"> (X, t)',
        {"X": np.zeros((0, 2), F32), "t": np.zeros(0, np.int64)},
        {"Y": f32(0)},
        "the sum of nothing",
    ),
    *(
        about(
            system,
            "fails on an empty batch",
            'Y = SoftmaxCrossEntropyLoss <reduction = "sum"> (X, t)',
            {"X": np.zeros((0, 2), F32), "t": np.zeros(0, np.int64)},
            {"Y": f32(0)},
            "the sum of nothing",
        )
        for system in (REFERENCE, ORT)
    ),
    about(
        REFERENCE,
        "takes the logarithm of a softmax that is 0",
        "Y = SoftmaxCrossEntropyLoss (X, t)",
        {"X": f32([[200, 0]]), "t": np.array([1])},
        {"Y": f32(200)},
        "log Σ eˣ − 0 is 200",
    ),
)
