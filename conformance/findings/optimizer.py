"""Findings about optimizers."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import REFERENCE, Finding, f32, model

FINDINGS = (
    Finding(
        REFERENCE,
        "Adam",
        "gives double for float after the first step",
        model("""
            <ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>
            step (float R, int64 T, float[1] X, float[1] G, float[1] V, float[1] H) => (float[1] x, float[1] v, float[1] h) {
                x, v, h = ai.onnx.preview.training.Adam <alpha = 0.0, beta = 0.0> (R, T, X, G, V, H)
            }
        """),
        {
            "R": np.array(0.5, np.float32),
            "T": np.array(1),
            "X": f32([3]),
            "G": f32([2]),
            "V": f32([0]),
            "H": f32([0]),
        },
        {"x": f32([2.5]), "v": f32([2]), "h": f32([4])},
        proof="the result has the type of X: 3 − 0.5·2/√4",
    ),
)
