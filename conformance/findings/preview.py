"""Findings about the preview domains."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import REFERENCE, Finding, about

F32 = np.float32
STEP = {"R": F32(0.5), "T": np.int64(0)}
ONE = np.array([1], F32)

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "makes doubles of one tensor of floats",
        "X2, V2, H2 = ai.onnx.preview.training.Adam <alpha = 0.5, beta = 0.75, epsilon = 0.5> (R, T, X, G, V, H)",
        STEP | {"T": np.int64(1), "X": ONE, "G": ONE, "V": 0 * ONE, "H": 0 * ONE},
        {"X2": np.array([0.75], F32), "V2": np.array([0.5], F32), "H2": np.array([0.25], F32)},
        "the outputs have the types of the tensors; the step is 1/2·√(1 − 3/4)/(1 − 1/2)·1/2/(√(1/4) + 1/2) = 1/4",
        1,
    ),
    about(
        REFERENCE,
        "makes floats of two tensors of doubles",
        "X2, Y2, V2, W2, H2, I2 = ai.onnx.preview.training.Adam <alpha = 0.5, beta = 0.75, epsilon = 0.5> "
        "(R, T, X, Y, G, G, V, V, H, H)",
        STEP
        | {"X": np.array([1], np.float64), "Y": np.array([2], np.float64)}
        | {name: np.array([n], np.float64) for name, n in (("G", 1), ("V", 0), ("H", 0))},
        {"X2": np.array([0.75], np.float64), "Y2": np.array([1.75], np.float64)}
        | {name: np.array([n], np.float64) for name, n in (("V2", 0.5), ("W2", 0.5), ("H2", 0.25), ("I2", 0.25))},
        "the outputs have the types of the tensors; the step is 1/2·1/2/(√(1/4) + 1/2) = 1/4 where T is 0",
        1,
    ),
    about(
        REFERENCE,
        "makes doubles of floats where the learning rate is a double",
        "X2, V2 = ai.onnx.preview.training.Momentum "
        '<alpha = 0.5, beta = 0.5, norm_coefficient = 0.0, mode = "standard"> (R, T, X, G, V)',
        {"R": np.float64(0.5), "T": np.int64(0), "X": ONE, "G": ONE, "V": 0 * ONE},
        {"X2": np.array([0.5], F32), "V2": np.array([1], F32)},
        "the outputs have the types of the tensors; 1 − 1/2·1",
        1,
    ),
    about(
        REFERENCE,
        "makes NaN of a scale below 0",
        "Y = ai.onnx.preview.FlexAttention <scale = -1.0> (Q, K, V)",
        {"Q": np.array([[[[1]]]], F32), "K": np.array([[[[0], [np.log(3)]]]], F32), "V": np.array([[[[0], [1]]]], F32)},
        {"Y": np.array([[[[0.25]]]], F32)},
        "Scores = (Q @ K^T) * scale: the softmax of (0, −log 3) is (3/4, 1/4)",
        1,
    ),
    about(
        REFERENCE,
        "rounds the scale of doubles to float32",
        "Y = ai.onnx.preview.FlexAttention (Q, K, V)",
        {
            "Q": np.array([[[[1, 0]]]], np.float64),
            "K": np.array([[[[0, 0], [np.sqrt(2) * np.log(3), 0]]]], np.float64),
            "V": np.array([[[[0], [1]]]], np.float64),
        },
        {"Y": np.array([[[[0.75]]]], np.float64)},
        "the scale is 1/√2: the softmax of (0, log 3) is (1/4, 3/4)",
        1,
        tolerance=1e-12,
    ),
)
