"""Findings about attention."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "returns the capped product as the plain one",
        "Y, k, v, qk = Attention <softcap = 1.0, scale = 1.0, qk_matmul_output_mode = 0> (Q, K, V)",
        {"Q": f32([2]).reshape(1, 1, 1, 1), "K": f32([2]).reshape(1, 1, 1, 1), "V": f32([3]).reshape(1, 1, 1, 1)},
        {"Y": f32([3]).reshape(1, 1, 1, 1), "qk": f32([4]).reshape(1, 1, 1, 1)},
        "mode 0 is the output of the product of Q and K: 2·2",
        23,
    ),
    about(
        REFERENCE,
        "fails without keys",
        "Y = Attention (Q, K, V)",
        {"Q": np.ones((1, 1, 1, 1), F32), "K": np.ones((1, 1, 0, 1), F32), "V": np.ones((1, 1, 0, 1), F32)},
        {"Y": np.zeros((1, 1, 1, 1), F32)},
        "a sum over no values",
        23,
    ),
    about(
        ORT,
        "returns the lowest finite number for what the mask hides",
        "Y, k, v, qk = Attention <qk_matmul_output_mode = 2, scale = 1.0> (Q, K, V, mask)",
        {
            "Q": f32([1]).reshape(1, 1, 1, 1),
            "K": f32([1, 1]).reshape(1, 1, 2, 1),
            "V": f32([3, 4]).reshape(1, 1, 2, 1),
            "mask": np.array([[True, False]]),
        },
        {"Y": f32([3]).reshape(1, 1, 1, 1), "qk": f32([1, -np.inf]).reshape(1, 1, 1, 2)},
        "the function body adds −∞ where the mask is false",
        23,
    ),
)
