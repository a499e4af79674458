"""Findings about attention."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import REFERENCE, Finding, about

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "returns the capped product as the plain one",
        "Y, k, v, qk = Attention <softcap = 1.0, scale = 1.0, qk_matmul_output_mode = 0> (Q, K, V)",
        {"Q": F32([2]).reshape(1, 1, 1, 1), "K": F32([2]).reshape(1, 1, 1, 1), "V": F32([3]).reshape(1, 1, 1, 1)},
        {"Y": F32([3]).reshape(1, 1, 1, 1), "qk": F32([4]).reshape(1, 1, 1, 1)},
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
)
