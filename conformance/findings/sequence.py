"""Findings about sequences and optionals."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, model

_HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
_A, _B, _C = (np.array([value], np.float32) for value in (1, 2, 3))

_INSERT = f"""{_HEAD}
    insert (seq(float[1]) sequence, float[1] tensor, int64 position) => (seq(float[1]) output) {{
        output = SequenceInsert (sequence, tensor, position)
    }}
"""
_POSITIONS = "the accepted range for 'position' is [-n, n]; it is where the new tensor is inserted"

FINDINGS = (
    Finding(
        REFERENCE,
        "SequenceInsert",
        "inserts at the front where the position is the length of the sequence",
        model(_INSERT),
        {"sequence": [_A, _B], "tensor": _C, "position": np.array(2)},
        {"output": [_A, _B, _C]},
        proof=_POSITIONS,
    ),
    Finding(
        REFERENCE,
        "SequenceInsert",
        "divides by zero where the sequence is empty and the position is given",
        model(_INSERT),
        {"sequence": [], "tensor": _C, "position": np.array(0)},
        {"output": [_C]},
        proof=_POSITIONS,
    ),
    Finding(
        REFERENCE,
        "SequenceMap",
        "fails on an empty sequence",
        model(f"""{_HEAD}
            map (seq(float[1]) x) => (seq(float[1]) y) {{
                y = SequenceMap (x) <body = negative (float[1] element) => (float[1] result) {{ result = Neg (element) }}>
            }}
        """),
        {"x": []},
        {"y": []},
        proof="the body is applied to each element, of which there is none",
    ),
    Finding(
        REFERENCE,
        "SequenceMap",
        "gives the body the whole of a second sequence where there is a third input",
        model(f"""{_HEAD}
            map (seq(float[1]) x, seq(float[1]) z, float[1] w) => (seq(float[1]) y) {{
                y = SequenceMap (x, z, w) <body = sum (float[1] a, float[1] b, float[1] c) => (float[1] result) {{
                    result = Sum (a, b, c)
                }}>
            }}
        """),
        {"x": [_A, _B], "z": [_B, _C], "w": _A},
        {"y": [np.array([4], np.float32), np.array([6], np.float32)]},
        proof="1 + 2 + 1 and 2 + 3 + 1: sequences are indexed in every iteration, tensors are used as they are",
    ),
    Finding(
        REFERENCE,
        "Optional",
        "says that an optional without an element has one",
        model(f"""{_HEAD}
            empty () => (bool has) {{
                nothing = Optional <type = float[1]> ()
                has = OptionalHasElement (nothing)
            }}
        """),
        {},
        {"has": np.array(False)},
        proof="without an input it is the empty optional of the type in the attribute; the node test test_if_opt",
    ),
    Finding(
        REFERENCE,
        "Optional",
        "puts a sequence into another one",
        model(f"""{_HEAD}
            full (seq(float[1]) x) => (seq(float[1]) y) {{
                some = Optional (x)
                y = OptionalGetElement (some)
            }}
        """),
        {"x": [_A, _B]},
        {"y": [_A, _B]},
        proof="OptionalGetElement gives the element of the optional, which is x",
    ),
    Finding(
        ORT,
        "SplitToSequence",
        "fails with keepdims = 0 where the size of the pieces is given",
        model(f"""{_HEAD}
            split (float[3] x, int64 size) => (seq(float[N]) y) {{ y = SplitToSequence <keepdims = 0> (x, size) }}
        """),
        {"x": np.array([1, 2, 3], np.float32), "size": np.array(2)},
        {"y": [np.array([1, 2], np.float32), np.array([3], np.float32)]},
        proof="if input 'split' is specified, keepdims is ignored",
    ),
)
