"""Findings about results in double that are only as good as float32."""

from __future__ import annotations

import math

import numpy as np

from refgrad.conformance.findings.finding import ORT, Finding, model

_SPECTRUM = np.array([1.0, 2.0, -3.0])

FINDINGS = (
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
    Finding(
        ORT,
        "DFT",
        "is off by 1e-8 in double where it is inverse and the length no power of 2",
        model("""
            <ir_version: 10, opset_import: ["" : 20]>
            transform (double[1, 3, 2] x) => (double[1, 3, 2] y) { y = DFT <inverse = 1> (x) }
        """),
        {"x": np.stack([_SPECTRUM, 0 * _SPECTRUM], -1)[np.newaxis]},
        {"y": np.array([[[0, 0], [0.5, 5 * math.sqrt(3) / 6], [0.5, -5 * math.sqrt(3) / 6]]])},
        proof="(x₀ + x₁·w + x₂·w²)/3 with w = 1, (−1 + i√3)/2 and its conjugate: 0, 1/2 ± i·5√3/6",
        tolerance=1e-12,
    ),
    Finding(
        ORT,
        "Attention",
        "is off by 1e-8 in double",
        model("""
            <ir_version: 11, opset_import: ["" : 23]>
            attend (double[1, 1, 1, 2] q, double[1, 1, 2, 2] k, double[1, 1, 2, 1] v) => (double[1, 1, 1, 1] y) {
                y = Attention(q, k, v)
            }
        """),
        {
            "q": np.array([[[[1.0, 0.0]]]]),
            "k": np.array([[[[1.0, 0.0], [0.0, 0.0]]]]),
            "v": np.array([[[[1.0], [0.0]]]]),
        },
        {"y": np.array([[[[1 / (1 + math.exp(-1 / math.sqrt(2)))]]]])},
        proof="the scores are 1/√2 and 0, of which the softmax of the first is 1/(1 + e^(−1/√2))",
        tolerance=1e-12,
    ),
)
