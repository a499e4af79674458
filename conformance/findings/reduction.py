"""Findings about reductions."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, Finding, model

FINDINGS = tuple(
    Finding(
        ORT,
        op_type,
        "keeps the size of a reduced axis where another axis is empty",
        model(f"""
            <ir_version: 10, opset_import: ["" : 20]>
            reduce (float[2, N, 4] x, int64[1] axes) => (float[A, B, C] y) {{ y = {op_type}(x, axes) }}
        """),
        {"x": np.zeros((2, 0, 4), np.float32), "axes": np.array([-1])},
        {"y": np.zeros((2, 0, 1), np.float32)},
        proof="with keepdims=1 the reduced dimensions are retained with length 1",
    )
    for op_type in ("ReduceSum", "ReduceMax")
)
