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
        REFERENCE,
        "fails in float16",
        "Y = Det (X)",
        {"X": np.array([[1, 2], [3, 4]], np.float16)},
        {"Y": np.float16(-2)},
        "1·4 − 2·3",
    ),
)
