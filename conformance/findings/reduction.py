"""Findings about reductions."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, model

F32 = np.float32
INF = np.inf
EMPTY = (
    ("ReduceSum", 0),
    ("ReduceProd", 1),
    ("ReduceMax", -INF),
    ("ReduceMin", INF),
    ("ReduceL1", 0),
    ("ReduceL2", 0),
    ("ReduceSumSquare", 0),
    ("ReduceLogSum", -INF),
    ("ReduceLogSumExp", -INF),
)

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "gives NaN where every element is −∞",
        "Y = ReduceLogSumExp <keepdims = 0> (X)",
        {"X": f32([-np.inf, -np.inf])},
        {"Y": f32(-np.inf)},
        "log(0 + 0)",
    ),
    about(REFERENCE, "fails on a scalar", "Y = ReduceLogSumExp (X)", {"X": f32(2)}, {"Y": f32(2)}, "log e²"),
    about(
        REFERENCE,
        "fails on whole numbers",
        "Y = ReduceLogSumExp <keepdims = 0> (X)",
        {"X": np.array([3])},
        {"Y": np.array(3)},
        "log e³",
    ),
    about(
        REFERENCE,
        "fails on whole numbers",
        "Y = ReduceLogSum <keepdims = 0> (X)",
        {"X": np.array([1])},
        {"Y": np.array(0)},
        "log 1",
    ),
    about(
        REFERENCE,
        "gives int64 for int32",
        "Y = ReduceSumSquare <keepdims = 0> (X)",
        {"X": np.array([1, 2], np.int32)},
        {"Y": np.int32(5)},
        "1 + 4, in the type of the data",
    ),
    *(
        about(
            ORT,
            "does not reduce an axis without elements that is counted from the end",
            f"Y = {op} (X, axes)",
            {"X": np.zeros((0, 2), F32), "axes": np.array([-2])},
            {"Y": np.full((1, 2), value, F32)},
            f"a reduction over an empty set yields {value:g}",
            18,
        )
        for op, value in EMPTY
    ),
    *(
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
    ),
    *(
        about(
            ORT,
            "keeps the size of an axis that is counted from the end where another axis is empty",
            f"Y = {op} <axis = -1> (X)",
            {"X": np.zeros((0, 2), F32)},
            {"Y": np.zeros((0, 1), np.int64)},
            "with keepdims the axis is retained with length 1",
        )
        for op in ("ArgMax", "ArgMin")
    ),
    about(
        REFERENCE,
        "overflows in float16",
        "Y = ReduceL2 <keepdims = 0> (X)",
        {"X": np.array([300, 400], np.float16)},
        {"Y": np.float16(500)},
        "√(9e4 + 16e4)",
    ),
    about(
        REFERENCE,
        "overflows in float16",
        "Y = ReduceMean <keepdims = 0> (X)",
        {"X": np.array([60000, 60000], np.float16)},
        {"Y": np.float16(60000)},
        "120000/2",
    ),
    about(
        REFERENCE,
        "rounds after each step in bfloat16",
        "Y = ReduceSum <keepdims = 0> (X)",
        {"X": np.array([256, 1, 1], ml_dtypes.bfloat16)},
        {"Y": np.array(258, ml_dtypes.bfloat16)},
        "256 + 1 + 1, which bfloat16 holds",
    ),
    about(
        REFERENCE,
        "rounds after each step in bfloat16",
        "Y = CumSum (X, axis)",
        {"X": np.array([256, 1, 1], ml_dtypes.bfloat16), "axis": np.array(0)},
        {"Y": np.array([256, 256, 258], ml_dtypes.bfloat16)},
        "256 + 1 + 1, which bfloat16 holds; 257 is rounded to even",
    ),
    *(
        about(
            ORT,
            "loses NaN behind another element",
            f"Y = {op} <keepdims = 0> (X)",
            {"X": f32([1, np.nan])},
            {"Y": f32(np.nan)},
            "a result does not depend on the order of the elements: with NaN in front ONNX Runtime itself gives NaN",
        )
        for op in ("ReduceMax", "ReduceMin")
    ),
)
