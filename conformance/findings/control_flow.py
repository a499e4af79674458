"""Findings about operators with subgraphs."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, f32, model

# The state of each of two steps, twice as large as before.
_LOOP = """<ir_version: 10, opset_import: ["" : 21]> twice (int64 M, float[2] x) => (float[2, 2] s) {
    %s = Loop (M, "", x) <body = body (int64 i, bool go, float[2] h) => (bool on, float[2] n, float[2] o) {
        on = Identity (go)
        n = Add (h, h)
        o = Identity (n)
    }>
}"""
_TWICE = {"M": np.array(2), "x": f32([1, 2])}

FINDINGS = (
    Finding(
        REFERENCE,
        "Scan",
        "takes the absent sequence_lens of opset 8 for the first state",
        model("""
            <ir_version: 8, opset_import: ["" : 8]>
            running_sum (float[1, 1] a, float[1, 3, 1] x) => (float[1, 1] b, float[1, 3, 1] y) {
                b, y = Scan <num_scan_inputs = 1, body = body (float[1] s, float[1] v) => (float[1] t, float[1] o) {
                    t = Add (s, v)
                    o = Identity (t)
                }> ("", a, x)
            }
        """),
        {"a": f32([[1]]), "x": f32([[[1], [2], [3]]])},
        {"b": f32([[7]]), "y": f32([[[2], [4], [7]]])},
        proof="sequence_lens is optional; 1 + 1, 2 + 2, 4 + 3",
    ),
    Finding(
        ORT,
        "Loop",
        "ends the process where the last value of a state has no name",
        model(_LOOP % '"", s'),
        _TWICE,
        {"s": f32([[2, 4], [4, 8]])},
        proof="an output without a name is one that nobody needs; 1 · 2, 2 · 2 and 2 · 2, 4 · 2",
        crashes=True,
    ),
    Finding(
        REFERENCE,
        "Loop",
        "joins what the steps give, where it has to stack it",
        model(_LOOP % "y, s"),
        _TWICE,
        {"s": f32([[2, 4], [4, 8]])},
        proof="each scan output is the concatenation of the values along a new first axis",
    ),
)
