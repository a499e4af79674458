"""Findings about Resize and Upsample."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "fails on the attribute scales",
        "Y = Upsample <scales = [2.0]> (X)",
        {"X": F32([1])},
        {"Y": F32([1, 1])},
        "output_dimension = floor(input_dimension · scale)",
        7,
    ),
    about(
        REFERENCE,
        "fails on the attributes of opset 1",
        "Y = Upsample <height_scale = 1.0, width_scale = 2.0> (X)",
        {"X": F32([1]).reshape(1, 1, 1, 1)},
        {"Y": F32([1, 1]).reshape(1, 1, 1, 2)},
        "output_width = floor(input_width · width_scale)",
        1,
    ),
    about(
        REFERENCE,
        "fails on a scale that is not whole",
        "Y = Upsample (X, scales)",
        {"X": F32([1, 2]), "scales": F32([1.5])},
        {"Y": F32([1, 1, 2])},
        "elements 0, 1, 2 are read at 0, 2/3 and 4/3",
        9,
    ),
    about(
        REFERENCE,
        "fails on linear",
        'Y = Upsample <mode = "linear"> (X, scales)',
        {"X": F32([1, 2]), "scales": F32([2])},
        {"Y": F32([1, 1.5, 2, 2])},
        "elements are read at 0, 1/2, 1, and 3/2, where there is no further one",
        9,
    ),
    about(
        REFERENCE,
        "fails in opset 10",
        "Y = Resize (X, scales)",
        {"X": F32([1]), "scales": F32([2])},
        {"Y": F32([1, 1])},
        "output_dimension = floor(input_dimension · scale)",
        10,
    ),
    about(
        ORT,
        "copies what keeps its shape",
        'Y = Resize <mode = "linear"> (X, "", scales)',
        {"X": F32([0, 4, 8]), "scales": F32([1.25])},
        {"Y": F32([0, 2.8, 6])},
        "the elements are read at (i + 0.5)/1.25 − 0.5: −0.1, 0.7 and 1.5",
    ),
)
