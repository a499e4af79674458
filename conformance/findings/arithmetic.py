"""Findings about elementwise arithmetic."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, gradient, model

F32 = np.float32
OLD: tuple[tuple[str, type, list[list[int]], list[int], list[list[int]], type], ...] = (
    ("Add", F32, [[1, 2], [3, 4]], [10, 20], [[11, 12], [23, 24]], F32),
    ("Sub", F32, [[1, 2], [3, 4]], [1, 2], [[0, 1], [1, 2]], F32),
    ("Mul", F32, [[1, 2], [3, 4]], [1, 2], [[1, 2], [6, 8]], F32),
    ("Div", F32, [[1, 2], [4, 6]], [1, 2], [[1, 2], [2, 3]], F32),
    ("Pow", F32, [[1, 2], [3, 4]], [1, 2], [[1, 2], [9, 16]], F32),
    ("And", bool, [[1, 0], [1, 0]], [1, 0], [[1, 0], [0, 0]], bool),
    ("Or", bool, [[1, 0], [1, 0]], [1, 0], [[1, 1], [1, 0]], bool),
    ("Xor", bool, [[1, 0], [1, 0]], [1, 0], [[0, 1], [1, 0]], bool),
    ("Equal", np.int32, [[1, 2], [1, 2]], [1, 2], [[1, 0], [0, 1]], bool),
    ("Greater", F32, [[1, 2], [2, 3]], [1, 2], [[0, 1], [0, 1]], bool),
    ("Less", F32, [[0, 1], [1, 2]], [1, 2], [[1, 0], [1, 0]], bool),
)

_EMPTY = np.zeros((0, 3), F32)

FINDINGS: tuple[Finding, ...] = (
    *(
        about(
            REFERENCE,
            "does not know the attribute axis of opset 6 and before",
            f"C = {op} <broadcast = 1, axis = 0> (A, B)",
            {"A": np.array(a, dtype), "B": np.array(b, dtype)},
            {"C": np.array(c, result)},
            "axis is where the shape of B begins in that of A: each row of A has one element of B",
            6,
        )
        for op, dtype, a, b, c, result in OLD
    ),
    about(
        REFERENCE,
        "reads the name of the type as a number",
        'Y = Cast <to = "INT32"> (X)',
        {"X": f32([1.5])},
        {"Y": np.array([1], np.int32)},
        "to is a string in opset 1, one of the names in the enum DataType",
        1,
    ),
    about(
        REFERENCE,
        "is not implemented before opset 6",
        "Y = Clip <min = 0.0> (X)",
        {"X": f32([-1, 1])},
        {"Y": f32([0, 1])},
        "elements under min are replaced by it",
        1,
    ),
    about(
        REFERENCE,
        "fails where the first input is the smaller",
        "Y = Mean (A, B)",
        {"A": f32([1]), "B": f32([1, 3])},
        {"Y": f32([1, 2])},
        "Mean broadcasts multidirectionally",
    ),
    about(
        REFERENCE,
        "fails on negative exponents of whole numbers",
        "Z = Pow (X, Y)",
        {"X": np.array([1, 2], np.int32), "Y": np.array([-1, -1], np.int32)},
        {"Z": np.array([1, 0], np.int32)},
        "1 and 1/2, in the type of X",
    ),
    Finding(
        ORT,
        "Where",
        "gives 0 where it chooses −0",
        model("""
            <ir_version: 10, opset_import: ["" : 21]>
            choose (bool[2] c, float[2] x, float[2] y) => (float[2] r) { w = Where(c, x, y) r = Reciprocal(w) }
        """),
        {"c": np.array([True, False]), "x": f32([-0.0, 5]), "y": f32([5, -0.0])},
        {"r": f32([-np.inf, -np.inf])},
        proof="Where returns elements of x and y; the reciprocal of −0 is −∞ (IEEE 754, 7.3)",
    ),
    gradient(
        "fails on empty operands",
        "Y = Div (A, B)",
        "A_grad, B_grad = com.microsoft.DivGrad (Y_grad, A, B)",
        {"A": _EMPTY, "B": np.ones((1, 3), F32), "Y_grad": _EMPTY},
        {"A_grad": _EMPTY, "B_grad": np.zeros((1, 3), F32)},
    ),
    gradient(
        "gives an empty operand a gradient of one element",
        "Y = Div (A, B)",
        "A_grad, B_grad = com.microsoft.DivGrad (Y_grad, A, B)",
        {"A": f32([]), "B": np.array(2, F32), "Y_grad": f32([])},
        {"A_grad": f32([]), "B_grad": np.array(0, F32)},
    ),
    about(
        ORT,
        "takes NaN for 0 in float16",
        "Y = Sign (X)",
        {"X": np.array([np.nan], np.float16)},
        {"Y": np.array([np.nan], np.float16)},
        "0 is for elements that equal 0; in float32 and double ONNX Runtime gives NaN",
    ),
)
