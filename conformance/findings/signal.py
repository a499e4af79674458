"""Findings about Fourier transforms and what goes with them."""

from __future__ import annotations

import math

import numpy as np

from refgrad.conformance.findings.finding import ORT, Finding, about, f32, model

_SPECTRUM = np.array([1.0, 2.0, -3.0])

FINDINGS: tuple[Finding, ...] = (
    about(
        ORT,
        "reads more of the bins than the length of the signal",
        "Y = DFT <inverse = 1, onesided = 1> (X, length)",
        {"X": f32([[[1, 0], [2, 0]]]), "length": np.array(1)},
        {"Y": f32([[[1]]])},
        "if dft_length is less than the axis dimension, only the first dft_length values are used",
        20,
    ),
    about(
        ORT,
        "ends a range of large whole numbers too late",
        "Y = Range (start, limit, delta)",
        {"start": np.array(2**53 + 1), "limit": np.array(2**53 + 4), "delta": np.array(1)},
        {"Y": np.array([2**53 + 1, 2**53 + 2, 2**53 + 3])},
        "the limit is exclusive",
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
)
