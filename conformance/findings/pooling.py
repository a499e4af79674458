"""Findings about pooling."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, Finding, model

FINDINGS = tuple(
    Finding(
        ORT,
        op_type,
        "gives the lowest finite number for a window of −∞",
        model(f"""
            <ir_version: 10, opset_import: ["" : 21]>
            pool (float[1, 1, 2] x) => (float[1, 1, 1] y) {{ y = {op_type} {attributes} (x) }}
        """),
        {"x": np.full((1, 1, 2), -np.inf, np.float32)},
        {"y": np.full((1, 1, 1), -np.inf, np.float32)},
        proof="the maximum of a window is one of its elements, and all are −∞",
    )
    for op_type, attributes in (("MaxPool", "<kernel_shape = [2]>"), ("GlobalMaxPool", ""))
)
