"""Findings about elementwise operators."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, Finding, model

FINDINGS = (
    Finding(
        ORT,
        "Where",
        "gives 0 where it chooses −0",
        model("""
            <ir_version: 10, opset_import: ["" : 21]>
            choose (bool[2] c, float[2] x, float[2] y) => (float[2] r) { w = Where(c, x, y) r = Reciprocal(w) }
        """),
        {"c": np.array([True, False]), "x": np.float32([-0.0, 5]), "y": np.float32([5, -0.0])},
        {"r": np.float32([-np.inf, -np.inf])},
        proof="Where returns elements of x and y; the reciprocal of −0 is −∞ (IEEE 754, 7.3)",
    ),
)
