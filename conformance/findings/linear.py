"""Findings about matrix products."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, Finding, about

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        ORT,
        "fails on an implied result whose letters are upper and lower case",
        'Y = Einsum <equation = "bA"> (X)',
        {"X": F32([[1, 2]])},
        {"Y": F32([[1], [2]])},
        "in implicit form the indices are sorted by ASCII: A before b",
        12,
    ),
)
