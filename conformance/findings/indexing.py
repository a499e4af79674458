"""Findings about gather, scatter and slice."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, model

FINDINGS = (
    Finding(
        REFERENCE,
        "GatherElements",
        "fails where the index is smaller than the data along an axis that is not gathered",
        model("""
            <ir_version: 10, opset_import: ["" : 21]>
            gather (float[2, 3] data, int64[1, 2] indices) => (float[1, 2] output) {
                output = GatherElements <axis = 1> (data, indices)
            }
        """),
        {"data": np.arange(6, dtype=np.float32).reshape(2, 3), "indices": np.array([[2, 0]])},
        {"output": np.array([[2, 0]], np.float32)},
        proof="out[i][j] = input[i][index[i][j]] for the i and j of the index",
    ),
    Finding(
        ORT,
        "Unique",
        "loses elements beside a NaN",
        model("""
            <ir_version: 10, opset_import: ["" : 21]>
            distinct (float[4] x) => (float[N] y) { y = Unique(x) }
        """),
        {"x": np.float32([np.nan, 1, 2, 3])},
        {"y": np.float32([1, 2, 3, np.nan])},
        proof="1, 2 and 3 are elements of the input, each once",
    ),
)
