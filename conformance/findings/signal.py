"""Findings about Fourier transforms and what goes with them."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, Finding, about, f32

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
)
