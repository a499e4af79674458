"""Findings about quantization."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "wraps infinity",
        "Y = QuantizeLinear (X, scale)",
        {"X": F32([np.inf, -np.inf]), "scale": F32(1)},
        {"Y": np.uint8([255, 0])},
        "saturate((x / y_scale) + y_zero_point)",
    ),
    about(
        REFERENCE,
        "is not implemented in opset 10",
        "Y = DequantizeLinear (X, scale)",
        {"X": np.uint8([4]), "scale": F32(0.5)},
        {"Y": F32([2])},
        "(x − x_zero_point)·x_scale",
        10,
    ),
    *(
        about(
            system,
            "fails on a zero point for each row",
            'Y = MatMulInteger (A, B, "", zero)' if False else "Y = MatMulInteger (A, B, zero)",
            {"A": np.uint8([[1], [2]]), "B": np.uint8([[3]]), "zero": np.uint8([0, 1])},
            {"Y": np.int32([[3], [3]])},
            "a zero point of one axis is per row: (1 − 0)·3 and (2 − 1)·3",
        )
        for system in (REFERENCE, ORT)
    ),
    about(
        ORT,
        "fails on a zero point for each channel of the result",
        "Y = ConvInteger (X, W, x, w)",
        {"X": np.uint8([[[1]]]), "W": np.uint8([[[3]], [[3]]]), "x": np.uint8(0), "w": np.uint8([0, 1])},
        {"Y": np.int32([[[3], [2]]])},
        "a zero point of one axis has one element for each output channel: 1·(3 − 0) and 1·(3 − 1)",
    ),
)
