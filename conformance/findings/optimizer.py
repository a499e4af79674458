"""Findings about optimizers."""

from __future__ import annotations

import numpy as np

from refgrad.conformance.findings.finding import REFERENCE, Finding, about, f32, training

F32 = np.float32
STEP = {"R": F32(0.5), "T": np.int64(0)}
ONE = np.array([1], F32)

FINDINGS: tuple[Finding, ...] = (
    training(
        "updates the weights where update_signal is false",
        "T_next, m_next, v_next, W_next = com.microsoft.AdamOptimizer (R, T, W, G, m, v, , , , update_signal)",
        {
            "R": np.array(0.5, F32),
            "T": np.array(3),
            "W": f32([1, 2]),
            "G": f32([3, 4]),
            "m": f32([0, 0]),
            "v": f32([1, 1]),
            "update_signal": np.array(False),
        },
        {"T_next": np.array(3), "m_next": f32([0, 0]), "v_next": f32([1, 1]), "W_next": f32([1, 2])},
        "update_signal: this signal indicates if weight tensors should be updated",
    ),
    training(
        "gives a vector where its shape inference says a scalar",
        "done = com.microsoft.Group (X)",
        {"X": f32([1])},
        {"done": np.array(True)},
        "the schema infers the shape [] of the result",
    ),
    training(
        "fails where an input's memory cannot become the output's, as with an input of the graph",
        "Y = com.microsoft.PassThrough (X)",
        {"X": f32([1])},
        {"Y": f32([1])},
        "barrier op with value pass through, outputs = inputs",
    ),
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
)
