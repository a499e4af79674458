"""Findings about operators with subgraphs."""

from __future__ import annotations

from refgrad.conformance.findings.finding import REFERENCE, Finding, f32, model

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
)
