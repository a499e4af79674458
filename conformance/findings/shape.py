"""Findings about operators that move elements."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, training

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "fails on negative pads",
        "Y = Pad (X, pads)",
        {"X": f32([1, 2]), "pads": np.array([-1, 1])},
        {"Y": f32([2, 0])},
        "pads are the elements to add, or to remove if negative",
    ),
    about(
        REFERENCE,
        "fails on a scalar",
        "Y = Pad (X, pads)",
        {"X": f32(1), "pads": np.zeros(0, np.int64)},
        {"Y": f32(1)},
        "there is nothing to pad",
    ),
    about(
        ORT,
        "fails on a scalar",
        "Y = Pad (X, pads)",
        {"X": f32(1), "pads": np.zeros(0, np.int64)},
        {"Y": f32(1)},
        "there is nothing to pad",
    ),
    about(
        REFERENCE,
        "fails on no rows",
        "Y = Flatten <axis = 1> (X)",
        {"X": np.zeros((0, 2), F32)},
        {"Y": np.zeros((0, 2), F32)},
        "(d_0 × … × d_(axis−1), d_axis × … × d_n) is (0, 2)",
    ),
    about(
        REFERENCE,
        "fails without an axis in opset 1",
        "Y = Concat (A, B)",
        {"A": f32([[1]]), "B": f32([[2]])},
        {"Y": f32([[1, 2]])},
        "the default value is 1",
        1,
    ),
    about(
        REFERENCE,
        "fails in opset 1",
        "Y = Tile (X, tiles, axis)",
        {"X": f32([1, 2]), "tiles": f32(2), "axis": f32(0)},
        {"Y": f32([1, 2, 1, 2])},
        "two copies along the axis",
        1,
    ),
    about(
        ORT,
        "fails on a shape of int32",
        "Y = CenterCropPad (X, shape)",
        {"X": f32([1, 2, 3]), "shape": np.array([1], np.int32)},
        {"Y": f32([2])},
        "the shape is int32 or int64 (the function body compares it with one of int64)",
        18,
    ),
    about(
        REFERENCE,
        "pads strings with the number 0",
        "Y = CenterCropPad (X, shape)",
        {"X": np.array(["a"], object), "shape": np.array([2])},
        {"Y": np.array(["a", ""], object)},
        "the result has the type of the input; the empty string is what Pad adds by default",
        18,
    ),
    training(
        "fails where an empty split does not divide the axis",
        "Y, Z = com.microsoft.SplitTraining <axis = 0> (X, split)",
        {"X": f32([1, 2, 3]), "split": np.zeros(0, np.int64)},
        {"Y": f32([1, 2]), "Z": f32([3])},
        "the schema infers equal lengths, the first ones longer by 1 until the rest is used up",
    ),
)
