"""Findings about attention."""

from __future__ import annotations

import math

import numpy as np

from refgrad.conformance.findings.finding import ORT, REFERENCE, Finding, about, f32, model

F32 = np.float32

FINDINGS: tuple[Finding, ...] = (
    about(
        REFERENCE,
        "returns the capped product as the plain one",
        "Y, k, v, qk = Attention <softcap = 1.0, scale = 1.0, qk_matmul_output_mode = 0> (Q, K, V)",
        {"Q": f32([2]).reshape(1, 1, 1, 1), "K": f32([2]).reshape(1, 1, 1, 1), "V": f32([3]).reshape(1, 1, 1, 1)},
        {"Y": f32([3]).reshape(1, 1, 1, 1), "qk": f32([4]).reshape(1, 1, 1, 1)},
        "mode 0 is the output of the product of Q and K: 2·2",
        23,
    ),
    about(
        REFERENCE,
        "fails without keys",
        "Y = Attention (Q, K, V)",
        {"Q": np.ones((1, 1, 1, 1), F32), "K": np.ones((1, 1, 0, 1), F32), "V": np.ones((1, 1, 0, 1), F32)},
        {"Y": np.zeros((1, 1, 1, 1), F32)},
        "a sum over no values",
        23,
    ),
    about(
        ORT,
        "returns the lowest finite number for what the mask hides",
        "Y, k, v, qk = Attention <qk_matmul_output_mode = 2, scale = 1.0> (Q, K, V, mask)",
        {
            "Q": f32([1]).reshape(1, 1, 1, 1),
            "K": f32([1, 1]).reshape(1, 1, 2, 1),
            "V": f32([3, 4]).reshape(1, 1, 2, 1),
            "mask": np.array([[True, False]]),
        },
        {"Y": f32([3]).reshape(1, 1, 1, 1), "qk": f32([1, -np.inf]).reshape(1, 1, 1, 2)},
        "the function body adds −∞ where the mask is false",
        23,
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
    Finding(
        ORT,
        "Attention",
        "is off by 1e-8 in double",
        model("""
            <ir_version: 11, opset_import: ["" : 23]>
            attend (double[1, 1, 1, 2] q, double[1, 1, 2, 2] k, double[1, 1, 2, 1] v) => (double[1, 1, 1, 1] y) {
                y = Attention(q, k, v)
            }
        """),
        {
            "q": np.array([[[[1.0, 0.0]]]]),
            "k": np.array([[[[1.0, 0.0], [0.0, 0.0]]]]),
            "v": np.array([[[[1.0], [0.0]]]]),
        },
        {"y": np.array([[[[1 / (1 + math.exp(-1 / math.sqrt(2)))]]]])},
        proof="the scores are 1/√2 and 0, of which the softmax of the first is 1/(1 + e^(−1/√2))",
        tolerance=1e-12,
    ),
    Finding(
        ORT,
        "Attention",
        "is taken for one whose fourth output is a scalar, when it is optimized, where the rank of Q is not known",
        model("""
            <ir_version: 10, opset_import: ["" : 23]>
            attend (float[1, 1, 1, 1] X, int64[r] R, float[1, 1, 2, 1] K, float[1, 1, 2, 1] V) => (int64[n] S) {
                Q = Reshape (X, R)
                Y, present_key, present_value, scores = Attention (Q, K, V)
                S = Shape (scores)
            }
        """),
        {
            "X": f32([[[[1]]]]),
            "R": np.array([1, 1, 1, 1]),
            "K": f32([[[[2], [3]]]]),
            "V": f32([[[[1], [1]]]]),
        },
        {"S": np.array([1, 1, 1, 2])},
        proof="it is (batch_size, q_num_heads, q_sequence_length, total_sequence_length)",
        optimized=True,
    ),
)
