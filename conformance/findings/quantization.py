"""Findings about quantization."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32

FORMULA = "y = saturate((x / y_scale) + y_zero_point), x / y_scale rounded to the nearest even"


def _float8(*values: float) -> np.ndarray:
    return np.array(values, ml_dtypes.float8_e4m3fn)


def _one(value: float, kind: type) -> np.ndarray:
    return np.array(value, kind)


PRODUCT = "Y = QLinearMatMul (A, a, az, B, b, bz, y, yz)"
CONVOLUTION = "Y = QLinearConv (X, x, xz, W, w, wz, y, yz)"
ONE = {
    "A": np.array([[1]], np.uint8),
    "a": f32(1),
    "az": np.uint8(0),
    "B": np.array([[1]], np.uint8),
    "b": f32(1),
    "bz": np.uint8(0),
}
PIXEL = {
    "X": np.array([[[[1]]]], np.uint8),
    "x": f32(1),
    "xz": np.uint8(0),
    "W": np.array([[[[1]]]], np.uint8),
    "w": f32(1),
    "wz": np.uint8(0),
}
LINE = {
    "X": np.array([[[1]]], np.uint8),
    "x": f32(1),
    "xz": np.uint8(0),
    "W": np.array([[[1]], [[1]]], np.uint8),
    "w": f32([1, 2]),
}

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "wraps infinity",
        "Y = QuantizeLinear (X, scale)",
        {"X": f32([np.inf, -np.inf]), "scale": f32(1)},
        {"Y": np.array([255, 0], np.uint8)},
        "saturate((x / y_scale) + y_zero_point)",
    ),
    about(
        REFERENCE,
        "is not implemented in opset 10",
        "Y = DequantizeLinear (X, scale)",
        {"X": np.array([4], np.uint8), "scale": f32(0.5)},
        {"Y": f32([2])},
        "(x − x_zero_point)·x_scale",
        10,
    ),
    *(
        about(
            system,
            "fails on a zero point for each row",
            "Y = MatMulInteger (A, B, zero)",
            {"A": np.array([[1], [2]], np.uint8), "B": np.array([[3]], np.uint8), "zero": np.array([0, 1], np.uint8)},
            {"Y": np.array([[3], [3]], np.int32)},
            "a zero point of one axis is per row: (1 − 0)·3 and (2 − 1)·3",
        )
        for system in (REFERENCE, ORT)
    ),
    about(
        ORT,
        "fails on a zero point for each channel of the result",
        "Y = ConvInteger (X, W, x, w)",
        {
            "X": np.array([[[1]]], np.uint8),
            "W": np.array([[[3]], [[3]]], np.uint8),
            "x": np.uint8(0),
            "w": np.array([0, 1], np.uint8),
        },
        {"Y": np.array([[[3], [2]]], np.int32)},
        "a zero point of one axis has one element for each output channel: 1·(3 − 0) and 1·(3 − 1)",
    ),
    about(
        REFERENCE,
        "rounds after the zero point is added",
        PRODUCT,
        ONE | {"y": f32(2), "yz": np.uint8(1)},
        {"Y": np.array([[1]], np.uint8)},
        f"{FORMULA}: 1/2 is rounded to 0, and 0 + 1 is 1",
    ),
    about(
        REFERENCE,
        "rounds after the zero point is added",
        CONVOLUTION,
        PIXEL | {"y": f32(2), "yz": np.uint8(1)},
        {"Y": np.array([[[[1]]]], np.uint8)},
        f"{FORMULA}: 1/2 is rounded to 0, and 0 + 1 is 1",
    ),
    about(
        REFERENCE,
        "makes four axes of three where each channel has its scale",
        CONVOLUTION,
        LINE | {"wz": np.array([0, 0], np.uint8), "y": f32(1), "yz": np.uint8(0)},
        {"Y": np.array([[[1], [2]]], np.uint8)},
        "1·1·1 and 1·1·2, of the shape (1, 2, 1)",
    ),
    *(
        about(
            system,
            "fails on a scale for each row",
            PRODUCT,
            {"A": np.array([[1, 0], [2, 0]], np.uint8), "a": f32([1, 2]), "az": np.array([0, 1], np.uint8)}
            | {"B": np.array([[3], [0]], np.uint8), "b": f32(1), "bz": np.uint8(0), "y": f32(1), "yz": np.uint8(0)},
            {"Y": np.array([[3], [6]], np.uint8)},
            "an M element vector is per row: 1·(1 − 0)·3 and 2·(2 − 1)·3",
        )
        for system in (REFERENCE, ORT)
    ),
    about(
        REFERENCE,
        "fails on float8",
        PRODUCT,
        {"A": _float8(2).reshape(1, 1), "a": f32(1), "az": _one(0, ml_dtypes.float8_e4m3fn)}
        | {"B": _float8(3).reshape(1, 1), "b": f32(1), "bz": _one(0, ml_dtypes.float8_e4m3fn)}
        | {"y": f32(2), "yz": _one(0, ml_dtypes.float8_e4m3fn)},
        {"Y": _float8(3).reshape(1, 1)},
        "2·3/2",
    ),
    about(
        ORT,
        "fails on zero points for each row of a batch",
        "Y = MatMulInteger (A, B, zero)",
        {
            "A": np.array([[[1], [2]]], np.uint8),
            "B": np.array([[[3]]], np.uint8),
            "zero": np.array([[[0], [1]]], np.uint8),
        },
        {"Y": np.array([[[3], [3]]], np.int32)},
        "an N-D zero point [D1, D2, M, 1] is per row: (1 − 0)·3 and (2 − 1)·3",
    ),
    about(
        REFERENCE,
        "fails on a zero point for each channel of lines",
        "Y = ConvInteger (X, W, x, w)",
        {
            "X": np.array([[[1]]], np.uint8),
            "W": np.array([[[3]], [[3]]], np.uint8),
            "x": np.uint8(0),
            "w": np.array([0, 1], np.uint8),
        },
        {"Y": np.array([[[3], [2]]], np.int32)},
        "a zero point of one axis has one element for each output channel: 1·(3 − 0) and 1·(3 − 1)",
    ),
    about(
        REFERENCE,
        "ignores a zero point of float8",
        "Y = QuantizeLinear (X, scale, zero)",
        {"X": f32([2]), "scale": f32(1), "zero": _one(1, ml_dtypes.float8_e4m3fn)},
        {"Y": _float8(3)},
        "the formula remains the same for consistency: 2/1 + 1",
    ),
    about(
        REFERENCE,
        "refuses a zero point of float8",
        "Y = DequantizeLinear (X, scale, zero)",
        {"X": _float8(2), "scale": f32(0.5), "zero": _one(1, ml_dtypes.float8_e4m3fn)},
        {"Y": f32([0.5])},
        "the formula remains the same for consistency: (2 − 1)·1/2",
    ),
    about(
        REFERENCE,
        "ignores a zero point of float4",
        "Y = DequantizeLinear (X, scale, zero)",
        {"X": np.array([2], ml_dtypes.float4_e2m1fn), "scale": f32(0.5), "zero": _one(1, ml_dtypes.float4_e2m1fn)},
        {"Y": f32([0.5])},
        "the formula remains the same for consistency: (2 − 1)·1/2",
        23,
    ),
    about(
        REFERENCE,
        "refuses round_mode, which it has from opset 24 on",
        'Y = CastLike <round_mode = "up"> (X, t)',
        {"X": f32([3]), "t": _one(1, ml_dtypes.float8_e8m0fnu)},
        {"Y": np.array([4], ml_dtypes.float8_e8m0fnu)},
        "float8e8m0 has 2 and 4 there",
        24,
    ),
    about(
        REFERENCE,
        "rounds a double twice, by way of float32",
        "Y = Cast <to = 17> (X)",
        {"X": np.array([1 + 2**-4 + 2**-40], np.float64)},
        {"Y": _float8(1.125)},
        "float8e4m3fn has 1 and 1 + 1/8 there; X is above the middle",
    ),
    about(
        REFERENCE,
        "rounds integers twice, by way of float32",
        "Y = Cast <to = 16> (X)",
        {"X": np.array([2**25 + 2**17 + 1], np.int32)},
        {"Y": np.array([2**25 + 2**18], ml_dtypes.bfloat16)},
        "bfloat16 has 2²⁵ and 2²⁵ + 2¹⁸ there; X is above the middle",
    ),
    about(
        ORT,
        "rounds a double twice, by way of float32",
        "Y = Cast <to = 10> (X)",
        {"X": np.array([1 + 2**-11 + 2**-40], np.float64)},
        {"Y": np.array([1 + 2**-10], np.float16)},
        "float16 has 1 and 1 + 2⁻¹⁰ there; X is above the middle",
        tolerance=1e-6,
    ),
    *(
        about(
            REFERENCE,
            fault,
            f"Y = Cast <to = 24{attributes}> (X)",
            {"X": f32([x])},
            {"Y": np.array([y], ml_dtypes.float8_e8m0fnu)},
            proof,
            25,
        )
        for fault, attributes, x, y, proof in (
            (
                "makes NaN of infinity in float8e8m0",
                "",
                np.inf,
                2.0**127,
                "Inf is E8M0_MAX where it saturates and rounds up",
            ),
            ("rounds up what float8e8m0 has", "", 2.0**-127, 2.0**-127, "2⁻¹²⁷ is E8M0_MIN"),
            (
                "has a 0 in float8e8m0",
                ', saturate = 0, round_mode = "nearest"',
                0.0,
                np.nan,
                "0 is NaN where it does not saturate",
            ),
            (
                "makes the least float8e8m0 of what is below it",
                ', saturate = 0, round_mode = "nearest"',
                2.0**-130,
                np.nan,
                "x < E8M0_MIN is NaN where it does not saturate",
            ),
        )
    ),
    about(
        ORT,
        "divides halves in float32",
        "Y = QuantizeLinear (X, scale)",
        {"X": np.array([1709], np.float16), "scale": np.float16(17)},
        {"Y": np.array([100], np.uint8)},
        "the type of y_scale determines the precision of the division: 1709/17 is 100.53, 100.5 in halves, rounded to 100",
        23,
    ),
)
