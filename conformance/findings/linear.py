"""Findings about matrix products."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32

FINDINGS: tuple[Finding, ...] = (
    about(
        ORT,
        "fails on an implied result whose letters are upper and lower case",
        'Y = Einsum <equation = "bA"> (X)',
        {"X": f32([[1, 2]])},
        {"Y": f32([[1], [2]])},
        "in implicit form the indices are sorted by ASCII: A before b",
        12,
    ),
    about(
        ORT,
        "fails where an empty batch is on the right",
        "Y = MatMul (A, B)",
        {"A": np.ones((1, 2, 3), np.float32), "B": np.ones((0, 3, 1), np.float32)},
        {"Y": np.ones((0, 2, 1), np.float32)},
        "it behaves like numpy.matmul: the batch of one is broadcast to none, as where the empty batch is on the left",
    ),
    about(
        REFERENCE,
        "fails in float16",
        "Y = Det (X)",
        {"X": np.array([[1, 2], [3, 4]], np.float16)},
        {"Y": np.float16(-2)},
        "1·4 − 2·3",
    ),
)
